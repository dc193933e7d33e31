"""Devices: one protocol, vendors by entry point, and a fixed piece of work measured in a process of its own."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from lanterne.collector import devices
from lanterne.collector.devices import Measured, TorchDevice, measure, measure_apart


def test_the_cpu_does_the_fixed_work() -> None:
    found = measure(TorchDevice("cpu"))
    assert found.error == ""
    assert found.device == "cpu:0"
    assert found.gemm_tflops == pytest.approx(2 * 256**3 / found.gemm_ms / 1e9)
    assert found.copy_gb_per_s > 0


def test_an_absent_device_is_a_reason() -> None:
    device = TorchDevice("npu")
    assert (device.count(), device.absent) == (0, "torch sees no npu device")
    assert measure(device) == Measured(device="npu:0", error="torch sees no npu device")


class Slow(TorchDevice):
    """A vendor's device whose third wait fails."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.kind, self.waits = "dcu", 0

    def synchronize(self, index: int) -> None:
        self.waits += 1
        if self.waits == 3:
            raise RuntimeError("device lost")

    def tensor(self, index: int, side: int) -> Any:
        return torch.ones(8, 8)


def test_a_vendor_registers_by_entry_point_and_its_fault_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="dcu", value=f"{__name__}:Slow", group=devices.GROUP)
    monkeypatch.setattr(devices, "entry_points", lambda group: [entry])
    monkeypatch.setattr(EntryPoint, "load", lambda self: Slow)
    found = measure(devices.kinds()["dcu"]())
    assert found == Measured(device="dcu:0", error="RuntimeError: device lost")


def test_a_child_process_measures_or_says_why_not() -> None:
    found = measure_apart("cpu")
    assert found.error == ""
    assert found.gemm_ms > 0
    assert measure_apart("nothing").error == "unknown kind of device"


def test_a_device_that_does_not_answer_is_given_up() -> None:
    assert measure_apart("cpu", timeout_s=0.01) == Measured(device="cpu:0", error="no answer within 0.01 s")
