"""Building and loading the collective tap (``tap.cpp``): compiled once a machine against the torch that is there.

The shared object is cached by a hash of source, torch version, ABI and compiler, under ``$XDG_CACHE_HOME/lanterne``.
The first process compiles under a lock; ``python -m lanterne.collector.native`` does it ahead of time.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from lanterne.errors import LanterneError

SOURCE = Path(__file__).with_name("tap.cpp")
COMPILE_TIMEOUT_S = 600.0


class TapUnavailable(LanterneError):
    """The tap cannot be built or loaded here; the message says why."""


def compiler() -> str | None:
    """The C++ compiler to use: ``$CXX``, else g++, c++ or clang++ on the path."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def _torch_home() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise TapUnavailable("torch is not installed: the collective tap is built against its headers")
    return Path(spec.origin).parent


def cache_dir() -> Path:
    """Where shared objects are kept; a private folder under the temporary one where no home can be written."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lanterne"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    except OSError:
        pass
    root = Path(tempfile.gettempdir()) / f"lanterne-cache-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise TapUnavailable(f"{root} belongs to another user; set XDG_CACHE_HOME to a folder of yours")
    return root


def _flags(home: Path) -> list[str]:
    import torch

    return [
        "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-std=c++20", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include",
        f"-L{home}/lib", f"-Wl,-rpath,{home}/lib",
    ]  # fmt: skip


def library_path() -> Path:
    """Where the shared object for this torch and this source is, or would be. Raises TapUnavailable without torch."""
    import torch

    home = _torch_home()
    recipe = "\0".join((SOURCE.read_text(encoding="utf-8"), torch.__version__, str(home), *_flags(home)))
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    return cache_dir() / f"tap-{torch.__version__}-{key}.so"


def build(wait_s: float = COMPILE_TIMEOUT_S) -> Path:
    """The shared object, compiled if need be; others compiling the same one are waited for up to ``wait_s`` seconds.

    Raises TapUnavailable with the reason: no compiler, compilation failed (with its last lines), or not ready in time.
    """
    target = library_path()
    if target.exists():
        return target
    found = compiler()
    if found is None:
        raise TapUnavailable("no C++ compiler: install g++ or set CXX, or run where the cache is already filled")
    deadline = time.monotonic() + wait_s
    with target.with_suffix(".lock").open("w", encoding="ascii") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TapUnavailable(f"another process is still compiling {target.name}") from None
                time.sleep(0.1)
        if not target.exists():
            _compile(found, target, max(1.0, deadline - time.monotonic()))
    return target


def _compile(found: str, target: Path, timeout_s: float) -> None:
    home = _torch_home()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    command = [found, *_flags(home), str(SOURCE), "-o", str(temporary), "-ltorch_cpu", "-lc10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            last = " | ".join(done.stderr.strip().splitlines()[-3:])
            raise TapUnavailable(f"{Path(found).name} failed with code {done.returncode}: {last[:500]}")
        os.replace(temporary, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TapUnavailable(f"{Path(found).name} could not compile the tap: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load(library: Path) -> ctypes.CDLL:
    """Load a built tap. Raises TapUnavailable when the dynamic loader refuses it."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise TapUnavailable(f"{library.name} cannot be loaded: {error}") from error
    loaded.lanterne_tap_start.argtypes, loaded.lanterne_tap_start.restype = [ctypes.c_char_p], ctypes.c_int
    loaded.lanterne_tap_enable.argtypes, loaded.lanterne_tap_enable.restype = [ctypes.c_int], None
    return loaded
