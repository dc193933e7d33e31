"""What stands beside the incidents: the breakers of the groups and the contract's service rules, window after window.

A breaker or a broken rule is no incident by itself: it tells people and policies what not to trust now.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lanterne.backend.detect import bandwidth, breaker, contract, headroom, heartbeat, precision
from lanterne.backend.detect.base import Levels, ranges
from lanterne.backend.detect.breaker import Board
from lanterne.backend.detect.headroom import Headroom
from lanterne.backend.detect.heartbeat import Beats
from lanterne.backend.detect.memory import GROWTH_BYTES, SERIES
from lanterne.causal.facts import Facts
from lanterne.nouns import BreakerState, Ruling

LEAK_WIDTH = 20


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
