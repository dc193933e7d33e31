"""The critical path of one step through all ranks and groups: what would have had to be faster.

Walked backwards from the rank that ended the step last. On a rank, time runs back to its latest call that
ended on the way; there the path crosses to the member that entered that call last (in whatever group the call
was made: data, tensor or pipeline parallel), at the moment of its entry. Calls whose last member the clocks
cannot tell apart keep the path on its rank, and calls with missing members are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lanterne.backend.align.frame import Ints
from lanterne.backend.align.matching import Calls
from lanterne.backend.align.waits import Attribution

WORK = "work"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A piece of the path on ``rank``: own work (``name`` = ``work``) or the op whose transfer it is; job ns."""

    rank: int
    name: str
    start_ns: int
    end_ns: int
    group: str = ""
    sequence: int = -1


def critical_path(calls: Calls, a: Attribution, step: int, begin_ns: int, ends_ns: Mapping[int, int]) -> list[Stretch]:
    """Stretches from ``begin_ns`` to the end of ``step``, oldest first; they adjoin and cover all of that time.

    ``ends_ns`` holds each rank's end of the step on the job clock; empty gives an empty path.
    """
    if not ends_ns:
        return []
    rank = max(ends_ns, key=lambda r: (ends_ns[r], r))
    at, path = ends_ns[rank], list[Stretch]()
    mine = np.flatnonzero((calls.step == step) & a.whole & (a.completed_ns > 0))
    mine = mine[np.lexsort((a.completed_ns[mine], calls.rank[mine]))]
    rows: dict[int, Ints] = {int(r): mine[calls.rank[mine] == r] for r in np.unique(calls.rank[mine])}
    while at > begin_ns:
        here = rows.get(rank, mine[:0])
        before = here[: int(np.searchsorted(a.completed_ns[here], at, side="right"))]
        before = before[a.last_ns[before] < at]
        if not len(before):
            break
        row = int(before[-1])
        done, last = int(a.completed_ns[row]), max(int(a.last_ns[row]), begin_ns)
        if done <= begin_ns:
            break
        if done < at:
            path.append(Stretch(rank=rank, name=WORK, start_ns=done, end_ns=at))
        name, group = calls.ops[calls.op[row]], calls.groups[calls.group[row]]
        start = min(last, done)
        if start < done:
            path.append(
                Stretch(
                    rank=rank, name=name, start_ns=start, end_ns=done, group=group, sequence=int(calls.sequence[row])
                )
            )
        rank = int(a.last[row]) if a.last[row] >= 0 else rank
        at = start
    if at > begin_ns:
        path.append(Stretch(rank=rank, name=WORK, start_ns=begin_ns, end_ns=at))
    return path[::-1]
