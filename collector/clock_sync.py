"""How far this node's wall clock is from the backend's, as an interval, by an NTP-like exchange.

``GET /api/v1/clock`` answers when the server got the request and when it answers. With our own send and
receive times that bounds the offset: ``(t1 - t0 + t2 - t3) / 2 +- (t3 - t0 - (t2 - t1)) / 2`` (RFC 5905,
section 8). The exchange with the shortest way is the sharpest, so of each round the best one is kept.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lanterne.clock import Clock

PERIOD_S = 2.0
ROUND = 4
"""Exchanges in a row; the best of them becomes the snapshot."""
KEEP = 8
BACKEND_SKEW_NS_MAX = 10 * 365 * 86_400 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Four readings in Unix ns: own send, server receive, server send, own receive; and own monotonic ns at the end."""

    t0_ns: int
    t1_ns: int
    t2_ns: int
    t3_ns: int
    monotonic_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Time on the way, both ways, without the server's own."""
        return self.t3_ns - self.t0_ns - (self.t2_ns - self.t1_ns)

    @property
    def offset_ns(self) -> int:
        """Server clock minus own clock, within +- ``round_trip_ns / 2``."""
        return (self.t1_ns - self.t0_ns + self.t2_ns - self.t3_ns) // 2

    def sound(self) -> bool:
        """A wall clock that stepped in between, or a lying server, makes the reading worthless."""
        return (
            0 <= self.round_trip_ns <= 60_000_000_000
            and 0 <= self.t2_ns - self.t1_ns <= self.t3_ns - self.t0_ns
            and abs(self.offset_ns) < BACKEND_SKEW_NS_MAX
        )

    def attributes(self) -> dict[str, int]:
        """Attributes of the ``clock_snapshot`` event."""
        return {"t0_ns": self.t0_ns, "t1_ns": self.t1_ns, "t2_ns": self.t2_ns, "t3_ns": self.t3_ns}


class ClockSync:
    """Asks ``fetch`` (returns the reply's body, raises OSError) and keeps the sharpest snapshots."""

    def __init__(self, fetch: Callable[[], bytes], clock: Clock) -> None:
        self._fetch, self._clock = fetch, clock
        self._recent: deque[Snapshot] = deque(maxlen=KEEP)

    def exchange(self) -> Snapshot | None:
        """One exchange; None when the server does not answer, or answers nonsense."""
        before = self._clock.monotonic_ns()
        t0 = self._clock.unix_ns()
        try:
            body = self._fetch()
        except OSError:
            return None
        after = self._clock.monotonic_ns()
        t3 = self._clock.unix_ns()
        try:
            plain = json.loads(body)
            t1, t2 = int(plain["received_ns"]), int(plain["sent_ns"])
        except (ValueError, TypeError, KeyError):
            return None
        snapshot = Snapshot(t0, t1, t2, t3, after)
        stepped = abs((t3 - t0) - (after - before)) > 1_000_000
        return None if stepped or not snapshot.sound() else snapshot

    def round(self) -> Snapshot | None:
        """``ROUND`` exchanges, the one with the least round trip; None when none was sound."""
        best: Snapshot | None = None
        for _ in range(ROUND):
            found = self.exchange()
            if found is None:
                break
            if best is None or found.round_trip_ns < best.round_trip_ns:
                best = found
        if best is not None:
            self._recent.append(best)
        return best

    def best(self) -> Snapshot | None:
        """The sharpest of the last ``KEEP`` rounds."""
        return min(self._recent, key=lambda s: s.round_trip_ns, default=None)
