"""What every handler needs, and the checks of paths, rights and pages that they share."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Path, Query, Request

from lanterne import limits
from lanterne.backend.alerts import Alerter
from lanterne.backend.api.accounts import Accounts
from lanterne.backend.api.grids import Grids
from lanterne.backend.api.hub import Hub
from lanterne.backend.api.problems import Problem
from lanterne.backend.detect.safety import Safety
from lanterne.backend.store.access import KEY, Principal
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.records import JobRecord
from lanterne.clock import Clock
from lanterne.settings import ServerSettings

T = TypeVar("T")
COSTLY_S = 0.1
REST_FACTOR = 20.0


@dataclass(frozen=True, slots=True)
class Context:
    """The open stores and the settings of this server."""

    store: EventStore
    control: ControlStore
    settings: ServerSettings
    hub: Hub
    clock: Clock
    alerter: Alerter
    safety: Callable[[str, int], Safety | None]
    """(job, attempt) -> its breakers and service rules as the live runner left them."""
    accounts: Accounts
    heavy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Room for two ad-hoc queries or diagnoses at a time."""
    grids: Grids = field(init=False)
    """Metrics as arrays of steps by ranks, for heat maps and curves."""
    bounds: dict[tuple[str, int], tuple[int, tuple[int, int, int]]] = field(default_factory=dict)
    """By attempt: the store's version, then first step, last step and largest rank."""
    signs: dict[tuple[str, int], tuple[int, int, dict[int, dict[str, Any]]]] = field(default_factory=dict)
    """By attempt: the store's version, the last commit's server Unix ns, and the last signs by rank."""
    _cache: dict[Any, tuple[int, Any]] = field(default_factory=dict)
    _kept: dict[Any, tuple[int, int, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grids", Grids(self.store))

    def cached(self, key: Any, make: Callable[[], T], seconds: float = 15.0) -> T:
        """What ``make`` gave within the last ``seconds``; at most 1,000 keys are kept."""
        now = self.clock.monotonic_ns()
        known = self._cache.get(key)
        if known is None or now - known[0] > seconds * 1e9:
            if len(self._cache) > 1_000:
                self._cache.clear()
            known = self._cache[key] = (now, make())
        found: T = known[1]
        return found

    def kept(self, at: tuple[str, int], key: Any, make: Callable[[], T], *, rests: bool = False) -> T:
        """What ``make`` gave of an attempt, until the store gets new rows of it; at most 1,000 keys are kept.

        What ``rests`` and took longer than ``COSTLY_S`` to make is shown ``REST_FACTOR`` times as long all the same.
        """
        version, now = self.store.version(*at), self.clock.monotonic_ns()
        known = self._kept.get((at, key))
        if known is None or (known[0] != version and now >= known[1]):
            if len(self._kept) > 1_000:
                self._kept.clear()
            made = make()
            took = self.clock.monotonic_ns() - now
            until = now + int(REST_FACTOR * took) if rests and took > COSTLY_S * 1e9 else 0
            known = self._kept[at, key] = (version, until, made)
        found: T = known[2]
        return found


def _context(request: Request) -> Context:
    found: Context = request.app.state.context
    return found


def _principal(request: Request) -> Principal:
    found: Principal = request.scope[KEY]
    return found


Ctx = Annotated[Context, Depends(_context)]
Who = Annotated[Principal, Depends(_principal)]
JobId = Annotated[str, Path(pattern=limits.ID_PATTERN, description="Job id")]
Attempt = Annotated[int | None, Query(ge=0, lt=1 << 31, description="Attempt; default the newest")]
Step = Annotated[int | None, Query(ge=0, le=limits.STEP_MAX)]
Limit = Annotated[int, Query(ge=1, le=limits.PAGE_ROWS_MAX)]
Cursor = Annotated[str | None, Query(max_length=512, description="The `next` of the page before")]


@dataclass(frozen=True, slots=True)
class At:
    """A job and one of its attempts."""

    job: JobRecord
    attempt: int

    @property
    def here(self) -> tuple[str, int]:
        """Job id and attempt."""
        return self.job.id, self.attempt

    @property
    def key(self) -> list[Any]:
        """Parameters of ``WHERE job = ? AND attempt = ?``."""
        return [self.job.id, self.attempt]


def _at(context: Ctx, who: Who, job: JobId, attempt: Attempt = None) -> At:
    found = context.control.job(job) if who.sees(job) else None
    if found is None:
        raise Problem(404, f"there is no job {job}")
    newest = found.attempt.attempt if found.attempt else 0
    return At(found, newest if attempt is None else attempt)


OfJob = Annotated[At, Depends(_at)]


def encode_cursor(*values: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None, *kinds: type) -> tuple[Any, ...] | None:
    """The values behind a cursor; None without one. Raises :class:`Problem` (400) on one that is not ours."""
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        values = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        values = None
    if (
        not isinstance(values, list)
        or len(values) != len(kinds)
        or not all(type(v) is k for v, k in zip(values, kinds, strict=True))
        or any(type(v) is int and abs(v) >= 1 << 63 for v in values)
    ):
        raise Problem(400, "the cursor is not one that this list gave out")
    return tuple(values)


def page(
    rows: Sequence[T], limit: int, show: Callable[[T], dict[str, Any]], cursor: Callable[[T], str]
) -> dict[str, Any]:
    """A page of a list that was asked for ``limit + 1`` rows."""
    more = len(rows) > limit
    rows = rows[:limit]
    return {"items": [show(row) for row in rows], "next": cursor(rows[-1]) if more and rows else None}
