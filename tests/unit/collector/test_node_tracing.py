"""Perf counters of this very machine where it permits them, and bpftrace's lines from a stand-in that prints them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from lanterne.collector.sources.node_tracing import BpfTrace, Perf, bpf_absent, newest, perf_absent, quantile

STATUS = "Name:\tagent\nCapEff:\t{:016x}\n"
HISTOGRAM = [
    {"min": 4, "max": 7, "count": 90},
    {"min": 8, "max": 15, "count": 8},
    {"min": 1024, "max": 2047, "count": 2},
]


def tree(root: Path, paranoid: str, capabilities: int = 0) -> Path:
    for path, text in (
        ("proc/sys/kernel/perf_event_paranoid", paranoid),
        ("proc/self/status", STATUS.format(capabilities)),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("paranoid", "capabilities", "absent"),
    [("2", 0, True), ("0", 0, False), ("-1", 0, False), ("2", 1 << 38, False), ("4", 1 << 21, False), ("x", 0, True)],
)
def test_what_the_kernel_permits(tmp_path: Path, paranoid: str, capabilities: int, absent: bool) -> None:
    assert bool(perf_absent(tree(tmp_path, paranoid, capabilities))) is absent


def test_a_process_that_is_not_in_the_tree_has_no_capability(tmp_path: Path) -> None:
    root = tree(tmp_path, "2", 1 << 38)
    (root / "proc/self/status").unlink()
    assert "perf_event_paranoid is 2" in perf_absent(root)


def test_counters_of_this_machine() -> None:
    perf = Perf(Path("/"))
    if perf.absent:
        pytest.skip(f"perf events may not be read here: {perf.absent}")
    try:
        assert perf.read(0.0) == []
        for _ in range(50):
            time.sleep(0.002)  # each sleep is a context switch
        found = {name: value for name, value, _ in perf.read(0.1)}
    finally:
        perf.close()
    assert found["system.cpu.context_switches"] > 100
    assert found["system.cpu.migrations"] >= 0


def test_bpftrace_says_why_it_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bpf_absent(tmp_path, True) == "bpftrace is not installed"
    program = tmp_path / "bpftrace"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    root = tree(tmp_path / "root", "2")
    assert "root or CAP_BPF" in bpf_absent(root, True)
    root = tree(tmp_path / "root", "2", 1 << 39)
    assert "--trace" in bpf_absent(root, False)
    assert bpf_absent(root, True) == ""


def test_lines_of_histograms_become_quantiles() -> None:
    lines = [
        b'{"type": "attached_probes", "data": {"probes": 6}}',
        json.dumps({"type": "hist", "data": {"@run_delay_us": HISTOGRAM}}).encode(),
        json.dumps({"type": "hist", "data": {"@block_us": []}}).encode(),
        b'{"type": "map", "data": {"@retransmits": 6}}',
        b"not json", b"[]",
    ]  # fmt: skip
    assert {n: v for n, v, _ in newest(lines)} == {
        "system.cpu.run_delay": pytest.approx(2047e-6), "system.disk.latency_p99": 0.0,
        "system.network.retransmit_rate": 3.0,
    }  # fmt: skip
    assert quantile(HISTOGRAM, 0.5) == 7


def test_a_child_is_read_as_it_prints_and_said_when_it_ends() -> None:
    line = json.dumps({"type": "map", "data": {"@retransmits": 4}})
    script = (
        f"import sys, time; print('{line}', flush=True); print('permission denied', file=sys.stderr); time.sleep(0.5)"
    )
    part = BpfTrace(Path("/"), asked=True, command=(sys.executable, "-c", script), absent="")
    found = part.read(0.0) + part.read(1.0)
    assert found == []
    for _ in range(200):
        found += part.read(1.0) if not part.absent else []
        if part.absent:
            break
        time.sleep(0.05)
    assert found == [("system.network.retransmit_rate", 2.0, "")]
    assert part.absent == "bpftrace ended with 0: permission denied"
    part.close()
