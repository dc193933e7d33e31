"""Which rows came before: the rule that stores a repeated batch once.

Every Lanterne row has a sequence that counts within (job, attempt, rank) over all signals. For each rank
and signal the store remembers the ranges that it has committed. A stretch of rows whose range touches
none of them is new; the others are *in doubt* and are looked up in the table itself, row by row. So the
answer is exact whatever the order of arrival and however a relay cuts batches anew, while the usual case
costs two comparisons. Nothing needs to be kept on disk: after a start the largest stored sequence of
each rank is the mark below which everything is in doubt. Foreign rows (sequence below 0) are always new.
"""

from __future__ import annotations

from collections.abc import Iterable

Key = tuple[str, str, int, int]  # signal, job, attempt, rank
_RANGES_MAX = 64
_KEYS_MAX = 500_000


class Marks:
    """Committed ranges of sequences by (signal, job, attempt, rank). Used by the writer thread alone."""

    def __init__(self) -> None:
        self._floor: dict[Key, int] = {}
        self._ranges: dict[Key, list[tuple[int, int]]] = {}
        self._known: set[tuple[str, str]] = set()

    def knows(self, signal: str, job: str) -> bool:
        """Has :meth:`load` been called for this job?"""
        return (signal, job) in self._known

    def load(self, signal: str, job: str, largest: Iterable[tuple[int, int, int]]) -> None:
        """Take over what the table holds: (attempt, rank, largest sequence) of every rank of a job."""
        self._known.add((signal, job))
        for attempt, rank, sequence in largest:
            self._floor[(signal, job, attempt, rank)] = sequence

    def is_new(self, key: Key, first: int, last: int) -> bool:
        """True when no committed range touches ``first..last`` (inclusive)."""
        if first <= self._floor.get(key, -1):
            return False
        return all(last < low or high < first for low, high in self._ranges.get(key, ()))

    def add(self, key: Key, first: int, last: int) -> None:
        """Remember a range that is being committed; the oldest ranges sink below the floor."""
        ranges = self._ranges.setdefault(key, [])
        ranges.append((first, last))
        if len(ranges) > _RANGES_MAX:
            lowest = min(ranges)
            ranges.remove(lowest)
            self._floor[key] = max(self._floor.get(key, -1), lowest[1])

    def forget(self) -> None:
        """Drop everything (after a failed commit, or when it grows beyond its bound): it is loaded again by job."""
        self._floor.clear()
        self._ranges.clear()
        self._known.clear()

    def trim(self) -> None:
        if len(self._ranges) + len(self._floor) > _KEYS_MAX:
            self.forget()
