"""The answer of clock alignment: offset intervals of every rank, piecewise in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lanterne.backend.align.frame import Floats, Ints
from lanterne.nouns import ClockOffset

UNKNOWN_NS = float(1 << 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One clock exchange of a rank's host with the backend, ns; ``monotonic_ns`` 0 = not known."""

    rank: int
    t0_ns: int
    t1_ns: int
    t2_ns: int
    t3_ns: int
    monotonic_ns: int = 0


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
        known = np.isin(ranks, np.fromiter(self.unit, np.int64))
        past = np.maximum(unix_ns - self.begin_ns[keys], 0).astype(np.float64)
        offset = self.offset_ns[keys] + self.drift_ppm[keys] * 1e-6 * past
        return np.where(known, offset, 0.0), np.where(
            known, np.minimum(self.error_ns[keys] + extra, UNKNOWN_NS), UNKNOWN_NS
        )

    def _by_monotonic(self, ranks: Ints, monotonic_ns: Ints) -> Ints:
        """Key of each (rank, monotonic time), [N]: the unit's latest key that began by then."""
        units = np.array([self.unit.get(int(r), 0) for r in ranks], np.int64)
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

    def _keys(self, ranks: Ints, unix_ns: Ints) -> Ints:
        top = int(max(ranks.max(initial=0), max(self.unit, default=0))) + 2
        table = np.zeros(top, np.int64)
        for rank, unit in self.unit.items():
            table[rank] = unit
        units = table[np.clip(ranks, 0, top - 1)]
        base = int(min(self.begin_ns.min(), unix_ns.min(initial=int(self.begin_ns.min()))))

        def packed(unit: Ints, at: Ints) -> Ints:
            return (unit << 46) | ((at - base) >> 10)

        found = np.searchsorted(packed(self.key_unit, self.begin_ns), packed(units, unix_ns), side="right") - 1
        first = np.searchsorted(self.key_unit, units)
        keys: Ints = np.clip(np.maximum(found, first), 0, len(self.begin_ns) - 1)
        return keys

    def median_error_ns(self) -> int | None:
        """Median half-width over units and windows; None without evidence."""
        known = self.error_ns[self.error_ns < UNKNOWN_NS / 2]
        return int(np.median(known)) if len(known) else None
