"""Structured trainer files: JSON documents, JSON lines, CSV, Prometheus text."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lanterne.backend.readers import metric_names, metrics, nccl, otlp
from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source, lines, read_all
from lanterne.errors import UnreadableInput
from lanterne.nouns import NO_RANK

_PROMETHEUS = re.compile(
    r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[+-]?(?:[\d.eE+-]+|NaN|Inf))(?:\s+\d+)?$"
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ARRAY = re.compile(
    r"\[(?!\d+,\d+\]<std)\s*(?:[\[{\"\]]|-?\d[\d.eE+-]*\s*(?:,|\]\s*$)|(?:true|false|null|NaN|Infinity)\b)"
)
"""An array, not a log line in brackets (``[rank0]: …``, ``[1,0]<stderr>:…``, ``[2025-08-01 10:00:00] …``)."""
_HANG_GAUGE = re.compile(r"(?:^|_)hang(?:_|$|ed)", re.IGNORECASE)


def is_json_document(source: Source) -> bool:
    """A file that is one JSON object or array (not JSON lines)."""
    head = source.text_head.lstrip("\ufeff \t\r\n")
    if head[:1] not in ("{", "[") or (head[:1] == "[" and not _ARRAY.match(head)):
        return False
    first = head.split("\n", 1)[0].rstrip()
    if len(first) < len(head.rstrip()) and first.startswith("{") and first.endswith("}"):
        try:
            json.loads(first)
        except ValueError:
            return True
        return False  # a whole object on the first line and more below: JSON lines
    return True


def is_json_lines(source: Source) -> bool:
    """At least one of the first lines is a whole JSON object, and the first line starts like one."""
    head = source.text_head.lstrip("\ufeff \t\r\n").split("\n")
    if not head or not head[0].startswith("{"):
        return False
    return any(metrics.parse_object(line.strip()) is not None for line in head[:3] if line.strip().startswith("{"))


def is_csv(source: Source) -> bool:
    """A header with a known metric or step column, then at least one row of as many cells."""
    first, _, rest = source.text_head.partition("\n")
    for delimiter in (",", "\t", ";"):
        header = [c.strip().strip('"') for c in first.split(delimiter)]
        if len(header) < 2 or not rest.strip():
            continue
        known = [c for c in header if _known(c)]
        cells = rest.split("\n", 1)[0].split(delimiter)
        if known and len(cells) == len(header) and all(len(c) < 80 for c in header):
            return True
    return False


def _known(name: str) -> bool:
    key = re.sub(r"[^a-z0-9]", "", re.sub(r"[/_. -]?rank[_ -]?\d+$", "", name.lower()))
    return key in metric_names.ALIASES or key in metric_names.STEP_KEY_SET


def is_prometheus(source: Source) -> bool:
    """Exposition text: ``# TYPE`` comments and ``name{labels} value`` lines."""
    return "# TYPE " in source.text_head or "# HELP " in source.text_head


def read_csv(source: Source, gather: Gather) -> int:
    """A metrics table with one row a step (and, maybe, a rank column or ``loss_rank3`` columns)."""
    first = source.text_head.split("\n", 1)[0]
    delimiter = max((",", "\t", ";"), key=first.count)
    found = metrics.rows(source, gather, _table(source, delimiter))
    if found:
        gather.sources.add("metrics")
    return found


def _table(source: Source, delimiter: str) -> Iterator[Mapping[str, Any]]:
    reader = csv.DictReader((line for _, line in lines(source)), delimiter=delimiter, restkey="_rest")
    try:
        yield from reader
    except csv.Error as error:
        raise UnreadableInput(source.name, f"line {reader.line_num}: not CSV: {error}") from error


def _objects(source: Source, gather: Gather) -> Iterator[Mapping[str, Any]]:
    bad, first_bad = 0, 0
    for number, line in lines(source):
        text = line.strip()
        if not text:
            continue
        row = metrics.parse_object(text)
        if row is None:
            bad, first_bad = bad + 1, first_bad or number
            continue
        yield row
    if bad:
        gather.gap(f"{source.name}: {bad} lines are not JSON objects, the first at line {first_bad}")
        gather.dropped += bad


