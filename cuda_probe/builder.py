"""Compile the probes on this host: CMake where it is there, else the C++ compiler alone.

The sources travel in the wheel. A build goes to a cache folder named by a hash of sources and compiler; it is
made under a temporary name and renamed, so that two ranks that build at once do not disturb each other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY = "liblanterne_cupti.so"
NCCL_LIBRARY = "liblanterne_nccl.so"
STATS_LIBRARY = "liblanterne_stats.so"
STANDIN = "libstandin_cuda.so"
STANDIN_NCCL = "libstandin_nccl.so"
_PLAIN = ((LIBRARY, "cupti_probe.cpp"), (NCCL_LIBRARY, "nccl_probe.cpp"), (STATS_LIBRARY, "stats_cpu.cpp"))
_PLAIN_TESTS = ((STANDIN, "standin_cuda.cpp"), (STANDIN_NCCL, "standin_nccl.cpp"))
TIMEOUT_S = 300
NOT_LINUX = "the probes are for Linux, where CUDA and NCCL run; this is {}: nothing to build, all else works"
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")


@dataclass(slots=True, kw_only=True)
class BuildResult:
    """What a build gave. ``missing`` names tools that were not found and what each would add."""

    built: bool = False
    library: str = ""
    compiler: str = ""
    cmake: str = ""
    nvcc: str = ""
    cached: bool = False
    reason: str = ""
    missing: list[str] = field(default_factory=list)


def cache_folder() -> Path:
    """``LANTERNE_CACHE``, else ``$XDG_CACHE_HOME/lanterne``, else ``~/.cache/lanterne``."""
    root = os.environ.get("LANTERNE_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lanterne"


def _compiler() -> str:
    return next((p for c in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if c and (p := shutil.which(c))), "")


def find_nvcc() -> str:
    """Path of nvcc, or an empty text."""
    found = shutil.which("nvcc")
    candidates = [Path(t) / "bin" / "nvcc" for t in (os.environ.get("CUDA_HOME", ""), *TOOLKITS) if t]
    return found or next((str(p) for p in candidates if p.exists()), "")


def _key(compiler: str, tests: bool, device: bool) -> str:
    digest = hashlib.sha256(f"{compiler}|{tests}|{device and find_nvcc()}".encode())
    for path in sorted(
        p for p in SOURCES.rglob("*") if p.suffix in {".cpp", ".h", ".cu"} or p.name == "CMakeLists.txt"
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def target_folder(*, tests: bool = False, device: bool = True) -> Path:
    """Where a build of these very sources with this compiler lies or would lie."""
    return cache_folder() / f"probe-{_key(_compiler(), tests, device)}"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])


def _with_cmake(cmake: str, compiler: str, out: Path, tests: bool, device: bool) -> None:
    with tempfile.TemporaryDirectory() as work:
        _run(
            [
                cmake, "-S", str(SOURCES), "-B", work, "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_CXX_COMPILER={compiler}",
                f"-DLANTERNE_PROBE_TESTS={'ON' if tests else 'OFF'}",
                f"-DLANTERNE_WITH_CUDA={'ON' if device and find_nvcc() else 'OFF'}",
                f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}",
            ]
        )  # fmt: skip
        _run([cmake, "--build", work, "--parallel", "2"])


def _with_compiler(compiler: str, out: Path, tests: bool) -> None:
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{SOURCES / 'include'}"]
    for library, source in (*_PLAIN, *(_PLAIN_TESTS if tests else ())):
        _run([compiler, *flags, str(SOURCES / "src" / source), "-o", str(out / library), "-ldl", "-pthread"])


def build(*, tests: bool = False, device: bool = True) -> BuildResult:
    """Compile, or find the build of the same sources; never raises for a missing tool or a failed build.

    A build that does not load any more (a full disk, a cut copy) is made anew.

    ``tests`` adds the stand-in drivers; ``device`` compiles the CUDA kernels where nvcc is found.
    """
    compiler, cmake, nvcc = _compiler(), shutil.which("cmake") or "", find_nvcc()
    result = BuildResult(compiler=compiler, cmake=cmake, nvcc=nvcc)
    if sys.platform != "linux":
        result.reason = NOT_LINUX.format(sys.platform)
        return result
    if not nvcc:
        result.missing.append("nvcc (a CUDA toolkit): the device parts are left out, the host part is built")
    if not compiler:
        result.missing = ["a C++17 compiler (g++ or clang++)"]
        result.reason = "no C++ compiler was found; install g++ or clang++ and run this again"
        return result
    target = target_folder(tests=tests, device=device)
    result.library = str(target / LIBRARY)
    if Path(result.library).exists() and _loads(target):
        result.built = result.cached = True
        return result
    try:
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            out = Path(scratch) / "out"
            out.mkdir()
            if cmake:
                _with_cmake(cmake, compiler, out, tests, device)
            else:
                _with_compiler(compiler, out, tests)
            _publish(out, target)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        result.reason = f"the build failed: {error}"
        result.library = ""
        return result
    result.built = True
    return result


def _loads(target: Path) -> bool:
    """Do the libraries load? Asked in a child: a damaged one may take its process down."""
    libraries = [str(target / library) for library, _ in _PLAIN]
    code = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]"
    return subprocess.run([sys.executable, "-c", code, *libraries], capture_output=True, check=False).returncode == 0


def _publish(out: Path, target: Path) -> None:
    try:
        out.rename(target)
    except OSError:
        if not (target / LIBRARY).exists():
            raise
