"""Real faults in real gloo jobs, several seeds each: ``python -m benchmarks.causal_gloo --rows FILE [--json]``.

Every kind of ``lanterne demo`` and a healthy run, with another rank, onset and seed each time. A run is right when the
first cause has the category and the rank of the fault (``none``: when nothing is said), and its onset lies within two
steps of the first step at which the fault can be seen. A run takes about 35 s; ``--rows`` keeps what was measured, so
that a long measurement can be stopped and taken up again, and ``--budget`` stops it after so many seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._common import figure, report
from benchmarks.remedy import demo
from lanterne.collector.sim.inject import KINDS, RIGHT_CAUSE

RANKS = 4
SEEDS = 3
ONSETS = (60, 47, 83)
SLACK = 2
RUN_S = 400
CHECKPOINT_EVERY, CHECKSUM_EVERY, EXTRA_CALL_EVERY = 40, 16, 10
"""Of the demo's job: at these steps a checkpoint, a comparison of replicas and a reduction of its own come."""
NOBODY = frozenset({"lr-jump"})

Run = tuple[str, int]


def plan(kinds: list[str], seeds: int) -> list[Run]:
    """Kind and number of each run, all kinds before the next number."""
    return [(kind, i) for i in range(seeds) for kind in kinds]


def settings(kind: str, number: int) -> tuple[int, int, int]:
    """(rank, onset, seed) of a run: another rank for each number, and not the same one for all kinds."""
    rank = (KINDS.index(kind) + number + 1) % RANKS
    return rank, ONSETS[number % len(ONSETS)], 4100 + 97 * number + KINDS.index(kind)


def seen_at(kind: str, onset: int) -> tuple[int, int]:
    """First and last step from which the fault can be seen."""
    if kind == "seed-mismatch":
        return 0, 0
    if kind.startswith("checkpoint"):
        first = (onset // CHECKPOINT_EVERY + 1) * CHECKPOINT_EVERY - 1
        return first, first
    if kind == "mismatch":
        first = (onset // EXTRA_CALL_EVERY + 1) * EXTRA_CALL_EVERY - 1
        return first, first
    if kind == "replica-divergence":
        return onset, (onset // CHECKSUM_EVERY + 1) * CHECKSUM_EVERY
    return onset, onset + 1 if kind == "lr-jump" else onset


def judge(kind: str, rank: int, onset: int, found: dict[str, Any]) -> dict[str, Any]:
    """The row of a run: what was said first, and which of category, rank and onset are right."""
    causes = [c for i in found.get("incidents", []) for c in i["causes"]]
    if kind == "none":
        return {"said": [c["category"] for c in causes], "right": found.get("healthy") is True and not causes}
    if not causes:
        return {"said": [], "right": False, "cause": False, "rank": False, "onset": False}
    first, (early, late) = causes[0], seen_at(kind, onset)
    since, who = first["since_step"], None if kind in NOBODY else rank
    row = {
        "said": [c["category"] for c in causes],
        "since": since,
        "confidence": first["confidence"],
        "cause": first["category"] == RIGHT_CAUSE[kind],
        "rank": first["subject"]["rank"] == who,
        "onset": since is not None and early - SLACK <= since <= late + SLACK,
    }
    return {**row, "right": bool(row["cause"] and row["rank"] and row["onset"])}


def measure(kind: str, number: int) -> dict[str, Any]:
    rank, onset, seed = settings(kind, number)
    load, begin = os.getloadavg()[0], time.monotonic()
    row: dict[str, Any] = {"kind": kind, "number": number, "fault_rank": rank, "fault_onset": onset, "seed": seed}
    try:
        found = demo(
            kind, "", rank=rank, seconds=RUN_S,
            more=(f"--ranks={RANKS}", f"--onset={onset}", f"--seed={seed}"),
        )  # fmt: skip
        row |= {**judge(kind, rank, onset, found), "verdict": found.get("verdict", "")}
    except (subprocess.SubprocessError, json.JSONDecodeError) as error:
        text = str(getattr(error, "stderr", "") or error)
        row |= {"said": [], "right": False, "verdict": f"did not run: {text[-300:]}"}
    return row | {"seconds": round(time.monotonic() - begin, 1), "load": round(load, 1)}


def table(rows: list[dict[str, Any]]) -> str:
    """One line a run."""
    lines = []
    for r in sorted(rows, key=lambda r: (KINDS.index(r["kind"]), r["number"])):
        wrong = ", ".join(k for k in ("cause", "rank", "onset") if r.get(k) is False)
        state = "right" if r["right"] else f"WRONG ({wrong or 'said something'}): {r['verdict'][:160]}"
        lines.append(f"{r['kind']:19} rank {r['fault_rank']} step {r['fault_onset']:3} load {r['load']:4}  {state}")
    return "\n".join(lines)


def _known(file: Path | None) -> list[dict[str, Any]]:
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="three kinds, one seed")
    parser.add_argument("--fault", action="append", choices=KINDS, help="only this kind; may be repeated")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each kind")
    parser.add_argument("--rows", type=Path, help="JSON lines of the runs so far; new ones are added")
    parser.add_argument("--budget", type=float, default=float("inf"), help="start no run after so many seconds")
    arguments = parser.parse_args()
    kinds = arguments.fault or (["none", "slow-rank", "nan"] if arguments.quick else list(KINDS))
    rows = _known(arguments.rows)
    done = {(r["kind"], r["number"]) for r in rows}
    wanted = plan(kinds, 1 if arguments.quick else arguments.seeds)
    until = time.monotonic() + arguments.budget
    for kind, number in wanted:
        if (kind, number) in done or time.monotonic() > until:
            continue
        rows.append(measure(kind, number))
        sys.stderr.write(table(rows[-1:]) + "\n")
        if arguments.rows:
            with arguments.rows.open("a", encoding="utf-8") as out:
                out.write(json.dumps(rows[-1]) + "\n")
    rows = [r for r in rows if (r["kind"], r["number"]) in set(wanted)]
    faulty = [r for r in rows if r["kind"] != "none"]
    figures = [
        figure("gloo_right", sum(r["right"] for r in faulty) / max(1, len(faulty)), "1", goal=1.0, better="higher"),
        figure("gloo_runs", len(faulty), "runs", better="higher"),
        figure("gloo_healthy_flagged", sum(not r["right"] for r in rows if r["kind"] == "none"), "runs", goal=0.0),
    ]
    if arguments.json:
        print(json.dumps(report("causal_gloo", figures, rows=rows), indent=1))
        return
    print(table(rows))
    for f in figures:
        print(f"{f['name']:24} {f['value']:g}")


if __name__ == "__main__":
    main()
