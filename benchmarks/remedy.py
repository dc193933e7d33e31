"""From onset to verified: real faults in a real 4-rank gloo job, mended without a human.

``python -m benchmarks.remedy --json`` runs ``lanterne demo --fault KIND --policy auto`` for each kind and prints the
ledger's seconds and their median (goal: below 8.3 s); the table of the stamps goes to stderr. ``--fault`` (may be
repeated) takes some kinds only, ``--quick`` takes two. A kind whose remedy was not verified counts as not mended and is
left out of the median.

``--observe`` runs the same faults with the ceiling ``observe``: each must leave everything untouched and name what
would have been done. ``--out FILE`` keeps each finished run as a line of FILE; called again with it, what stands there
with the same commit is not run again. All kinds take about ten minutes on two idle cores, and as long under observe.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks._common import figure, report
from lanterne.collector.sim.inject import RIGHT_CAUSE
from lanterne.demo import REMEDIED

GOAL_S = 8.3
RUN_S = 400
STAMPS = ("detected", "diagnosed", "decided", "acted", "verified")


def demo(
    fault: str, policy: str = "auto", *, rank: int = 2, seconds: int = RUN_S, more: Sequence[str] = ()
) -> dict[str, Any]:
    """The report of one demo; ``more``: further arguments. Raises CalledProcessError when it ended otherwise than with
    an incident or without."""
    command = [
        sys.executable, "-m", "lanterne", "demo", "--fault", fault, "--rank", str(rank), "--policy", policy,
        "--exit", "--json", *more,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode not in {0, 1}:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def since_onset(ledger: dict[str, str]) -> dict[str, float]:
    """Seconds from the onset to each later stamp."""
    began = datetime.fromisoformat(ledger["onset"])
    return {
        name: round((datetime.fromisoformat(ledger[name]) - began).total_seconds(), 2)
        for name in STAMPS
        if ledger.get(name)
    }


def incident_of(found: dict[str, Any], fault: str) -> dict[str, Any] | None:
    """The incident of a report whose first cause is the right one for the fault."""
    right = (i for i in found["incidents"] if i["causes"] and i["causes"][0]["category"] == RIGHT_CAUSE[fault])
    return next(right, None)


def outcome(found: dict[str, Any], fault: str) -> dict[str, Any]:
    """One run as a row: seconds to each stamp, status, cause and remedy; without them where the cause is not there."""
    incident = incident_of(found, fault)
    if incident is None:
        return {"fault": fault, "verdict": found["verdict"]}
    cause = incident["causes"][0]
    return {
        "fault": fault, "status": incident["status"], "cause": cause["category"], "rank": cause["subject"].get("rank"),
        "remedy": cause["remedy"].get("action", ""), "onset": incident["ledger"]["onset"],
        "seconds": since_onset(incident["ledger"]),
    }  # fmt: skip


def mended(row: dict[str, Any]) -> bool:
    """Acted on, and verified."""
    return row.get("status") == "resolved" and {"acted", "verified"} <= set(row["seconds"])


def only_told(row: dict[str, Any]) -> bool:
    """Under ``observe``: the remedy is named, decided about, and nothing was done."""
    return bool(row.get("remedy")) and "decided" in row["seconds"] and "acted" not in row["seconds"]


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds from the onset, one fault a line."""
    lines = [f"{'fault':20} {'remedy':16} " + " ".join(f"{name:>9}" for name in STAMPS) + "  status"]
    for row in rows:
        seconds = row.get("seconds", {})
        stamps = " ".join(f"{seconds[name]:9.2f}" if name in seconds else f"{'-':>9}" for name in STAMPS)
        status = row.get("status", f"not found: {row.get('verdict', '')[:60]}")
        lines.append(f"{row['fault']:20} {row.get('remedy', '-'):16} {stamps}  {status}")
    return "\n".join(lines)


def kept(path: Path | None, commit: str, policy: str) -> dict[str, dict[str, Any]]:
    """Runs of this commit under this ceiling that stand in the file, by fault."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {row["fault"]: row for row in rows if row["commit"] == commit and row["policy"] == policy}


def runs(kinds: list[str], policy: str, out: Path | None, commit: str) -> list[dict[str, Any]]:
    """A row for each kind; those that ``out`` holds are taken from there, the others are run and added to it."""
    known = kept(out, commit, policy)
    for kind in kinds:
        if kind in known:
            continue
        try:
            found = outcome(demo(kind, policy), kind)
        except (subprocess.SubprocessError, ValueError) as error:  # the other kinds shall run all the same
            known[kind] = {"fault": kind, "verdict": f"the demo failed: {error}"}
            sys.stderr.write(f"{kind}: {known[kind]['verdict']}\n")
            continue
        row = known[kind] = found | {"commit": commit, "policy": policy, "load": os.getloadavg()[0]}
        sys.stderr.write(f"{kind}: {row.get('seconds') or row['verdict']}\n")
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return [known[kind] for kind in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--observe", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fault", action="append", choices=sorted(REMEDIED))
    arguments = parser.parse_args()
    kinds = arguments.fault or (["lr-jump", "nan"] if arguments.quick else sorted(REMEDIED))
    commit = report("remedy", [])["commit"]
    policy = "observe" if arguments.observe else "auto"
    rows = runs(kinds, policy, arguments.out, commit)
    if arguments.observe:
        good = [row for row in rows if only_told(row)]
        figures = [figure("told_and_untouched", len(good), "faults", goal=float(len(kinds)), better="higher")]
    else:
        good = [row for row in rows if mended(row)]
        times = [row["seconds"]["verified"] for row in good]
        figures = [figure(f"onset_to_verified_s[{row['fault']}]", row["seconds"]["verified"], "s") for row in good]
        if times:
            figures.append(figure("onset_to_verified_s_median", statistics.median(times), "s", goal=GOAL_S))
        figures.append(figure("mended", len(good), "faults", goal=float(len(kinds)), better="higher"))
    sys.stderr.write(table(rows) + "\n")
    json.dump(report("remedy", figures, policy=policy, rows=rows), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
