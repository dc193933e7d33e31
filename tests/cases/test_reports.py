"""Reports of the kinds that the field sees, as tables: what lay there, and the verdict that a reader should get.

``reports/*.yaml``: ``want`` is a category or several that would be right, ``rank`` and ``host`` the subject (null =
nobody may be named), ``avoid`` the traps, ``hedged`` = unsure with what would settle it. A file's ``each`` repeats its
``text`` for these ranks (``{r}``, ``{r+1}``, ``{r-4}``), to one file or to one a rank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cases import evidence_runs  # noqa: F401  registers its builders
from tests.cases.evidence import categories, first, hedged, judge, named_ranks
from tests.cases.evidence_series import BUILDERS

HERE = Path(__file__).parent / "reports"
_R = re.compile(r"\{r(?P<add>[+-]\d+)?\}")


def reports() -> list[dict[str, Any]]:
    return [row for file in sorted(HERE.glob("*.yaml")) for row in yaml.safe_load(file.read_text())]


def lay(folder: Path, report: dict[str, Any]) -> None:
    """Write the files of a report."""
    if "python" in report:
        BUILDERS[report["python"]](folder)
    for spec in report.get("files", ()):
        for i, rank in enumerate(spec.get("each", [None])):

            def fill(text: str, rank: int | None = rank) -> str:
                return text if rank is None else _R.sub(lambda m: str(rank + int(m["add"] or 0)), text)

            with (folder / fill(spec["name"])).open("a") as file:
                file.write(
                    (spec["before"] + "\n" if "before" in spec and i == 0 else "")
                    + fill(spec["text"]).rstrip("\n")
                    + "\n"
                )


def verdict_of(folder: Path, want: dict[str, Any]) -> list[str]:
    """What is wrong with the verdict; empty when it is right."""
    report = judge(folder)
    wrong = []
    if report.healthy:
        return [] if want.get("healthy") or want.get("or_healthy") else ["healthy"]
    cause = first(report)
    if want.get("healthy"):
        return [f"not healthy: {categories(report)} {cause.evidence[0].says[:150]}"]
    right = [want["want"]] if isinstance(want["want"], str) else want["want"]
    if cause.category not in right:
        wrong.append(f"{cause.category} ({cause.confidence:.2f}) instead of {right}")
    if "rank" in want and cause.subject.rank != want["rank"]:
        wrong.append(f"rank {cause.subject.rank} instead of {want['rank']}")
    if "host" in want and cause.subject.host != want["host"]:
        wrong.append(f"host {cause.subject.host} instead of {want['host']}")
    if "rank" in want and want["rank"] is None and named_ranks(report):
        wrong.append(f"names {named_ranks(report)}")
    if want.get("hedged") and not hedged(report):
        wrong.append(f"not hedged: {cause.category} {cause.confidence:.2f} needs {cause.needs}")
    wrong += [f"trap: {c}" for c in want.get("avoid", ()) if c in categories(report)]
    return wrong


@pytest.mark.parametrize("report", reports(), ids=lambda r: str(r["name"]))
def test_report(tmp_path: Path, report: dict[str, Any]) -> None:
    lay(tmp_path, report)
    assert verdict_of(tmp_path, report) == []
