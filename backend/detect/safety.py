"""What stands beside the incidents: the breakers of the groups and the contract's service rules, window after window.

A breaker or a broken rule is no incident by itself: it tells people and policies what not to trust now. Policies read
them as facts (:func:`told`) or as one plain mapping (:func:`view`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lanterne.backend.detect import bandwidth, breaker, contract, headroom, heartbeat, precision
from lanterne.backend.detect.base import Levels, ranges
from lanterne.backend.detect.breaker import Board, Position
from lanterne.backend.detect.headroom import Headroom
from lanterne.backend.detect.heartbeat import Beats
from lanterne.backend.detect.memory import GROWTH_BYTES, SERIES
from lanterne.causal.facts import FactEvent, Facts
from lanterne.nouns import NO_RANK, NO_STEP, BreakerState, Ruling

LEAK_WIDTH = 20
BREAKER, RULE = "breaker", "service_rule"
"""Names of the facts that tell of a breaker which is not closed, and of a rule which is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """Breakers and rules as of the last look at a job."""

    board: Board = field(default_factory=Board)
    rules: tuple[Ruling, ...] = ()
    memory: tuple[Headroom, ...] = ()

    @property
    def moved(self) -> tuple[BreakerState, ...]:
        """Breakers that are not closed or were open in the window."""
        return tuple(b for b in self.board.states() if b.opened_times)

    @property
    def broken(self) -> tuple[Ruling, ...]:
        return tuple(r for r in self.rules if r.broken)


def look(
    facts: Facts, beats: Beats | None = None, before: Safety | None = None, levels: Levels | None = None
) -> Safety:
    """Breakers and rules after this window; ``before`` is what the last look at the same attempt gave."""
    rules = heartbeat.rulings(facts, beats) if beats is not None else []
    saved = contract.checkpoint_success(facts)
    rules += [saved] if saved is not None else []
    board = breaker.board(facts, before.board if before else None)
    memory = headroom.headroom(facts)
    rules += [*leaks(facts), *headroom.rulings(memory), *headroom.fragmented(facts), *precision.rulings(facts)]
    rules += [*bandwidth.rulings(board.speeds), *bandwidth.of_topology(board.speeds, facts, levels or Levels())]
    return Safety(board=board, rules=tuple(rules), memory=tuple(memory))


def view(safety: Safety) -> dict[str, dict[str, object]]:
    """What an expression of a policy can see: ``breakers.open`` (groups), ``breakers.half_open``, ``rules.broken``."""
    states = safety.board.states()
    return {
        "breakers": {
            "open": [b.group for b in states if b.state == Position.OPEN],
            "half_open": [b.group for b in states if b.state == Position.HALF_OPEN],
        },
        "rules": {"broken": sorted({r.rule for r in safety.broken})},
    }


def told(facts: Facts, safety: Safety) -> list[FactEvent]:
    """Breakers that are not closed and broken rules as facts: ``breaker`` (group, state, why, opened_times) and
    ``service_rule`` (rule, value, threshold), for whoever is given facts alone."""
    found = [
        FactEvent(
            name=BREAKER, step=NO_STEP if b.since_step is None else b.since_step, job_ns=facts.now_ns, body=b.why,
            attributes={"group": b.group, "state": b.state, "opened_times": b.opened_times},
        )
        for b in safety.board.states()
        if b.state != Position.CLOSED
    ]  # fmt: skip
    found += [
        FactEvent(
            name=RULE, rank=NO_RANK if r.rank is None else r.rank, job_ns=facts.now_ns, body=r.says,
            attributes={"rule": r.rule, "value": r.value, "threshold": r.threshold},
        )
        for r in safety.broken
    ]  # fmt: skip
    return found


def leaks(facts: Facts) -> list[Ruling]:
    """Leak drift above its bound in two windows running, of ranks whose memory moved at all."""
    found = []
    for name in SERIES:
        values = facts.series.get(name)
        if values is None:
            continue
        for r in np.flatnonzero(ranges(values) >= GROWTH_BYTES).tolist():
            now = contract.leak_drift(values[:, r], LEAK_WIDTH)
            then = contract.leak_drift(values[:-LEAK_WIDTH, r], LEAK_WIDTH)
            if now is not None and then is not None and now.broken and then.broken:
                what = name.removesuffix("_bytes").replace("_", " ")
                found.append(
                    Ruling(
                        rule="leak_drift", broken=True, value=now.value, threshold=now.threshold, unit="1",
                        says=f"{what} of rank {facts.ranks[r]} {now.says}", rank=facts.ranks[r],
                    )
                )  # fmt: skip
    return found
