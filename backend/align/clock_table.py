"""The answer of clock alignment: offset intervals of every rank, piecewise in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from lanterne.backend.align.frame import Floats, Ints
from lanterne.nouns import ClockOffset

UNKNOWN_NS = float(1 << 60)


def unit_table(unit: Mapping[int, int], rank_max: int) -> Ints:
    """``table[rank]`` = clock unit, -1 where the rank has none; reaches to ``rank_max`` at least."""
    table = np.full(max(rank_max, max(unit, default=0)) + 1, -1, np.int64)
    table[np.fromiter(unit, np.int64, len(unit))] = np.fromiter(unit.values(), np.int64, len(unit))
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One clock exchange of a rank's host with the backend, ns; ``monotonic_ns`` at its end, 0 = not known."""

    rank: int
    t0_ns: int
    t1_ns: int
    t2_ns: int
    t3_ns: int
    monotonic_ns: int = 0

    @property
    def own_monotonic_ns(self) -> int:
        """The monotonic clock at ``t0_ns``; 0 = not known."""
        return self.monotonic_ns - (self.t3_ns - self.t0_ns) if self.monotonic_ns > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Offsets known from elsewhere, ns: at own Unix ``at_ns`` the offset of ``unit`` lies in [low, high]. Arrays [M].

    ``monotonic_ns`` 0 = not known. ``anchor``: the reference clock, whose offset is 0 by definition.
    """

    unit: Ints
    at_ns: Ints
    monotonic_ns: Ints
    low_ns: Floats
    high_ns: Floats
    anchor: np.ndarray

    def __len__(self) -> int:
        return len(self.unit)

    @classmethod
    def of(cls, snapshots: Sequence[Snapshot], unit: Mapping[int, int]) -> Bounds:
        """``t0 - t1 <= offset <= t3 - t2`` of each exchange with the server."""
        return cls(
            unit=np.array([unit[s.rank] for s in snapshots], np.int64),
            at_ns=np.array([s.t0_ns for s in snapshots], np.int64),
            monotonic_ns=np.array([s.own_monotonic_ns for s in snapshots], np.int64),
            low_ns=np.array([s.t0_ns - s.t1_ns for s in snapshots], np.float64),
            high_ns=np.array([s.t3_ns - s.t2_ns for s in snapshots], np.float64),
            anchor=np.zeros(len(snapshots), bool),
        )

    def joined(self, other: Bounds) -> Bounds:
        """These and those."""
        return Bounds(
            **{f.name: np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(Bounds)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Offsets piecewise in time. Arrays [K] sorted by (unit, begin_ns); ``begin_ns`` is the unit's own Unix ns."""

    unit: Mapping[int, int]  # rank -> clock unit (a host, or the rank itself)
    key_unit: Ints
    begin_ns: Ints
    offset_ns: Floats
    error_ns: Floats
    drift_ppm: Floats
    monotonic_ns: Ints  # the unit's own monotonic clock at ``begin_ns``; 0 = not known
    twice_ns: Floats  # added to the error where the wall clock went back and showed this time twice
    rest_ppm: Floats  # bound on what ``drift_ppm`` leaves: the error grows by it outside the key's window
    anchor: np.ndarray  # the reference clock: 0 by definition
    window_ns: int
    reference: str = "rank"  # or "server"

    def at(self, rank: int, unix_ns: int) -> ClockOffset:
        """Offset interval of ``rank`` at its own time ``unix_ns``; unknown ranks get offset 0, error 2**60."""
        offset, error = self.offsets(np.array([rank]), np.array([unix_ns]))
        drift = self.drift_ppm[self._keys(np.array([rank]), np.array([unix_ns]))[0]] if len(self.begin_ns) else 0.0
        return ClockOffset(
            rank=rank, offset_ns=int(offset[0]), error_ns=int(error[0]), at_ns=unix_ns, drift_ppm=float(drift)
        )

    def offsets(self, ranks: Ints, unix_ns: Ints, monotonic_ns: Ints | None = None) -> tuple[Floats, Floats]:
        """(offset_ns, error_ns) of each (rank, own time), float64 [N].

        A wall clock set back shows some times twice: ``monotonic_ns`` [N] (0 = not known) tells them apart,
        without it the error there covers both.
        """
        if not len(self.begin_ns):
            return np.zeros(len(ranks)), np.full(len(ranks), UNKNOWN_NS)
        keys = self._keys(ranks, unix_ns)
        extra = self.twice_ns[keys]
        if monotonic_ns is not None and np.any(monotonic_ns > 0):
            sure = (monotonic_ns > 0) & (self.monotonic_ns[keys] > 0) & (extra > 0)
            if sure.any():
                keys[sure] = self._by_monotonic(ranks[sure], monotonic_ns[sure])
                extra = np.where(sure, 0.0, extra)
        known = (self._units(ranks) == self.key_unit[keys]) & (ranks >= 0)
        past = (unix_ns - self.begin_ns[keys]).astype(np.float64)
        away = np.maximum(np.maximum(past - self.window_ns, -past), 0.0)  # outside the key's own window
        offset = self.offset_ns[keys] + self.drift_ppm[keys] * 1e-6 * past
        error = self.error_ns[keys] + extra + self.rest_ppm[keys] * 1e-6 * away
        return np.where(known, offset, 0.0), np.where(known, np.minimum(error, UNKNOWN_NS), UNKNOWN_NS)

    def _by_monotonic(self, ranks: Ints, monotonic_ns: Ints) -> Ints:
        """Key of each (rank, monotonic time), [N]: the unit's latest key that began by then."""
        units = self._units(ranks)
        found = np.zeros(len(ranks), np.int64)
        for unit in np.unique(units):
            mine, keys = units == unit, np.flatnonzero(self.key_unit == unit)
            keys = keys[np.argsort(self.monotonic_ns[keys], kind="stable")]
            at = np.searchsorted(self.monotonic_ns[keys], monotonic_ns[mine], side="right") - 1
            found[mine] = keys[np.maximum(at, 0)]
        return found

    def job_ns(self, ranks: Ints, unix_ns: Ints) -> Ints:
        """Own Unix ns -> job ns, [N]."""
        shifted: Ints = unix_ns - self.offsets(ranks, unix_ns)[0].astype(np.int64)
        return shifted

    def _units(self, ranks: Ints) -> Ints:
        """Clock unit of each rank, [N]; -1 where the rank is not known."""
        found: Ints = unit_table(self.unit, int(ranks.max(initial=0)))[np.maximum(ranks, 0)]
        return found

    def _keys(self, ranks: Ints, unix_ns: Ints) -> Ints:
        units = self._units(ranks)
        first = np.searchsorted(self.key_unit, units)
        first = np.minimum(first, len(self.begin_ns) - 1)
        own = np.searchsorted(self.key_unit, self.key_unit)

        def packed(unit: Ints, at: Ints, zero: Ints) -> Ints:
            """By unit, then by time since the unit's first key; 2**46 us are two years."""
            code: Ints = (unit << 46) + np.clip((at - zero) >> 10, 0, (1 << 46) - 1)
            return code

        table = packed(self.key_unit, self.begin_ns, self.begin_ns[own])
        found = np.searchsorted(table, packed(units, unix_ns, self.begin_ns[first]), side="right") - 1
        keys: Ints = np.clip(np.maximum(found, first), 0, len(self.begin_ns) - 1)
        return keys

    def median_error_ns(self) -> int | None:
        """Median half-width over units and windows; None without evidence."""
        known = self.error_ns[self.error_ns < UNKNOWN_NS / 2]
        return int(np.median(known)) if len(known) else None
