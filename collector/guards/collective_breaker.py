"""A breaker for the gradient reduction: while the network is sick, gradients wait on the rank.

    breaker = CollectiveBreaker(ddp, store=store, rank=rank)
    for step, batch in enumerate(loader):
        with breaker.step(step) as reduced:
            loss = model(batch).mean() / breaker.share   # so that cached gradients average, not add
            loss.backward()
        if reduced:
            optimizer.step(); optimizer.zero_grad()

Closed: each backward reduces, as always. Open (three reductions in a row above 2.5 x the usual time, or three
failures within five minutes): backward runs under ``no_sync``, and what it adds to ``.grad`` is the local cache; no
replica steps, so none drifts. After ``rest_s`` one step is the trial: its backward reduces the whole cache. If it was
quick enough the breaker closes, else it stays open. At most ``cache_steps`` are cached before a reduction is forced.

All ranks must do the same at the same step, or the next reduction hangs. Rank 0 alone decides, from its own times, and
publishes the state of the next window of ``window`` steps in the job's store while the present one runs; every rank
reads the key of a window before its first step and waits for it. A collective that raises breaks a process group for
good in NCCL and gloo alike: such an error is counted and raised on, it cannot be mended here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, Protocol

from lanterne.clock import Clock, SystemClock
from lanterne.errors import UsageError

SLOW_FACTOR, SLOW_IN_ROW = 2.5, 3
FAILURES, FAILURES_S = 3, 300.0
REST_S = 60.0
BASELINE_MIN = 10
CLOSED, OPEN, TRIAL = "closed", "open", "trial"


class Store(Protocol):
    """The part of a c10d store that is used; ``get`` waits for the key."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


class CollectiveBreaker:
    """Wraps the backward passes of a DistributedDataParallel module (or of anything with ``no_sync``).

    The time that counts is that of the whole block, backward with reduction, which is what the ranks share: a slow
    link holds all of them. ``state`` is that of the present window; ``cached`` the steps in ``.grad``.
    """

    def __init__(
        self, module: Any, *, store: Store | None = None, rank: int = 0, window: int = 5, rest_s: float = REST_S,
        cache_steps: int = 64, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        if window < 1 or cache_steps < window:
            raise UsageError(f"window {window}, cache_steps {cache_steps}: 1 <= window <= cache_steps is needed")
        self.module, self.store, self.rank, self.window = module, store, rank, window
        self.rest_s, self.cache_steps, self.clock = rest_s, cache_steps, clock or SystemClock()
        self.state, self.cached, self.opened = CLOSED, 0, 0
        self._next = CLOSED
        self._usual: deque[float] = deque(maxlen=50)
        self._slow = 0
        self._failures: deque[int] = deque(maxlen=FAILURES)
        self._opened_ns = 0
        self._read = -1

    @property
    def share(self) -> float:
        """Divisor of the present step's loss; with it ``.grad`` is the mean over the cached steps and this one."""
        return float(self.cached + 1)

    @contextmanager
    def step(self, step: int) -> Iterator[bool]:
        """One forward and backward; yields whether its gradients are reduced, so that the optimizer may step."""
        self._enter(step)
        trial = self.state == TRIAL and step % self.window == 0
        reduced = self.state == CLOSED or trial or self.cached + 1 >= self.cache_steps
        if self.cached:
            self._rescale(self.cached + 1)
        began = self.clock.monotonic_ns()
        try:
            with nullcontext() if reduced else self.module.no_sync():
                yield reduced
        except Exception:
            self._failures.append(self.clock.monotonic_ns())
            raise
        took_s = (self.clock.monotonic_ns() - began) / 1e9
        self.cached = 0 if reduced else self.cached + 1
        if reduced:
            self._judge(took_s)
        if self.rank == 0:
            self._publish(step)

    def _rescale(self, steps: int) -> None:
        """The cache holds a mean over ``steps - 1`` steps; make room in it for the present one."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_((steps - 1) / steps)

    # --- windows ---------------------------------------------------------------------------------

    def _enter(self, step: int) -> None:
        window = step // self.window
        if window == self._read:
            return
        self._read = window
        if self.store is None:
            self.state = self._next
        elif window > 0:
            self.state = self.store.get(f"breaker/{window}").decode()

    def _publish(self, step: int) -> None:
        """At the last step of a window: what the next one does. It is read by all, rank 0 included."""
        if (step + 1) % self.window:
            return
        rested = (self.clock.monotonic_ns() - self._opened_ns) / 1e9 >= self.rest_s
        if self._next == OPEN and self.state == OPEN and rested:
            self._next = TRIAL
        if self.store is not None:
            self.store.set(f"breaker/{(step + 1) // self.window}", self._next)

    def _judge(self, took_s: float) -> None:
        """Closed: count slow ones. Trial: close or open again."""
        bound = SLOW_FACTOR * median(self._usual) if len(self._usual) >= BASELINE_MIN else float("inf")
        slow = took_s > bound
        self._slow = self._slow + 1 if slow else 0
        if not slow:
            self._usual.append(took_s)
        if self.state == TRIAL:
            self._turn(OPEN if slow else CLOSED)
        elif self.state == CLOSED and (self._slow >= SLOW_IN_ROW or self._broken()):
            self._turn(OPEN)

    def _broken(self) -> bool:
        recent = [at for at in self._failures if self.clock.monotonic_ns() - at < FAILURES_S * 1e9]
        return len(recent) >= FAILURES

    def _turn(self, state: str) -> None:
        self._next = state
        if state == OPEN:
            self._opened_ns = self.clock.monotonic_ns()
            self.opened += 1
            self._slow = 0
