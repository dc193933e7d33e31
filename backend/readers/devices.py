"""Device telemetry of other tools: nvidia-smi CSV (``--query-gpu … --format=csv``) and DCGM's exposition text.

Each device leaves one fact ``device_state``: how often a thermal slowdown was flagged, its clock and temperature.
A power cap and an idle clock are flags of healthy devices and are left out.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source, lines
from lanterne.causal.field_device import THERMAL_MASK
from lanterne.errors import UnreadableInput

DEVICES_MAX, SAMPLES_MAX = 4_096, 100_000
_UNIT = re.compile(r"\s*\[[^\]]*\]\s*$")
_KEYS = ("index", "uuid", "pci.bus_id", "gpu_bus_id", "gpu_uuid", "serial")
_REASONS = ("clocks_throttle_reasons", "clocks_event_reasons")


@dataclass(slots=True)
class _Device:
    samples: int = 0
    hot: int = 0
    clocks: list[float] = field(default_factory=list)
    warmest: float = 0.0
    host: str = ""
    ref: str = ""
    xid: int = 0
    uncorrected: float = 0.0  # ECC errors since the driver was loaded


def _header(source: Source) -> list[str]:
    first = source.text_head.partition("\n")[0]
    return [_UNIT.sub("", c).strip().lower() for c in first.split(",")]


def is_smi(source: Source) -> bool:
    """A header of nvidia-smi's query names: a device and at least one of its readings."""
    names = _header(source)
    read = [
        n
        for n in names
        if n.startswith((*_REASONS, "clocks.", "temperature.", "power.", "utilization.", "ecc.", "remapped_rows."))
    ]
    return len(names) > 1 and bool(read) and any(n in _KEYS for n in names)


def _number(text: str) -> float | None:
    found = re.match(r"\s*(-?\d+(?:\.\d+)?)", text)
    return float(found[1]) if found else None


def read_smi(source: Source, gather: Gather) -> int:
    """Rows of devices over time; the answer is how many rows were known."""
    names = _header(source)
    devices: dict[str, _Device] = {}
    for number, cells in _cells(source):
        row = dict(zip(names, (c.strip() for c in cells), strict=False))
        key = next((row[k] for k in _KEYS if row.get(k)), "")
        if not key or len(row) < len(names) or key in _KEYS:
            continue
        state = _state(devices, key)
        state.samples += 1
        _smi_row(state, row, f"{source.name}:{number}")
    return _close(devices, gather, source)


def _cells(source: Source) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row below the header."""
    reader = csv.reader(line for _, line in lines(source))
    try:
        next(reader, None)
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise UnreadableInput(source.name, f"line {reader.line_num}: not CSV: {error}") from error


def _state(devices: dict[str, _Device], key: str) -> _Device:
    if key not in devices and len(devices) >= DEVICES_MAX:
        return _Device()
    return devices.setdefault(key, _Device())


def _smi_row(state: _Device, row: Mapping[str, str], ref: str) -> None:
    hot = False
    for name, value in row.items():
        if name.startswith(_REASONS):
            thermal = "thermal" in name and value.lower() == "active"
            mask = re.fullmatch(r"0x([0-9a-fA-F]{1,16})", value)
            hot |= thermal or (mask is not None and bool(int(mask[1], 16) & THERMAL_MASK))
        elif name in {"clocks.sm", "clocks.current.sm", "clocks.gr", "clocks.current.graphics"}:
            _clock(state, _number(value))
        elif name == "temperature.gpu":
            state.warmest = max(state.warmest, _number(value) or 0.0)
        elif name.startswith(("ecc.errors.uncorrected.volatile", "remapped_rows.failure")):
            state.uncorrected = max(state.uncorrected, _number(value) or float(value.lower() == "yes"))
        elif name in {"hostname", "host", "node"}:
            state.host = value
    state.hot += hot
    state.ref = state.ref if state.ref and not (hot and state.hot == 1) else ref


def _clock(state: _Device, mhz: float | None) -> None:
    if mhz is not None and len(state.clocks) < SAMPLES_MAX:
        state.clocks.append(mhz)


def is_dcgm(source: Source) -> bool:
    """Exposition text of the DCGM exporter."""
    return "DCGM_FI_" in source.text_head


_DCGM = re.compile(r"^(?P<name>DCGM_FI_\w+)\{(?P<labels>.*)\}\s+(?P<value>[\d.eE+-]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_dcgm(source: Source, gather: Gather) -> int:
    """Gauges by device; the answer is how many were known."""
    devices: dict[str, _Device] = {}
    for number, line in lines(source):
        found = _DCGM.match(line.strip())
        value = _number(found["value"]) if found else None
        if not found or value is None:
            continue
        labels = dict(_LABEL.findall(found["labels"]))
        host = labels.get("Hostname") or labels.get("hostname") or ""
        where = labels.get("gpu") or labels.get("UUID") or labels.get("device") or "?"
        state = _state(devices, f"{host}/{where}" if host else where)
        state.host, state.ref = host, state.ref or f"{source.name}:{number}"
        name = found["name"]
        state.samples = max(state.samples, 1)
        if name.endswith(("THROTTLE_REASONS", "EVENT_REASONS")) and int(value) & THERMAL_MASK:
            state.hot, state.ref = 1, f"{source.name}:{number}"
        elif name.endswith("SM_CLOCK"):
            _clock(state, value)
        elif name.endswith("GPU_TEMP"):
            state.warmest = max(state.warmest, value)
        elif name.endswith("XID_ERRORS"):
            state.xid = int(value)
    return _close(devices, gather, source)


def _close(devices: Mapping[str, _Device], gather: Gather, source: Source) -> int:
    for key, state in devices.items():
        where = key.rpartition("/")[2]
        clock = median(state.clocks) if state.clocks else 0.0
        gather.event(
            "device_state",
            host=state.host,
            ref=state.ref or source.name,
            device=where,
            samples=state.samples,
            hot=state.hot,
            clock_mhz=clock,
            lowest_mhz=min(state.clocks, default=0.0),
            celsius=state.warmest,
        )
        if state.uncorrected:
            body = f"device {where} counts {state.uncorrected:.0f} uncorrected ECC errors or failed remappings"
            gather.event("log.ecc_error", host=state.host, ref=state.ref, body=body, device=where)
        if state.xid:
            body = f"DCGM_FI_DEV_XID_ERRORS {state.xid} on device {where}"
            gather.event("log.xid", host=state.host, ref=state.ref, body=body, device=where, xid=state.xid)
    if devices:
        gather.sources.add("node_health")
    return sum(d.samples for d in devices.values())
