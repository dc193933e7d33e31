"""Alignment at 64, 256 and 1,024 ranks: ``python -m benchmarks.align [--quick] [--json] [--hta PYTHON]``.

Jobs are simulated with clocks up to 10 s off, 20 ppm of drift, an NTP step, a suspended host and 20 us of network
jitter, and a ping a second. Cost is CPU time of clocks, waits and logical order together, all at once; then the
same while the data comes in. Last, who answers "which rank is the straggler" from the same Kineto traces with
less: Lanterne or HolisticTraceAnalysis, which is installed into a throw-away environment unless --hta or
--quick is given.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from benchmarks import _traces
from benchmarks._align_jobs import Skewed, Step, skewed
from benchmarks._common import figure, report
from lanterne.backend.align import lamport, matching, stream
from lanterne.collector.sim.model import Shape

SECOND = 1_000_000_000
RANKS = (64, 256, 1024)
LIVE_RANKS, LIVE_STEPS, LIVE_PIECE = 256, 400, 8
PAIRS = 20_000


def job_of(ranks: int, steps: int, ping_every_ns: int) -> Skewed:
    """A data-parallel job whose second host is set by 3 ms and whose fourth sleeps for 10 s."""
    at = steps * SECOND // 10
    bad = [Step(host=1, at_ns=at, by_ns=3_000_000), Step(host=3, at_ns=at, by_ns=10 * SECOND, asleep=True)]
    return skewed(Shape(dp=ranks, steps=steps), seed=ranks, steps=bad, ping_every_ns=ping_every_ns)


def wrong_orders(job: Skewed, ordered: lamport.Logical, pairs: int) -> int:
    """Orders that contradict the truth: of neighbours on each rank all, across ranks ``pairs`` drawn at random."""
    truth = np.concatenate([job.entered_ns, job.completed_ns])
    by_rank = np.lexsort((ordered.place, ordered.column))
    same = ordered.column[by_rank][1:] == ordered.column[by_rank][:-1]
    wrong = int((same & (np.diff(truth[by_rank]) < 0)).sum())
    by_slot = np.maximum.reduceat(truth[: len(job.calls)], job.calls.first)[job.calls.slot]
    wrong += int((by_slot > truth[len(job.calls) :]).sum())  # an exit before an entry of its call
    for a, b in np.random.default_rng(7).integers(0, len(truth), (pairs, 2)).tolist():
        order = ordered.order(a, b)
        wrong += order is not None and (truth[a] <= truth[b]) != (order == "before")
        wrong += order is not None and (ordered.stamp[a] < ordered.stamp[b]) != (order == "before")
    return wrong


def live(quick: bool) -> list[dict[str, Any]]:
    """Events a second while they come in, a few steps at a time, with an answer after each."""
    steps = 100 if quick else LIVE_STEPS
    job = job_of(LIVE_RANKS, steps, SECOND)
    pieces = [
        (matching.joined([job.calls], [(job.calls.step >= at) & (job.calls.step < at + LIVE_PIECE)]), at)
        for at in range(0, steps, LIVE_PIECE)
    ]
    share = np.array_split(np.array(job.snapshots, object), len(pieces))
    aligner = stream.Aligner(keep_steps=128)
    begin = time.process_time()
    for (piece, _), snapshots in zip(pieces, share, strict=True):
        aligner.push(piece, list(snapshots), job.hosts)
        aligner.aligned()
    spent = time.process_time() - begin
    arrive = steps / (job.entered_ns.max() / 1e9)  # steps a second of the job itself
    rate = 2 * len(job.calls) / spent
    return [
        figure("live_events_per_s", rate, "1/s", better="higher"),
        figure("live_share_of_a_core", arrive * 2 * len(job.calls) / steps / rate, "1", goal=1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="40 steps instead of 1,000; installs nothing")
    parser.add_argument("--hta", metavar="PYTHON", default="", help="interpreter that has HolisticTraceAnalysis")
    arguments = parser.parse_args()
    steps = 40 if arguments.quick else 1000
    spent, events, figures, widths = [], [], [], {}
    outside = wrong = 0
    for ranks in RANKS:
        job = job_of(ranks, steps, SECOND)
        begin = time.process_time()
        found = stream.whole(job.calls, job.snapshots, job.hosts)
        aligned = time.process_time() - begin
        begin = time.process_time()
        ordered = lamport.logical(job.calls)
        logical = time.process_time() - begin
        assert ordered.stamp.all()
        spent.append(aligned + logical)
        events.append(2 * len(job.calls))
        outside += job.outside(found.clocks)[0]
        wrong += wrong_orders(job, ordered, PAIRS // ranks)
        widths[ranks] = found.clocks.median_error_ns() or 0
        figures.append(figure(f"cpu_s_{ranks}", aligned + logical, "s"))
        figures.append(figure(f"clocks_and_waits_cpu_s_{ranks}", aligned, "s"))
        figures.append(figure(f"logical_cpu_s_{ranks}", logical, "s"))
    alone = job_of(RANKS[0], steps, 0)
    estimate = stream.whole(alone.calls, (), alone.hosts).clocks
    scaling = np.polyfit(np.log(events), np.log(spent), 1)[0]
    python, why_not = (arguments.hta, "") if arguments.hta else _traces.hta_python(install=not arguments.quick)
    size = {"ranks": 4, "repeats": 4} if arguments.quick else {"ranks": 8, "repeats": 16}
    rival, traces = _traces.compare(python, why_not, **size)
    figures = [
        figure("events_per_s", events[-1] / spent[-1], "1/s", better="higher"),
        figure("scaling_exponent", float(scaling), "1", goal=1.1),
        figure("offset_halfwidth_us", widths[RANKS[-1]] / 1e3, "us", goal=100.0),
        figure("offset_outside_interval", float(outside), "1", goal=0.0),
        *rival,
        figure("orders_against_truth", float(wrong), "1", goal=0.0),
        figure("offset_halfwidth_without_pings_us", (estimate.median_error_ns() or 0) / 1e3, "us", goal=100.0),
        figure("offset_outside_without_pings", float(alone.outside(estimate)[0]), "1", goal=0.0),
        *live(arguments.quick),
        *figures,
    ]
    found_report = report("align", figures, steps=steps, ranks=list(RANKS), events=events, traces=traces)
    if arguments.json:
        print(json.dumps(found_report, indent=2))
        return
    for line in figures:
        print(f"{line['name']:36} {line['value']} {line['unit']}{'  ' + line['reason'] if 'reason' in line else ''}")


if __name__ == "__main__":
    main()
