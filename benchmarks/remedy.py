"""From onset to verified: real faults in a real 4-rank gloo job, mended without a human.

``python -m benchmarks.remedy --json`` runs ``lanterne demo --fault KIND --policy auto`` for each kind and prints the
ledger's seconds and their median (goal: below 8.3 s). ``--fault`` (may be repeated) takes some kinds only, ``--quick``
takes two. A kind whose remedy was not verified counts as not mended and is left out of the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from datetime import datetime
from typing import Any

from benchmarks._common import figure, report
from lanterne.demo import REMEDIED

GOAL_S = 8.3
RUN_S = 400
STAMPS = ("detected", "diagnosed", "decided", "acted", "verified")


def demo(fault: str, policy: str = "auto", *, rank: int = 2, seconds: int = RUN_S) -> dict[str, Any]:
    """The report of one demo. Raises CalledProcessError when it ended otherwise than with an incident or without."""
    command = [
        sys.executable, "-m", "lanterne", "demo", "--fault", fault, "--rank", str(rank), "--policy", policy,
        "--exit", "--json",
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


def mended(found: dict[str, Any]) -> dict[str, Any] | None:
    """The first incident of a report whose remedy was verified."""
    done = (i for i in found["incidents"] if i["status"] == "resolved" and {"acted", "verified"} <= set(i["ledger"]))
    return next(done, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fault", action="append", choices=sorted(REMEDIED))
    arguments = parser.parse_args()
    kinds = arguments.fault or (["lr-jump", "nan"] if arguments.quick else sorted(REMEDIED))
    ledgers: dict[str, dict[str, float]] = {}
    for kind in kinds:
        incident = mended(demo(kind))
        ledgers[kind] = since_onset(incident["ledger"]) if incident else {}
        sys.stderr.write(f"{kind}: {ledgers[kind] or 'not mended'}\n")
    figures = [
        figure(f"onset_to_verified_s[{kind}]", found["verified"], "s") for kind, found in ledgers.items() if found
    ]
    times = [found["verified"] for found in ledgers.values() if found]
    if times:
        figures.append(figure("onset_to_verified_s_median", statistics.median(times), "s", goal=GOAL_S))
    figures.append(figure("mended", len(times), "faults", goal=float(len(kinds)), better="higher"))
    json.dump(report("remedy", figures, ledgers=ledgers), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
