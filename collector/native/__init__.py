"""Building and loading the collective tap (``tap.cpp``): compiled once a machine against the torch that is there.

The shared object is cached by a hash of source, torch version, ABI and compiler (:mod:`lanterne.native`).
``python -m lanterne.collector.native`` does it ahead of time.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

from lanterne import native
from lanterne.native import COMPILE_TIMEOUT_S, compiler

__all__ = ["SOURCE", "TapUnavailable", "build", "compiler", "library_path", "load"]

SOURCE = Path(__file__).with_name("tap.cpp")
TapUnavailable = native.BuildFailed


def _torch_home() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise TapUnavailable("torch is not installed: the collective tap is built against its headers")
    return Path(spec.origin).parent


def _flags(home: Path) -> list[str]:
    import torch

    return [
        *native.FLAGS, "-std=c++20", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include",
        f"-L{home}/lib", f"-Wl,-rpath,{home}/lib",
    ]  # fmt: skip


def library_path() -> Path:
    """Where the shared object for this torch and this source is, or would be. Raises TapUnavailable without torch."""
    import torch

    home = _torch_home()
    recipe = (SOURCE.read_text(encoding="utf-8"), torch.__version__, str(home), *_flags(home))
    return native.target(f"tap-{torch.__version__}", recipe)


def build(wait_s: float = COMPILE_TIMEOUT_S) -> Path:
    """The shared object, compiled if need be; others compiling the same one are waited for up to ``wait_s`` seconds.

    Raises TapUnavailable with the reason: no compiler, compilation failed (with its last lines), or not ready in time.
    """
    arguments = [*_flags(_torch_home()), str(SOURCE), "-ltorch_cpu", "-lc10"]
    return native.build(library_path(), arguments, wait_s)


def load(library: Path) -> ctypes.CDLL:
    """Load a built tap. Raises TapUnavailable when the dynamic loader refuses it."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise TapUnavailable(f"{library.name} cannot be loaded: {error}") from error
    loaded.lanterne_tap_start.argtypes, loaded.lanterne_tap_start.restype = [ctypes.c_char_p], ctypes.c_int
    loaded.lanterne_tap_enable.argtypes, loaded.lanterne_tap_enable.restype = [ctypes.c_int], None
    return loaded
