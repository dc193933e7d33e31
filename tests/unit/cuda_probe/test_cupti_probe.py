"""The CUPTI probe without a GPU: a stand-in driver feeds real record layouts to the real parser and ring."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne import cuda_probe
from lanterne.cuda_probe import builder as probe_build

pytestmark = pytest.mark.skipif(
    not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="no C++ compiler on this machine"
)

DRIVER = """
import ctypes, json, sys
from lanterne.cuda_probe.abi import Kinds, Probe
probe = Probe(sys.argv[1])
standin = ctypes.CDLL(sys.argv[2])
standin.standin_emit.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int]
standin.standin_emit.restype = ctypes.c_uint64
out = {}
exec(sys.argv[3])
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The probe and the stand-in, which is also linked under the names that the probe opens."""
    os.environ.setdefault("LANTERNE_CACHE", str(tmp_path_factory.mktemp("cache")))
    result = probe_build.build(tests=True, device=False)
    assert result.built, result.reason
    library = Path(result.library)
    names = tmp_path_factory.mktemp("standin")
    for name in ("libcupti.so.13", "libcuda.so.1"):
        (names / name).symlink_to(library.parent / probe_build.STANDIN)
    return library, names


def drive(libraries: tuple[Path, Path], code: str, **environment: str) -> dict[str, Any]:
    library, names = libraries
    env = {**os.environ, "LD_LIBRARY_PATH": str(names), **environment}
    command = [sys.executable, "-c", DRIVER, str(library), str(names / "libcupti.so.13"), code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert isinstance(loaded, dict)
    return loaded


def test_kernels_arrive_with_names_times_and_sizes(libraries: tuple[Path, Path]) -> None:
    out = drive(
        libraries,
        "out['status']=probe.open(Kinds.KERNELS).word; standin.standin_emit(10, 50000, 40)\n"
        "rows=list(probe.drain()); out['rows']=len(rows); out['names']=len({r.name for r in rows})\n"
        "out['first']=[rows[0].kind, rows[0].name, rows[0].end_ns-rows[0].start_ns, rows[0].stream, rows[0].size]\n"
        "out['counters']=probe.counters(); out['lost']=probe.lost",
    )
    assert out["status"] == "collecting"
    assert (out["rows"], out["names"], out["lost"]) == (50_000, 40, 0)
    assert out["first"] == ["kernel", "gemm_kernel_0<float>", 1000, 7, 8]
    assert out["counters"]["records"] == 50_000


def test_every_kind_of_record_is_read(libraries: tuple[Path, Path]) -> None:
    out = drive(
        libraries,
        "probe.open(Kinds(63))\nfor kind in (10, 1, 2, 38, 51, 17): standin.standin_emit(kind, 3, 1)\n"
        "out['kinds']=[r.kind for r in probe.drain()]; out['overhead']=probe.counters()['cupti_overhead_ns']",
    )
    assert out["kinds"] == [k for k in ("kernel", "memcpy", "memset", "synchronization", "graph") for _ in range(3)]
    assert out["overhead"] == 150


def test_a_range_is_whole_when_it_ends(libraries: tuple[Path, Path]) -> None:
    out = drive(
        libraries,
        "probe.open(Kinds.RANGES | Kinds.KERNELS)\nstandin.standin_emit(12, 7, 2)\nstandin.standin_emit(10, 1, 1)\n"
        "taken=probe.take(99)\nout['rows']=sorted([a.kind, a.name] for a in taken.activities)\n"
        "out['long']=min(a.end_ns-a.start_ns for a in taken.activities if a.kind == 'range') >= 3000\n"
        "out['totals']=[t[0] for t in taken.totals]; out['busy']=taken.busy_ns",
    )
    assert out["rows"] == [["kernel", "gemm_kernel_0<float>"], *[["range", "gemm_kernel_0<float>"]] * 3]
    assert out["long"]  # the seventh began and never ended
    assert (out["totals"], out["busy"]) == (["gemm_kernel_0<float>"], 1000)  # a range is no work of the device


def test_the_ring_is_bounded_and_counts_what_it_overwrote(libraries: tuple[Path, Path]) -> None:
    out = drive(
        libraries,
        "probe.open()\nstandin.standin_emit(10, 70000, 1)\nrows=list(probe.drain())\n"
        "out.update(rows=len(rows), lost=probe.lost, last=rows[-1].correlation)",
    )
    assert out == {"rows": 65_536, "lost": 70_000 - 65_536, "last": 69_999}


def test_no_free_buffer_is_counted_not_allocated(libraries: tuple[Path, Path]) -> None:
    out = drive(
        libraries,
        "probe.open()\nout['hoarded']=standin.standin_hoard(99)\nout['sent']=standin.standin_emit(10, 10, 1)\n"
        "out['starved']=probe.counters()['starved_buffers']",
    )
    assert out["hoarded"] == 16
    assert out["sent"] == 0
    assert out["starved"] >= 2


def test_a_window_can_be_opened_again(libraries: tuple[Path, Path]) -> None:
    out = drive(
        libraries,
        "out['words']=[probe.open().word, probe.close().word, probe.open().word]\nstandin.standin_emit(10, 5, 1)\n"
        "out['rows']=len(list(probe.drain()))",
    )
    assert out == {"words": ["collecting", "idle", "collecting"], "rows": 5}


@pytest.mark.parametrize(
    ("environment", "word", "says"),
    [
        ({"STANDIN_CUINIT": "100"}, "no-device", "no device"),
        ({"STANDIN_CUINIT": "999"}, "no-driver", "999"),
        ({"STANDIN_DEVICES": "0"}, "no-device", "no device is visible"),
        ({"STANDIN_BUSY": "CUPTI for Kineto"}, "busy", "CUPTI for Kineto"),
        ({"STANDIN_DENIED": "1"}, "denied", "privileges"),
    ],
)
def test_why_nothing_is_collected(
    libraries: tuple[Path, Path], environment: dict[str, str], word: str, says: str
) -> None:
    out = drive(libraries, "out['word']=probe.open().word; out['reason']=probe.reason", **environment)
    assert out["word"] == word
    assert says in out["reason"]


def test_a_foreign_device_clock_is_brought_to_ours_within_its_error(libraries: tuple[Path, Path]) -> None:
    out = drive(
        libraries,
        "import time\nprobe.open()\na=time.monotonic_ns()\nstandin.standin_emit(10, 1, 1)\nb=time.monotonic_ns()\n"
        "row=next(iter(probe.drain())); offset,error=probe.clock\n"
        "out.update(offset=offset, error=error, early=row.end_ns-a, late=b-row.end_ns)",
        STANDIN_CLOCK="own",
    )
    assert abs(out["offset"] + 5_000_000_000) <= out["error"]
    assert out["early"] >= -out["error"]
    assert out["late"] >= -out["error"]


@settings(max_examples=5, deadline=None)
@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=8))
def test_any_mix_of_batches_arrives_in_order(libraries: tuple[Path, Path], sizes: list[int]) -> None:
    out = drive(
        libraries,
        f"probe.open()\nseen=[]\nfor n in {sizes}:\n    standin.standin_emit(10, n, 7)\n"
        "    seen.append([r.correlation for r in probe.drain()])\n"
        "out['ok']=[s == list(range(len(s))) for s in seen]; out['sizes']=[len(s) for s in seen]",
    )
    assert all(out["ok"])
    assert out["sizes"] == sizes


def test_status_without_a_driver_is_one_plain_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has an NVIDIA driver")
    monkeypatch.setenv("LANTERNE_CACHE", str(tmp_path))
    monkeypatch.setattr(probe_build, "find_nvcc", lambda: "")
    assert probe_build.build().built
    found = cuda_probe.status()
    assert (found["built"], found["collecting"], found["status"]) == (True, False, "no-driver")
    assert "no NVIDIA driver" in found["reason"]


def test_without_a_compiler_the_answer_is_clear(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("LANTERNE_CACHE", str(tmp_path))
    result = cuda_probe.build()
    assert result["built"] is False
    assert "no C++ compiler" in result["reason"]
    assert len(cuda_probe.describe(result).splitlines()) == 1
    assert cuda_probe.status()["status"] == "not-built"


def test_another_system_than_linux_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    result = cuda_probe.build()
    assert cuda_probe.describe(result) == f"probe: not built: {result['reason']}"
    assert "this is darwin" in result["reason"]
    assert (cuda_probe.status()["collecting"], cuda_probe.status()["reason"]) == (False, result["reason"])
