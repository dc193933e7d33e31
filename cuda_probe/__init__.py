"""Compiled probes behind a C ABI: build them on this host, ask them what they see and why not.

Nothing here needs CUDA: without a device the answer is a status word and a reason in plain words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lanterne.cuda_probe import builder as _build
from lanterne.cuda_probe.stats import Stats

STATUS_TIMEOUT_S = 30

__all__ = ["available", "build", "describe", "nccl_plugin", "probes", "status"]

DEVICE_NODE = Path("/dev/nvidiactl")


def build() -> dict[str, Any]:
    """Compile the probes (see :mod:`lanterne.cuda_probe.builder`); the result as plain JSON."""
    return asdict(_build.build())


def available() -> bool:
    """Is there a build of these very sources?"""
    return (_build.target_folder() / _build.LIBRARY).exists()


def nccl_plugin() -> str:
    """The built NCCL plugin where this machine has an NVIDIA device; empty where there is no use for it."""
    path = _build.target_folder() / _build.NCCL_LIBRARY
    return str(path) if DEVICE_NODE.exists() and path.exists() else ""


def status() -> dict[str, Any]:
    """What each probe would collect now, and why not where it would not.

    The probe is opened and closed in a child process, so that a faulty driver cannot take this one down.
    Keys: ``built``, ``collecting``, ``status`` (a word of :class:`lanterne.cuda_probe.abi.Status`), ``reason``,
    ``cupti_version``, ``clock_error_ns``, ``nvcc``.
    """
    base: dict[str, Any] = {"built": available(), "collecting": False, "nvcc": _build.find_nvcc()}
    if sys.platform != "linux":
        return {**base, "status": "no-cupti", "reason": _build.NOT_LINUX.format(sys.platform)}
    if not base["built"]:
        return {**base, "status": "not-built", "reason": "not compiled yet; run: lanterne probe build"}
    command = [sys.executable, "-m", "lanterne.cuda_probe.check", str(_build.target_folder() / _build.LIBRARY)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STATUS_TIMEOUT_S, check=False)
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {**base, "status": "error", "reason": f"the driver did not answer within {STATUS_TIMEOUT_S} s"}
    except (ValueError, IndexError):
        return {**base, "status": "error", "reason": f"the check ended with {done.returncode}: {done.stderr[-300:]}"}
    return {**base, **found}


def probes(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each probe with a status word and the reason: ``cupti`` from :func:`status`, ``nccl`` and ``stats`` by file."""
    folder = _build.target_folder()
    rows = [{"probe": "cupti", "status": str(found["status"]), "reason": str(found["reason"])}]
    plugin, stats = folder / _build.NCCL_LIBRARY, folder / _build.STATS_LIBRARY
    if not plugin.exists():
        rows.append({"probe": "nccl", "status": "not-built", "reason": "run: lanterne probe build"})
    elif os.environ.get("NCCL_PROFILER_PLUGIN") == str(plugin):
        rows.append({"probe": "nccl", "status": "set", "reason": "NCCL loads it with the first communicator"})
    elif nccl_plugin():
        rows.append({"probe": "nccl", "status": "ready", "reason": "lanterne run names it to NCCL"})
    else:
        says = f"no NVIDIA device here ({DEVICE_NODE}); where there is one, lanterne run names it to NCCL"
        rows.append({"probe": "nccl", "status": "no-device", "reason": says})
    if not stats.exists():
        rows.append({"probe": "stats", "status": "not-built", "reason": "run: lanterne probe build"})
    elif Stats(stats).has_cuda:
        rows.append({"probe": "stats", "status": "ready", "reason": "CPU and device kernels are built"})
    else:
        rows.append({"probe": "stats", "status": "cpu-only", "reason": "built without nvcc: no device kernel"})
    return rows


def describe(result: Mapping[str, Any]) -> str:
    """A build result, or a status with its ``probes``, for people: one line a fact."""
    lines = []
    if "compiler" in result:
        how = "found in the cache" if result["cached"] else "compiled"
        lines.append(
            f"probe: {how}: {result['library']}" if result["built"] else f"probe: not built: {result['reason']}"
        )
        if result["built"]:
            lines += [f"missing: {tool}" for tool in result["missing"]]
    else:
        lines += [f"{row['probe']}: {row['status']}: {row['reason']}" for row in result["probes"]]
    return "\n".join(lines)
