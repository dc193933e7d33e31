"""The native tests of the probes: ctest, and the same programs under valgrind."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lanterne.cuda_probe import builder

NAMES = ("kernels", "starved", "reopened", "ranges", "nccl")

pytestmark = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("ctest") and any(map(shutil.which, ("c++", "g++", "clang++")))),
    reason="needs cmake and a C++ compiler",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("native")
    flags = ["-DLANTERNE_PROBE_TESTS=ON", "-DLANTERNE_WITH_CUDA=OFF"]
    for command in (["cmake", "-S", str(builder.SOURCES), "-B", str(work), *flags], ["cmake", "--build", str(work)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stdout + done.stderr
    return work


@pytest.mark.slow
def test_ctest_passes(built: Path) -> None:
    done = subprocess.run(
        ["ctest", "--output-on-failure"], cwd=built, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    assert f"0 tests failed out of {len(NAMES)}" in done.stdout


@pytest.mark.slow
def test_no_invalid_memory_access_and_no_leak(built: Path) -> None:
    if not shutil.which("valgrind"):
        pytest.skip("valgrind is not installed (make system-packages)")
    done = subprocess.run(
        ["ctest", "-T", "memcheck", "--output-on-failure"],
        cwd=built, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"0 tests failed out of {len(NAMES)}" in done.stdout
    for log in (built / "Testing" / "Temporary").glob("MemoryChecker.*.log"):
        assert "definitely lost" not in log.read_text(encoding="utf-8"), log


@pytest.mark.slow
def test_a_build_that_was_cut_short_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = builder.build(device=False)
    assert first.built, first.reason
    assert builder.build(device=False).cached
    Path(first.library).write_bytes(b"\x7fELF")
    again = builder.build(device=False)
    assert (again.built, again.cached) == (True, False)
    assert Path(again.library).stat().st_size > 1000
