"""NCCL's calls by windows of one step, their device times on the rank's clock."""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns, sleep

import pytest

from lanterne import cuda_probe
from lanterne.blackbox import BlackBox
from lanterne.collector.integrations.launch import environment
from lanterne.collector.ring import Ring
from lanterne.collector.sources.nccl import NcclSource, Offset
from lanterne.cuda_probe import builder
from lanterne.cuda_probe.nccl import NcclCall
from lanterne.nouns import Kind
from lanterne.settings import CollectorSettings

AHEAD_NS = 10**15  # the device's clock against ours


def call(sequence: int, enqueued_ns: int, *, wait_ns: int = 2_000, took_ns: int = 5_000, done: bool = True) -> NcclCall:
    began = enqueued_ns + wait_ns + AHEAD_NS
    return NcclCall(
        1, sequence, "AllReduce", "RING", "LL128", "Float32", 4096, 0, 2, -1, enqueued_ns, enqueued_ns + 100, began,
        began + took_ns, 4, done,
    )  # fmt: skip


class Plugin:
    """What NCCL has called so far; the source reads it as it reads the plugin's ring."""

    lost, abi_version = 0, 6

    def __init__(self) -> None:
        self.rows: list[NcclCall] = []

    def skip(self) -> None:
        self.rows.clear()

    def drain(self) -> list[NcclCall]:
        found, self.rows = self.rows, []
        return found


def test_calls_of_a_window_become_spans_of_their_step(tmp_path: Path) -> None:
    plugin = Plugin()
    source = NcclSource(Ring(tmp_path, 0), every=4, calls=plugin)
    for step in range(8):
        source.boundary(step)
        plugin.rows += [call(10 * step, monotonic_ns()), call(10 * step + 1, monotonic_ns())]
        sleep(0.001)
    found = BlackBox(tmp_path, 0).drain()
    spans = [e for e in found if e.kind is Kind.KERNEL]
    assert {(e.step, e.name, e.duration_ns) for e in spans} == {
        (0, "nccl AllReduce RING LL128", 5_000), (4, "nccl AllReduce RING LL128", 5_000),
    }  # fmt: skip
    assert len(spans) == 4
    told = [e for e in found if e.name == "nccl_times"]
    assert [(e.step, e.attributes["calls"], e.attributes["done"]) for e in told] == [(0, 2, 2), (4, 2, 2)]
    assert all(abs(e.monotonic_ns - told[0].monotonic_ns) < 10**9 for e in spans[:2])


def test_the_offset_is_an_interval_that_holds_the_truth() -> None:
    offset = Offset()
    for n, wait in enumerate((50_000, 900, 30_000)):
        made = call(n, 10**9 + n * 10**6, wait_ns=wait)
        offset.learn(made, made.gpu_last_ns - AHEAD_NS + 1_100)
    assert abs(offset.ns + AHEAD_NS) <= offset.error_ns <= 1_001


def test_a_clock_that_was_set_begins_a_new_interval() -> None:
    offset = Offset()
    offset.learn(call(0, 10**9), 10**9 + 10_000)
    moved = NcclCall(1, 1, "AllReduce", "", "", "", 1, 0, 2, -1, 2 * 10**9, 2 * 10**9, 500, 900, 1, True)
    offset.learn(moved, 2 * 10**9 + 1_000)
    assert abs(offset.ns - (2 * 10**9 - 150)) <= offset.error_ns


def test_the_launcher_names_the_plugin_where_it_is_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "target_folder", lambda **_: tmp_path)
    monkeypatch.delenv("NCCL_PROFILER_PLUGIN", raising=False)
    node = tmp_path / "nvidiactl"
    monkeypatch.setattr(cuda_probe, "DEVICE_NODE", node)

    def named() -> str:
        return environment(CollectorSettings(), ["python"], str(tmp_path)).get("NCCL_PROFILER_PLUGIN", "")

    (tmp_path / builder.NCCL_LIBRARY).touch()
    assert named() == ""
    node.touch()
    assert named() == str(tmp_path / builder.NCCL_LIBRARY)
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "the user's own")
    assert named() == "the user's own"
