"""What the device did in the traced steps of a slow rank: is the time on the device or in front of it?

Events ``kernels`` (one a traced step: ``device_ms`` in which the device did anything, the ``longest`` kernel name with
its sum) are compared with those of the peers in the same steps.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.finding import number
from lanterne.causal.words import number as value_of
from lanterne.nouns import Evidence

EVENT = "kernels"
LONGER = 1.1
"""A device that works a tenth longer than its peers' is part of the slowness."""


def kernel_evidence(facts: Facts, ranks: Collection[int], since_step: int) -> tuple[Evidence, ...]:
    """At most one sentence: the last step from ``since_step`` on that was traced on one of ``ranks`` and on a peer.

    Empty where no such step was traced.
    """
    by_step: dict[int, dict[int, FactEvent]] = {}
    for event in facts.events:
        if event.name == EVENT and event.step >= since_step:
            by_step.setdefault(event.step, {})[event.rank] = event
    for step, found in sorted(by_step.items(), reverse=True):
        own = [e for rank, e in found.items() if rank in ranks]
        peers = [value_of(e, "device_ms") for rank, e in found.items() if rank not in ranks]
        if own and peers and max(peers) > 0:
            return (_compared(max(own, key=lambda e: value_of(e, "device_ms")), median(peers), step),)
    return ()


def _compared(event: FactEvent, usual: float, step: int) -> Evidence:
    busy = value_of(event, "device_ms")
    longest = f"; longest: {event.attributes.get('longest')} {number(value_of(event, 'longest_ms'), 'ms')}"
    if busy >= LONGER * usual:
        says = f"its device worked {number(busy, 'ms')} in step {step}, its peers' {number(usual, 'ms')}{longest}"
    else:
        says = (
            f"its device worked no longer than its peers' in step {step} ({number(busy, 'ms')}): the time is lost "
            f"on the host, between the kernels{longest}"
        )
    return Evidence(says=says, value=busy, unit="ms", baseline=usual, ref=f"cuda.kernel step {step}")
