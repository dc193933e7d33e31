"""What a rank tells about itself once: versions, settings that change results or speed, seeds."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from importlib import metadata
from typing import Any

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "CUBLAS_", "CUDA_", "PYTORCH_", "TORCH_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "AUTH")
_PACKAGES = ("torch", "numpy", "transformers", "lightning", "accelerate", "deepspeed", "triton", "lanterne")
VARIABLES_MAX = 48


def environment_facts() -> dict[str, Any]:
    """Versions (``version.<package>``), variables that libraries read (``env.<name>``), and a digest over both.

    Variables whose name hints at a secret are left out.
    """
    facts: dict[str, Any] = {"version.python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            facts[f"version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["cuda"] = str(torch.version.cuda or "")
        facts["torch_threads"] = torch.get_num_threads()
        facts["matmul_precision"] = torch.get_float32_matmul_precision()
        facts["deterministic"] = torch.are_deterministic_algorithms_enabled()
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
            facts["tf32"] = bool(torch.backends.cuda.matmul.allow_tf32)
    facts["cpus"] = len(os.sched_getaffinity(0))
    chosen = sorted(k for k in os.environ if k.startswith(_PREFIXES) and not any(s in k for s in _SECRET))
    for name in chosen[:VARIABLES_MAX]:
        facts[f"env.{name}"] = os.environ[name][:256]
    per_rank = {"env.CUDA_VISIBLE_DEVICES"}
    same = sorted((k, str(v)) for k, v in facts.items() if k not in per_rank)
    facts["fingerprint"] = hashlib.blake2b(repr(same).encode(), digest_size=8).hexdigest()
    return facts


def seed_facts() -> dict[str, Any]:
    """The seeds that this rank trains with, as far as the libraries tell them."""
    facts: dict[str, Any] = {}
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch_seed"] = int(torch.initial_seed())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            facts["cuda_seed"] = int(torch.cuda.initial_seed())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        facts["numpy_state"] = hashlib.blake2b(repr(state["state"]).encode(), digest_size=8).hexdigest()
    random = sys.modules.get("random")
    if random is not None:
        facts["python_state"] = hashlib.blake2b(repr(random.getstate()).encode(), digest_size=8).hexdigest()
    facts["hash_seed"] = os.environ.get("PYTHONHASHSEED", "random")
    return facts
