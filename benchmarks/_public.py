"""Readers of the public data sets that the causal engine is judged on."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from lanterne.causal.counterfactual import Operations

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Incident:
    """One labelled service incident: metrics, first abnormal row, call graph as (cause, effect), symptom, answer."""

    name: str
    table: dict[str, Floats]
    onset: int
    edges: list[tuple[str, str]]
    symptom: str
    truth: str


def petshop_cases(folder: Path) -> list[Incident]:
    """Incidents of amazon-science/petshop-root-cause-analysis as handed out (``*/train/issue_*``)."""
    return [_incident(path) for path in sorted(folder.glob("*/train/issue_*"))]


def _incident(path: Path) -> Incident:
    rows = list(csv.reader((path / "metrics.csv").open(encoding="utf-8")))
    head, body = rows[:3], rows[4:]
    table = {
        "|".join(line[i] for line in head): np.array([float(r[i]) if r[i] else np.nan for r in body])
        for i in range(1, len(head[0]))
    }
    answer = json.loads((path / "target.json").read_text(encoding="utf-8"))
    target = answer["target"]
    times = [float(r[0]) for r in body]
    graph = list(csv.reader((path.parents[1] / "graph.csv").open(encoding="utf-8")))
    edges = [
        (callee, row[0])
        for row in graph[1:]
        for callee, value in zip(graph[0][1:], row[1:], strict=True)
        if value not in {"", "0", "0.0", "False"}
    ]
    return Incident(
        name=f"{path.parents[1].name}/{path.name}",
        table=table,
        onset=min(max(int(np.searchsorted(times, target["timestamp"])), 2), len(times) - 1),
        edges=edges,
        symptom="|".join(target[k] for k in ("node", "metric", "agg")),
        truth=str(answer["root_cause"]["node"]),
    )


def straggler_operations(path: Path) -> Operations:
    """Operation durations of a trace of ByteDance-Seed/StragglerAnalysis. A collective's own time is its shortest
    member's: the last to arrive waits for nobody."""
    table = parquet.read_table(path)
    column = {k: table[k].to_numpy() for k in ("dp_rank", "stage", "step", "seq_id", "duration")}
    kind = np.array(table["optype"].to_pylist())
    steps, row = np.unique(column["step"], return_inverse=True)
    shape = (len(steps), int(column["dp_rank"].max()) + 1, int(column["stage"].max()) + 1)

    def durations(name: str, width: int) -> Floats:
        keep = kind == name
        out = np.full((*shape, width), np.nan)
        out[row[keep], column["dp_rank"][keep], column["stage"][keep], column["seq_id"][keep]] = column["duration"][
            keep
        ]
        return out

    micro = int(column["seq_id"].max()) + 1
    shortest = {
        n: np.nanmin(durations(n, 1)[..., 0], (1, 2))
        for n in ("params-all-gather", "embedding-grads-all-reduce", "optimizer-clip-main-grad")
    }
    update = np.nanmax(durations("optimizer", 1)[..., 0], (1, 2))
    return Operations(
        forward=durations("forward-compute", micro),
        backward=durations("backward-compute", micro),
        head=shortest["params-all-gather"],
        sync=np.nanmin(durations("grads-reduce-scatter", 1)[..., 0], 1),
        tail=shortest["embedding-grads-all-reduce"] + shortest["optimizer-clip-main-grad"] + update,
    )
