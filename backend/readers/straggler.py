"""Operation-level times of a pipeline-parallel job (Parquet): the what-if of :mod:`lanterne.causal.counterfactual`.

Columns: ``dp_rank stage rank step optype duration seq_id`` (seconds), as published with the what-if analysis of
stragglers (OSDI 2025). A duration of a collective holds its waits; the shortest of a group is free of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source
from lanterne.causal.counterfactual import Operations, cause_of, what_if
from lanterne.errors import UnreadableInput

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "duration", "seq_id")
ROWS_MAX = 50_000_000
Floats = NDArray[np.float64]


def is_parquet(source: Source) -> bool:
    return source.head[:4] == b"PAR1"


def operations(path: Any) -> tuple[Operations, dict[tuple[int, int], int]]:
    """Read a trace: the operations and which rank sits at (replica, stage). Raises UnreadableInput on other tables."""
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    try:
        file = pq.ParquetFile(path)
        missing = [c for c in COLUMNS if c not in file.schema_arrow.names]
        if missing or file.metadata.num_rows > ROWS_MAX:
            raise UnreadableInput(str(path), f"not an operation trace: columns {', '.join(missing) or 'too many rows'}")
        table = file.read(columns=list(COLUMNS))
    except (ArrowException, OSError) as error:
        raise UnreadableInput(str(path), f"not readable Parquet: {error}") from error
    at = {c: table.column(c).to_numpy() for c in COLUMNS if c != "optype"}
    kind = np.asarray(table.column("optype").to_pylist(), dtype=object)
    steps, row = np.unique(at["step"], return_inverse=True)
    shape = (len(steps), int(at["dp_rank"].max()) + 1, int(at["stage"].max()) + 1)

    def compute(name: str) -> Floats:
        pick = kind == name
        out = np.full((*shape, int(at["seq_id"][pick].max()) + 1), np.nan)
        out[row[pick], at["dp_rank"][pick], at["stage"][pick], at["seq_id"][pick]] = at["duration"][pick]
        return out

    def once(name: str) -> Floats:
        out = np.zeros(shape)
        pick = kind == name
        np.maximum.at(out, (row[pick], at["dp_rank"][pick], at["stage"][pick]), at["duration"][pick])
        return out

    forward, backward = compute("forward-compute"), compute("backward-compute")
    whole = np.isfinite(forward).all(axis=(1, 2, 3)) & np.isfinite(backward).all(axis=(1, 2, 3))
    if not whole.any():
        raise UnreadableInput(str(path), "no step was traced whole")
    sync = once("grads-reduce-scatter").min(axis=1) + once("layernorm-grads-all-reduce").min(axis=1)
    tail = once("optimizer").max(axis=(1, 2)) + once("optimizer-clip-main-grad").min(axis=(1, 2))  # all clip together
    found = Operations(
        forward=forward[whole],
        backward=backward[whole],
        head=once("params-all-gather").min(axis=1).max(axis=1)[whole],
        sync=sync[whole],
        tail=tail[whole],
    )
    ranks = {(int(d), int(s)): int(r) for d, s, r in zip(at["dp_rank"], at["stage"], at["rank"], strict=True)}
    return found, ranks


def read(source: Source, gather: Gather) -> int:
    """The what-if's answer as one fact; the ranks of the trace count as seen."""
    found, ranks = operations(source.path)
    result = what_if(found)
    gather.ranks.update(ranks.values())
    for (replica, stage), rank in ranks.items():
        gather.place(rank, mesh={"dp_replicate": replica, "pp": stage})
    gather.expected = 0
    named = cause_of(result, ranks)
    gather.event(
        "what_if", ref=source.name, slowdown=result.slowdown, best_worker_share=float(result.worker_share.max()),
        best_stage_share=float(result.stage_share.max()), category=str(named[0]) if named else "",
        culprit=named[1].rank if named and named[1].rank is not None else -1, says=named[3].says if named else "",
        share=float(named[3].value or 0.0) if named else 0.0,
    )  # fmt: skip
    gather.sources.add("operations")
    return 1
