"""NVIDIA GPUs through NVML (``nvidia-ml-py``), read by the shipper about twice a second. Absent GPU = absent source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Sample = tuple[str, float, str]  # metric, value, label


class GpuSource:
    """All GPUs of the host. ``absent`` says why there is nothing to read ("" when there is)."""

    def __init__(self) -> None:
        self.absent = ""
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            self.absent = "nvidia-ml-py is not installed (pip install 'lanterne[gpu]')"
            return
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml
        except pynvml.NVMLError as error:
            self.absent = f"NVML: {error}"
        if not self.absent and not self._handles:
            self.absent = "NVML finds no GPU"

    def sample(self, pid: int = 0) -> list[Sample]:
        """(metric, value, label = ``gpu<index>``); with ``pid`` also the bytes that this process holds on each GPU.

        Bytes, shares of 1, MHz, Celsius, watts; ``hw.gpu.throttle`` is NVML's bit mask of reasons; ``hw.errors`` counts
        uncorrected ECC errors. A reading that a GPU refuses is left out.
        """
        out: list[Sample] = []
        for index, handle in enumerate(self._handles):
            label = f"gpu{index}"
            for metric, read in self._readings(handle):
                try:
                    out.append((metric, float(read()), label))
                except (self._nvml.NVMLError, AttributeError, TypeError):
                    continue
            if pid:
                held = self._held_by(handle, pid)
                if held is not None:
                    out.append(("hw.gpu.memory.usage", float(held), f"{label} process"))
        return out

    def _readings(self, handle: Any) -> list[tuple[str, Callable[[], float]]]:
        n = self._nvml
        reasons = getattr(n, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            n, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        return [
            ("hw.gpu.memory.usage", lambda: n.nvmlDeviceGetMemoryInfo(handle).used),
            ("hw.gpu.utilization", lambda: n.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            ("hw.gpu.clock", lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM)),
            ("hw.gpu.throttle", lambda: reasons(handle)),  # type: ignore[misc]
            ("hw.temperature", lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU)),
            ("hw.power", lambda: n.nvmlDeviceGetPowerUsage(handle) / 1000),
            (
                "hw.errors",
                lambda: n.nvmlDeviceGetTotalEccErrors(
                    handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
                ),
            ),
        ]

    def _held_by(self, handle: Any, pid: int) -> int | None:
        try:
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == pid:
                    return int(process.usedGpuMemory or 0)
        except self._nvml.NVMLError:
            pass
        return None

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
            self._handles = []
