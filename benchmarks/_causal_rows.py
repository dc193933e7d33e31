"""Measured cases as rows of a file, so that a long run can be done in pieces: what was measured is not run again.

A row holds what the engine and the baselines said about one case. Rows of other code (a digest over the engine and the
simulator) are left out.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._causal_baselines import BASELINES
from benchmarks._causal_cases import Case, right
from lanterne.causal import diagnose
from lanterne.causal.scoring import CLAIM
from lanterne.nouns import CauseCategory

ROOT = Path(__file__).parents[1]
SOURCES = ("causal", "collector/sim", "backend/align")
ONSET_STEPS = 3

Row = dict[str, Any]


def digest() -> str:
    """Fingerprint of the code whose answers the rows are."""
    found = hashlib.sha256()
    files = [p for folder in SOURCES for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".yaml"}]
    for path in sorted([*files, *(ROOT / "benchmarks").glob("_*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def measure(case: Case, baselines: bool = False) -> Row:
    """One case: for each cause which truths it fits; which rank each baseline blames (given the true onset)."""
    job = case.job()
    facts = case.facts(job)
    begin = time.process_time()
    causes = [c for c in diagnose(facts).causes if c.category is not CauseCategory.UNKNOWN]
    spent = 1e3 * (time.process_time() - begin)
    said = [
        {
            "category": c.category.value, "rank": c.subject.rank, "host": c.subject.host, "since": c.since_step,
            "confidence": c.confidence, "fits": [i for i, t in enumerate(job.truths) if right(c, t)],
        }
        for c in causes
    ]  # fmt: skip
    truths = [{"kind": t.kind, "rank": t.rank, "host": t.host, "onset": t.onset} for t in job.truths]
    blamed = {}
    if baselines and truths and truths[0]["rank"] is not None:
        onset = min(job.truths[0].onset, len(facts.steps) - 2)
        blamed = {name: run(facts, onset) for name, run in BASELINES.items()}
    return {"case": asdict(case), "truths": truths, "causes": said, "blamed": blamed, "ms": round(spent, 1)}


class Rows:
    """Rows of ``file`` (JSON lines; None = in memory only). ``budget_s``: how long cases may still be measured."""

    def __init__(self, file: Path | None = None, budget_s: float = float("inf")) -> None:
        self.file, self.until = file, time.monotonic() + budget_s
        self.code, self.short = digest(), 0
        self.used: list[Row] = []
        self.known: dict[str, Row] = {}
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row["code"] == self.code:
                    self.known[row["key"]] = row

    def of(self, cases: Iterable[Case], *, baselines: bool = False) -> Iterator[Row]:
        """Rows of the cases; what the budget does not allow is left out and counted in ``short``."""
        for case in cases:
            key = json.dumps(asdict(case), sort_keys=True) + ("+" if baselines else "")
            row = self.known.get(key)
            if row is None:
                if time.monotonic() > self.until:
                    self.short += 1
                    continue
                row = {"code": self.code, "key": key, **measure(case, baselines)}
                self.known[key] = row
                if self.file is not None:
                    with self.file.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(row) + "\n")
            self.used.append(row)
            yield row


def first_right(row: Row) -> bool:
    """Does the first cause fit a fault? Of a healthy case: is nothing said?"""
    return bool(row["causes"] and row["causes"][0]["fits"]) if row["truths"] else not row["causes"]


def all_in_top3(row: Row) -> bool:
    """Is every fault among the first three causes?"""
    return {i for c in row["causes"][:3] for i in c["fits"]} == set(range(len(row["truths"])))


def onset_near(row: Row) -> bool:
    """Is the first cause right and its onset within three steps?"""
    if not (row["truths"] and first_right(row)):
        return False
    since = row["causes"][0]["since"]
    onsets = [row["truths"][i]["onset"] for i in row["causes"][0]["fits"]]
    return since is not None and any(abs(since - o) <= ONSET_STEPS for o in onsets)


def claims(row: Row) -> list[bool]:
    """Is each claim (0.7 or more) right?"""
    return [bool(c["fits"]) for c in row["causes"] if c["confidence"] >= CLAIM]


def told(row: Row) -> str:
    """One line for a reader who looks at a miss."""
    case = row["case"]
    faults = ", ".join(
        f"{t['kind']}@{t['rank'] if t['rank'] is not None else t['host']}:{t['onset']}" for t in row["truths"]
    )
    said = ", ".join(
        f"{c['category']}@{c['rank'] if c['rank'] is not None else c['host']}:{c['since']}({c['confidence']:.2f})"
        + ("*" if c["fits"] else "")
        for c in row["causes"][:4]
    )
    return (
        f"{case['ranks']} {case['layout']} seed {case['seed']} size {case['size']:g}"
        f"{' heal ' + str(case['heal_after']) if case['heal_after'] else ''}"
        f"{' missing' if case['missing'] else ''}: {faults or 'healthy'} -> {said or 'nothing'}"
    )  # fmt: skip
