"""The kernel log: what a line proves, and that only the kernel is believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lanterne.collector.sources.kernel_log import KMSG, KernelLog, recognise
from lanterne.collector.sources.node_findings import judge

LINES = [
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", "xid", "device_fault", "PCI:0000:3b:00"),
    ("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU Fault", "xid", None, "PCI:0000:3b:00"),
    ("NVRM: GPU at PCI:0000:3b:00.0 has fallen off the bus.", "gpu_lost", "device_fault", "0000:3b:00.0"),
    ("Out of memory: Killed process 42 (python) total-vm:1kB", "host_oom", "out_of_memory", None),
    ("CPU3: Package temperature above threshold, cpu clock throttled", "thermal_throttle", "thermal_throttle", "CPU3"),
    ("mlx5_core 0000:ca:00.0 eth1: Link down", "link_down", "network_failure", "eth1"),
    ("nfs: server fs1.local not responding, still trying", "storage_slow", "storage_slow", "fs1.local"),
    ("INFO: task python:77 blocked for more than 120 seconds.", "storage_slow", "storage_slow", None),
]


@pytest.mark.parametrize(("line", "event", "category", "device"), LINES)
def test_lines_that_say_something(line: str, event: str, category: str | None, device: str | None) -> None:
    found = recognise(line)
    assert found is not None
    assert (found.event, found.category, found.attributes.get("device")) == (event, category, device)
    assert [f.category for f in judge([], [found], "h", has_job=False)] == ([category] if category else [])


@pytest.mark.parametrize("line", ["eth0: Link up", "python[7]: segfault at 0", "usb 1-1: new device", ""])
def test_other_lines_say_nothing(line: str) -> None:
    assert recognise(line) is None


def test_a_file_is_followed_also_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text(f"{LINES[0][0]}\nhalf of NVRM: Xid (PCI:1)", encoding="utf-8")
    log = KernelLog(path)
    assert [e.event for e in log.poll()] == ["xid"]
    assert log.poll() == []
    with path.open("a", encoding="utf-8") as file:
        file.write(": 48, pid=1, DBE\n")
    assert [e.attributes["xid"] for e in log.poll()] == [48]
    path.unlink()
    path.write_text(LINES[5][0] + "\n", encoding="utf-8")
    assert [e.event for e in log.poll()] == ["link_down"]
    log.close()


def test_a_log_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert "No such file" in KernelLog(tmp_path / "none").absent


@pytest.mark.skipif(not os.access(KMSG, os.R_OK | os.W_OK), reason="needs to read and write /dev/kmsg")
def test_a_program_that_writes_into_the_kernel_log_is_not_believed() -> None:
    log = KernelLog()
    if log.absent:
        pytest.skip(log.absent)
    log.poll()
    with open(KMSG, "w", encoding="ascii") as file:
        file.write("NVRM: Xid (PCI:0000:00:00): 79, pid=1, written by a test of lanterne")
    seen = []
    log_again = KernelLog(look_back_s=1e9)
    raw = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            seen.append(os.read(raw, 16 << 10))
    except BlockingIOError:
        os.close(raw)
    if not any(b"written by a test of lanterne" in line for line in seen):
        pytest.skip("this kernel keeps no lines of programs (printk.devkmsg)")
    assert [e for e in (*log.poll(), *log_again.poll()) if "written by a test" in e.line] == []