def read_json_lines(source: Source, gather: Gather) -> int:
    """JSON lines of metrics, of OTLP exports, or of superbench's node diagnosis."""
    table = metrics.RowMetrics(gather, source.rank, source.name)
    others = 0
    inspector = nccl.Inspector(gather, source.name)
    for row in _objects(source, gather):
        if otlp.is_otlp(row):
            others += otlp.add(row, gather, source.name)
        elif nccl.is_inspector(row):
            inspector.row(row)
        elif "Category" in row and "Defective Details" in row:
            others += _superbench(row, gather, source.name)
        else:
            table.row(row)
    table.close()
    if table.found:
        gather.sources.add("metrics")
    return table.found + others + len(table.keys) + inspector.close()


def _superbench(row: Mapping[str, Any], gather: Gather, where: str) -> int:
    gather.event(
        "node_defect",
        host=str(row.get("index", "")),
        ref=where,
        category=str(row["Category"]),
        details=str(row["Defective Details"])[:1000],
    )
    gather.sources.add("node_health")
    return 1


def read_json(source: Source, gather: Gather) -> int:
    """One JSON document. Raises UnreadableInput (with the offset) on broken JSON."""
    data = read_all(source)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(
            source.name, f"not JSON: {error}", offset=getattr(error, "pos", -1), do="is the file complete?"
        ) from error
    if isinstance(value, list):
        items = [v for v in value if isinstance(v, dict)]
        if items and nccl.is_inspector(items[0]):
            return _inspected(source, gather, items)
        return _rows(source, gather, items)
    if not isinstance(value, dict):
        return 0
    if otlp.is_otlp(value):
        return otlp.add(value, gather, source.name)
    if nccl.is_ras(value):
        return nccl.add_ras(value, gather, source.name)
    if nccl.is_inspector(value):
        return _inspected(source, gather, [value])
    history = value.get("log_history")
    if isinstance(history, list):  # Hugging Face trainer_state.json
        settings = {
            k: v for k, v in value.items() if not isinstance(v, (list, dict)) and k not in metric_names.STEP_KEYS
        }
        metrics.RowMetrics(gather, source.rank, source.name).settings(
            {metric_names.key_of(k): v for k, v in settings.items()}
        )
        return _rows(source, gather, [r for r in history if isinstance(r, dict)])
    if _is_golden(value):
        return _golden(source, gather, value)
    for name in ("history", "metrics", "logs", "records", "data", "steps", "rows"):
        inner = value.get(name)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            return _rows(source, gather, [r for r in inner if isinstance(r, dict)])
    table = metrics.RowMetrics(gather, source.rank, source.name)
    table.row(value)
    return table.found + sum(1 for k in value if metric_names.key_of(str(k)) in metric_names.SETTING_KEYS)


def _inspected(source: Source, gather: Gather, items: list[dict[str, Any]]) -> int:
    inspector = nccl.Inspector(gather, source.name)
    for row in items:
        if nccl.is_inspector(row):
            inspector.row(row)
    return inspector.close()


def _rows(source: Source, gather: Gather, items: list[dict[str, Any]]) -> int:
    found = metrics.rows(source, gather, items)
    if found:
        gather.sources.add("metrics")
    return found


def _is_golden(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(isinstance(v, dict) and isinstance(v.get("values"), dict) for v in value.values())


def _golden(source: Source, gather: Gather, value: Mapping[str, Any]) -> int:
    """Megatron's reference curves: ``{"lm loss": {"values": {"1": 10.5, …}}}``."""
    table = metrics.RowMetrics(gather, NO_RANK, source.name)
    for name, series in value.items():
        for step, item in series["values"].items():
            known = metrics.number(item)
            if str(step).isdigit() and known is not None and known == known:
                table.value(str(name), known, int(step), NO_RANK)
    if table.found:
        gather.sources.add("metrics")
    return table.found


def read_prometheus(source: Source, gather: Gather) -> int:
    """Exposition text. Hang gauges become facts by rank; gauges with a rank label and a known name become series."""
    found = 0
    for number, line in lines(source):
        if line.startswith("#") or not line.strip():
            continue
        sample = _PROMETHEUS.match(line.strip())
        if sample is None:
            continue
        labels = dict(_LABEL.findall(sample["labels"] or ""))
        rank = int(labels["rank"]) if labels.get("rank", "").isdigit() else NO_RANK
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        found += 1
        if rank >= 0:
            host = str(labels.get("host") or labels.get("pod_name") or labels.get("ip") or "")
            gather.ranks.add(rank)
            gather.place(rank, host=host)
        if _HANG_GAUGE.search(sample["name"]):
            gather.event("hang_gauge", rank=rank, ref=f"{source.name}:{number}", gauge=sample["name"], value=value)
    if found:
        gather.sources.add("prometheus")
    return found
