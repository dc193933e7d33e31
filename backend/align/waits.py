"""Who waited for whom, and how long: lateness, wait and transfer of every call, on the job clock.

A straggler is the member that enters last; its own call is the shortest of all. So nothing here ranks by
duration. A rank that goes on computing after an asynchronous call is not blocked by it yet: its waiting
begins at its latest call before the last member arrived (``blocked_ms``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.backend.align.clocks import UNKNOWN_NS, Clocks
from lanterne.backend.align.frame import Floats, Ints
from lanterne.backend.align.matching import Calls
from lanterne.causal.facts import Waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Arrays [N] parallel to the calls. ``last`` is the rank that entered last (-1: cannot be told apart)."""

    entered_ns: Ints  # job clock
    completed_ns: Ints  # job clock; 0 = pending
    lateness_ns: Floats  # behind the median member
    wait_ns: Floats  # last arrival minus own arrival
    blocked_from_ns: Ints  # start of the blocked part of the wait
    last_ns: Ints  # last arrival
    transfer_ns: Floats  # completion minus last arrival; NaN = pending
    error_ns: Floats
    last: Ints
    whole: np.ndarray  # all members that report in the window made the call, and they are half of the group or more

    def blocked_ns(self) -> Floats:
        """Time each row was really blocked waiting for others."""
        blocked: Floats = np.maximum(self.last_ns - self.blocked_from_ns, 0).astype(np.float64)
        return blocked


def attribute(
    calls: Calls, clocks: Clocks, later: tuple[Ints, Ints] | None = None, reporting: Ints | None = None
) -> Attribution:
    """Waits of every call. Linear in the calls but for one sort.

    ``later``: (rank, entry on the job clock) of calls after these, of which some may say when a rank stopped working.
    ``reporting`` [S]: how many members of each slot's group report; by default those that made a call here.
    """
    n = len(calls)
    offset, error = clocks.offsets(calls.rank, calls.entered_ns, calls.monotonic_ns)
    entered = calls.entered_ns - offset.astype(np.int64)
    pending = calls.completed_ns <= 0
    completed = np.where(pending, 0, calls.completed_ns - offset.astype(np.int64))
    if n == 0:
        none, zero = np.zeros(0), np.zeros(0, np.int64)
        return Attribution(
            entered_ns=zero, completed_ns=zero, lateness_ns=none, wait_ns=none, blocked_from_ns=zero, last_ns=zero,
            transfer_ns=none, error_ns=none, last=zero, whole=np.zeros(0, bool),
        )  # fmt: skip
    sizes, reporting = calls.sizes, calls.reporting() if reporting is None else reporting
    whole = (sizes >= reporting) & (sizes > 1) & (2 * reporting >= calls.expected())
    order = np.lexsort((entered, calls.slot))
    ranked, half = entered[order], sizes // 2
    upper = ranked[calls.first + half]
    lower = ranked[calls.first + np.maximum((sizes - 1) // 2, 0)]
    median = lower + (upper - lower) // 2
    tail = calls.first + sizes - 1
    last_time, last_rank = ranked[tail], calls.rank[order][tail]
    second = ranked[np.maximum(tail - 1, calls.first)]
    blur = calls.by_slot(np.minimum(error, UNKNOWN_NS), np.maximum)
    # The last arriver is named only where it is clear of the next one by more than the clocks' error.
    clear = (last_time - second > 2 * blur) & (sizes > 1)
    done_late = np.maximum(completed - last_time[calls.slot], 0).astype(np.float64)
    return Attribution(
        entered_ns=entered,
        completed_ns=completed,
        lateness_ns=(entered - median[calls.slot]).astype(np.float64),
        wait_ns=(last_time[calls.slot] - entered).astype(np.float64),
        blocked_from_ns=_blocked_from(calls, entered, last_time, later),
        last_ns=last_time[calls.slot],
        transfer_ns=np.where(pending, np.nan, done_late),
        error_ns=np.minimum(error + blur[calls.slot], UNKNOWN_NS),
        last=np.where(clear, last_rank, -1)[calls.slot],
        whole=whole[calls.slot],
    )


def _blocked_from(calls: Calls, entered: Ints, last_time: Ints, later: tuple[Ints, Ints] | None) -> Ints:
    """For each row the rank's latest call at or before the slot's last arrival: until then it was not blocked."""
    rank, at = calls.rank, entered
    if later is not None:
        rank, at = np.concatenate([rank, later[0]]), np.concatenate([at, later[1]])
    found, column = np.unique(rank, return_inverse=True)
    base = int(entered.min())
    shift = (1 << 62) // len(found)  # ns: 26 days with 2,048 ranks
    packed = column * shift + np.clip(at - base, 0, shift - 1)
    order = np.argsort(packed, kind="stable")
    until = np.clip(last_time[calls.slot] - base, 0, shift - 1)
    index = np.searchsorted(packed[order], column[: len(calls)] * shift + until, side="right") - 1
    latest = at[order][np.maximum(index, 0)]
    blocked: Ints = np.maximum(latest, entered)
    return blocked


def as_facts(calls: Calls, a: Attribution) -> Waits:
    """The causal engine's form, ms. Slots that a reporting member has yet to tell are left out: open waits."""
    keep = a.whole & ~np.isnan(a.transfer_ns)
    return Waits(
        group=calls.groups,
        group_index=calls.group[keep],
        sequence=calls.sequence[keep],
        step=calls.step[keep],
        rank=calls.rank[keep],
        bytes=calls.bytes[keep],
        lateness_ms=a.lateness_ns[keep] / 1e6,
        wait_ms=a.wait_ns[keep] / 1e6,
        transfer_ms=a.transfer_ns[keep] / 1e6,
        error_ms=np.minimum(a.error_ns[keep] / 1e6, 1e9),
        op=calls.ops,
        op_index=calls.op[keep],
    )
