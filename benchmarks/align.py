"""Alignment at 64, 256 and 1,024 ranks: ``python -m benchmarks.align [--quick] [--json]``.

Jobs are simulated with clocks up to 10 s off, 20 ppm of drift, an NTP step, a suspended host and 20 us of network
jitter, and a ping a second. Cost is CPU time of clocks, waits and logical order together.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from benchmarks._align_jobs import Skewed, Step, skewed
from benchmarks._common import figure, report
from lanterne.backend.align import clocks, lamport, waits
from lanterne.collector.sim.model import Shape

SECOND = 1_000_000_000
RANKS = (64, 256, 1024)
NO_PEER = "HolisticTraceAnalysis reads Kineto traces; no comparison on common traces has been made by this benchmark"


def job_of(ranks: int, steps: int, ping_every_ns: int) -> Skewed:
    """A data-parallel job whose second host is set by 3 ms and whose fourth sleeps for 10 s."""
    at = steps * SECOND // 10
    bad = [Step(host=1, at_ns=at, by_ns=3_000_000), Step(host=3, at_ns=at, by_ns=10 * SECOND, asleep=True)]
    return skewed(Shape(dp=ranks, steps=steps), seed=ranks, steps=bad, ping_every_ns=ping_every_ns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="40 steps instead of 1,000")
    arguments = parser.parse_args()
    steps = 40 if arguments.quick else 1000
    spent, events, figures, widths = [], [], [], {}
    outside = 0
    for ranks in RANKS:
        job = job_of(ranks, steps, SECOND)
        begin = time.process_time()
        found = clocks.estimate(job.calls, hosts=job.hosts, snapshots=job.snapshots)
        waits.attribute(job.calls, found)
        aligned = time.process_time() - begin
        ordered = lamport.logical(job.calls)
        total = time.process_time() - begin
        assert ordered.stamp.all()
        spent.append(total)
        events.append(2 * len(job.calls))
        outside += job.outside(found)[0]
        widths[ranks] = found.median_error_ns() or 0
        figures.append(figure(f"cpu_s_{ranks}", total, "s"))
        figures.append(figure(f"clocks_and_waits_cpu_s_{ranks}", aligned, "s"))
    alone = job_of(RANKS[0], steps, 0)
    estimate = clocks.estimate(alone.calls, hosts=alone.hosts)
    scaling = np.polyfit(np.log(events), np.log(spent), 1)[0]
    figures = [
        figure("events_per_s", events[-1] / spent[-1], "1/s", better="higher"),
        figure("scaling_exponent", float(scaling), "1", goal=1.1),
        figure("offset_halfwidth_us", widths[RANKS[-1]] / 1e3, "us", goal=100.0),
        figure("offset_outside_interval", float(outside), "1", goal=0.0),
        figure("offset_halfwidth_without_pings_us", (estimate.median_error_ns() or 0) / 1e3, "us", goal=100.0),
        figure("offset_outside_without_pings", float(alone.outside(estimate)[0]), "1", goal=0.0),
        {"name": "hta_time_ratio", "value": None, "unit": "1", "goal": None, "better": "lower", "reason": NO_PEER},
        {"name": "hta_memory_ratio", "value": None, "unit": "1", "goal": None, "better": "lower", "reason": NO_PEER},
        *figures,
    ]
    found_report = report("align", figures, steps=steps, ranks=list(RANKS), events=events)
    if arguments.json:
        print(json.dumps(found_report, indent=2))
        return
    for line in figures:
        print(f"{line['name']:36} {line['value']} {line['unit']}")


if __name__ == "__main__":
    main()
