"""C++ sources of ours, compiled once a machine at first use; each user has a way without them.

A shared object is cached under ``$XDG_CACHE_HOME/lanterne`` by a hash of what it is made from. The first process
compiles under a lock and publishes with a rename; the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lanterne.errors import LanterneError

COMPILE_TIMEOUT_S = 600.0
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden")


class BuildFailed(LanterneError):
    """A library cannot be built or loaded here; the message says why."""


def compiler() -> str | None:
    """The C++ compiler to use: ``$CXX``, else g++, c++ or clang++ on the path."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lanterne"


def cache_dir() -> Path:
    """Where shared objects are kept; a private folder under the temporary one where no home can be written.

    Raises :class:`BuildFailed` when that private folder is another user's.
    """
    root = _home()
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    except OSError:
        pass
    root = Path(tempfile.gettempdir()) / f"lanterne-cache-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise BuildFailed(f"{root} belongs to another user; set XDG_CACHE_HOME to a folder of yours")
    return root


def target(name: str, recipe: Sequence[str]) -> Path:
    """Where the library ``name`` made from ``recipe`` (sources, flags, versions: their texts) is, or would be."""
    file = f"{name}-{hashlib.sha256(chr(0).join(recipe).encode()).hexdigest()[:16]}.so"
    ready = _home() / file  # as in a container, whose home cannot be written
    return ready if ready.exists() else cache_dir() / file


def build(library: Path, arguments: Sequence[str], wait_s: float = COMPILE_TIMEOUT_S) -> Path:
    """``library``, compiled with ``arguments`` if need be; who else compiles it is waited for up to ``wait_s`` seconds.

    Raises :class:`BuildFailed` with the reason: no compiler, compilation failed (with its last lines), or not ready in
    time.
    """
    if library.exists():
        return library
    found = compiler()
    if found is None:
        raise BuildFailed("no C++ compiler: install g++ or set CXX, or run where the cache is already filled")
    deadline = time.monotonic() + wait_s
    with library.with_suffix(".lock").open("w", encoding="ascii") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildFailed(f"another process is still compiling {library.name}") from None
                time.sleep(0.1)
        if not library.exists():
            _compile(found, library, arguments, max(1.0, deadline - time.monotonic()))
    return library


def _compile(found: str, library: Path, arguments: Sequence[str], timeout_s: float) -> None:
    temporary = library.with_name(f".{library.name}.{os.getpid()}")
    try:
        done = subprocess.run(
            [found, *arguments, "-o", str(temporary)], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            last = " | ".join(done.stderr.strip().splitlines()[-3:])
            raise BuildFailed(f"{Path(found).name} failed with code {done.returncode}: {last[:500]}")
        os.replace(temporary, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{Path(found).name} could not compile {library.name}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
