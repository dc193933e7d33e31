"""``lanterne causes``: the causal engine on any table of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lanterne.cli_base import Json, need, print_json
from lanterne.errors import UsageError


def causes(
    table: Annotated[Path, typer.Argument(help="CSV, TSV or Parquet: one row a sample, one column a metric.")],
    onset: Annotated[str, typer.Option(help="When the trouble began: a time, or a row's number; else estimated.")] = "",
    graph: Annotated[Path | None, typer.Option(help="CSV of edges: cause,effect (a callee is the cause).")] = None,
    symptom: Annotated[str, typer.Option(help="Entity or column that suffers.")] = "",
    time: Annotated[str, typer.Option(help="The time column; default one named time, timestamp, date or step.")] = "",
    split: Annotated[str, typer.Option(help="What stands between entity and metric in a column's name.")] = "|",
    first: Annotated[int, typer.Option(help="So many causes.", min=1)] = 10,
    as_json: Json = False,
) -> None:
    """Rank the entities of any metric table as causes of what changed at an onset.

    Example: `lanterne causes metrics.csv --onset 2026-03-01T12:00:00Z --symptom "web|latency" --graph calls.csv`
    """
    for path in (table, graph):
        if path is not None and not path.is_file():
            raise UsageError(f"causes: no such file: {path}")
    if not split:
        raise UsageError("causes: --split is empty; leave it out, or name what stands between entity and metric")
    found = need("lanterne.backend.readers.metric_table").rank_table(
        table, onset=onset, graph=graph, symptom=symptom, time=time, mark=split, first=first
    )
    if as_json:
        print_json(found)
        return
    talk = Console(stderr=True)
    if found["left_out"]:
        talk.print(f"left out, no numbers: {', '.join(found['left_out'][:8])}", markup=False)
    rows = Table("", "entity", "score", "why", box=None)
    for place, cause in enumerate(found["causes"], 1):
        rows.add_row(str(place), cause["entity"], f"{cause['score']:.2f}", cause["says"])
    Console().print(rows)
