"""One rank of this node as the shipper sees it: its black box, its process, its stall, its end."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lanterne import limits
from lanterne.clock import Clock
from lanterne.collector.blackbox import BlackBox
from lanterne.collector.clock_sync import Snapshot
from lanterne.collector.export import full_identity
from lanterne.collector.procfs import Ending, ProcessView, ending_by_pidfd, open_pidfd
from lanterne.collector.sources.memory import oom_kills
from lanterne.collector.watchdog import Look, PhaseBounds, RankWatch, StackDoor
from lanterne.nouns import Collective, Event, EventName, Identity, Kind

DRAIN_EVENTS_MAX = 32_768
"""Events of one rank in one drain; the rest waits in the ring for the next."""
NOTE_PATIENCE_NS = 2_000_000_000
"""How long the note of a parent that reaps the process is waited for before the end counts as unknown."""


class LocalRank:
    """Everything the shipper keeps of one rank. ``events`` collects until the next flush takes them."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        state: Mapping[str, Any] | None,
        clock: Clock,
        *,
        floor_s: float,
        environ: Mapping[str, str],
    ) -> None:
        self.folder, self.rank, self._clock, self._environ = folder, rank, clock, environ
        self.box = BlackBox(folder, rank, state)
        about, identity = self.box.about, self.box.identity
        if identity is None:
            raise ValueError(f"{folder}/rank-{rank}.json holds no identity")
        self.identity: Identity = full_identity(identity)
        self.process = ProcessView(int(about.get("pid", identity.pid)))
        self.pidfd = open_pidfd(self.process.pid)
        self.watch = RankWatch(PhaseBounds(floor_s))
        self.door = StackDoor(
            self.process,
            folder / f"rank-{rank}.stacks",
            int(about.get("stacks_signal", 0) or 0),
            str(about.get("worker_server", "") or ""),
        )
        self._stderr = self._find_stderr()
        self._oom_kills = oom_kills(os.getpid())  # of the shipper's own cgroup: the rank's is gone with the rank
        self._moved_ns = 0
        self.closed = False
        self.ended = bool((state or {}).get("ended", False))
        self._ending_since_ns = 0
        self._counted: dict[str, int] = {}

    # --- draining --------------------------------------------------------------------------------

    def drain(self) -> list[Event]:
        """Everything new in the black box, bounded; durations are learnt on the way."""
        out: list[Event] = []
        while len(out) < DRAIN_EVENTS_MAX:
            found = self.box.drain()
            if not found:
                break
            out.extend(found)
        self.watch.bounds.learn(out)
        for event in out:
            if event.kind in (Kind.STEP, Kind.PHASE, Kind.COLLECTIVE):
                self._moved_ns = max(self._moved_ns, event.monotonic_ns + event.duration_ns)
            elif event.name == EventName.CLOSED and event.kind is Kind.EVENT:
                self.closed = True
        return out

    def state(self) -> dict[str, Any]:
        return {**self.box.state(), "ended": self.ended}

    def make(self, name: EventName, body: str = "", **attributes: Any) -> Event:
        step = self.watch.look.step if self.watch.look is not None else -1
        return self.box.make(name, self._clock.monotonic_ns(), step=step, body=body, **attributes)

    # --- watching --------------------------------------------------------------------------------

    def look(self) -> Event | None:
        """Take a look at the rank; returns ``stall_ended`` when it moves again."""
        progress, pending = self.box.progress(), self.box.pending()
        self.closed = self.closed or progress.closed
        offset = self.box.unix_ns(0)
        newest = max((c.entered_ns - offset for c in pending), default=0)
        moved = max(progress.phase_since_monotonic_ns, progress.last_monotonic_ns, self._moved_ns, newest)
        now = self._clock.monotonic_ns()
        state = self.process.state()
        lasted = self.watch.see(
            Look(progress.step, progress.phase, moved, now, in_collective=bool(pending), process_state=state)
        )
        return None if lasted is None else self.make(EventName.STALL_ENDED, lasted_s=round(lasted, 3))

    def heartbeat(self, extra: Mapping[str, int]) -> Event:
        """Alive: step, phase, seconds without progress, and the counters that changed."""
        look = self.watch.look
        assert look is not None
        counts: dict[str, Any] = {k: v for k, v in {**self.box.counts(), **extra}.items() if self._counted.get(k) != v}
        self._counted |= counts
        return self.make(
            EventName.HEARTBEAT,
            phase=self.watch.phase(),
            idle_s=round(look.idle_s, 3),
            process_state=look.process_state,
            **counts,
        )

    def report_stall(self, stacks: tuple[str, str]) -> list[Event]:
        """``stall`` and one ``collective_pending`` for each call that it is waiting in."""
        look, watch = self.watch.look, self.watch
        assert look is not None
        pending = self.box.pending()
        watch.since_ns = look.moved_ns
        text, source = stacks
        attributes: dict[str, Any] = {
            "phase": watch.phase(),
            "stalled_s": round(look.idle_s, 3),
            "bound_s": round(watch.bound_s(), 3),
            "waiting": bool(pending),
            "process_state": look.process_state,
            "stacks_from": source,
        }
        if pending:
            attributes |= _call(pending[0])
        events = [self.make(EventName.STALL, text, **attributes)]
        return events + self.report_pending(pending)

    def report_pending(self, pending: list[Collective] | None = None) -> list[Event]:
        """``collective_pending`` for calls not reported yet in this standstill."""
        events = []
        for call in (self.box.pending() if pending is None else pending)[:32]:
            key = (call.group, call.sequence)
            if key not in self.watch.known:
                self.watch.known.add(key)
                events.append(self.make(EventName.COLLECTIVE_PENDING, **_call(call)))
        return events

    def snapshot(self, found: Snapshot) -> Event:
        attributes: dict[str, Any] = {**found.attributes()}
        return self.box.make(EventName.CLOCK_SNAPSHOT, found.monotonic_ns, **attributes)

    # --- the end ---------------------------------------------------------------------------------

    def ending(self) -> Ending | None:
        """How the process ended, once it is known or nobody is going to tell; None while it lives."""
        ending = self.process.ending()
        if ending is None:
            return None
        noted = self._noted()
        if noted is not None:
            return noted
        if ending == Ending() and self.pidfd >= 0:
            ending = ending_by_pidfd(self.pidfd) or ending
        if ending != Ending():
            return ending
        now = self._clock.monotonic_ns()
        self._ending_since_ns = self._ending_since_ns or now
        return ending if now - self._ending_since_ns > NOTE_PATIENCE_NS else None

    def _noted(self) -> Ending | None:
        paths = [self.folder / f"rank-{self.rank}.exit.json"]
        if self._environ.get("LANTERNE_EXITS"):
            paths.append(Path(self._environ["LANTERNE_EXITS"]) / f"{self.process.pid}.json")
        for path in paths:
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                if found.get("pid", self.process.pid) == self.process.pid:
                    return Ending(found.get("exit_code"), found.get("signal"))
            except (OSError, ValueError, AttributeError):
                continue
        return None

    def report_exit(self, ending: Ending) -> Event:
        """``exited`` with how, and the tail of stderr; also leaves both in the folder for a post-mortem."""
        self.ended = True
        tail = self._stderr_tail()
        attributes: dict[str, Any] = {"says": ending.says(), "closed": self.closed}
        if ending.exit_code is not None:
            attributes["exit_code"] = ending.exit_code
        if ending.signal is not None:
            attributes["signal"] = ending.signal
        killed = oom_kills(os.getpid()) - self._oom_kills
        if killed > 0:
            attributes["oom_kills"] = killed
        plain = {"pid": self.process.pid, "exit_code": ending.exit_code, "signal": ending.signal}
        self._leave(f"rank-{self.rank}.exit.json", json.dumps(plain))
        if tail:
            self._leave(f"rank-{self.rank}.stderr", tail)
        return self.make(EventName.EXITED, tail, **attributes)

    def _leave(self, name: str, text: str) -> None:
        try:
            temporary = self.folder / (name + ".tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.folder / name)
        except OSError:
            pass

    def _find_stderr(self) -> Path | None:
        """Where the rank's stderr lands, if that is a file: what attach or the launcher keeps, else its own fd 2."""
        for path in (self.folder / f"rank-{self.rank}.stderr", Path(self._environ.get("LANTERNE_STDERR") or "/none")):
            if path.is_file():
                return path
        try:
            target = Path(os.readlink(f"/proc/{self.process.pid}/fd/2"))
        except OSError:
            return None
        return target if target.is_file() else None

    @staticmethod
    def _size(path: Path | None) -> int:
        try:
            return path.stat().st_size if path is not None else 0
        except OSError:
            return 0

    def _stderr_tail(self) -> str:
        if self._stderr is None:
            return ""
        try:
            with self._stderr.open("rb") as file:
                file.seek(max(0, self._size(self._stderr) - limits.STDERR_TAIL_BYTES))
                return file.read(limits.STDERR_TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""

    def close(self) -> None:
        self.box.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _call(call: Collective) -> dict[str, Any]:
    return {
        "op": call.op,
        "group": call.group,
        "group_sequence": call.sequence,
        "bytes": call.bytes,
        "dtype": call.dtype,
        "shape": call.shape,
        "entered_ns": call.entered_ns,
    }
