"""The shipper's work: drain, watch, sample, spool; beside it one thread sends and one talks to the backend.

The main loop never touches the network, so a backend that hangs delays no stall report. Everything drained
in one turn becomes one record of the spool together with the positions behind it (see ``spool``).
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lanterne.clock import Clock, SystemClock
from lanterne.collector import upkeep
from lanterne.collector.export import Exporter, Transport, batches, resolve
from lanterne.collector.local_rank import LocalRank
from lanterne.collector.relay import Relay
from lanterne.collector.sampling import Sampler
from lanterne.collector.spool import Spool
from lanterne.collector.watchdog import collect_stacks, newly_stalled
from lanterne.nouns import Event
from lanterne.quality import Quality
from lanterne.settings import CollectorSettings

TICK_S = 0.2
HEARTBEAT_S = 1.0
SAMPLE_S = 0.5
LINGER_S = 30.0
"""How long a shipper with nobody left to watch keeps trying to reach the backend."""
HURRY_S = 3.0
"""The same after a SIGTERM."""
QUIET_S = 1.5
"""How long after the last rank's end a late rank of the same attempt is waited for."""
EMPTY_S = 60.0
"""How long a shipper waits for the first rank of its folder."""
STARVED_S = 2.0
"""A turn of ours that came this late says that the host was starved: nobody is judged by it."""


class Shipper:
    """Serves one session folder. ``run`` returns when all local ranks are gone and all is acknowledged or kept.

    ``only_pid`` limits it to the rank of one process (thread mode).
    """

    def __init__(
        self, folder: Path, settings: CollectorSettings, *, only_pid: int = 0, clock: Clock | None = None
    ) -> None:
        self._folder, self._settings, self._only_pid = folder, settings, only_pid
        self._clock: Clock = clock or SystemClock()
        self.quality = Quality()
        spool = folder / ("spool" if not only_pid else f"spool-{only_pid}")
        self.spool = Spool(spool, quality=self.quality, bytes_max=settings.spool_bytes)
        self.exporter = Exporter(self.spool, settings, os.environ, quality=self.quality)
        self.sampler = Sampler()
        self._ranks: dict[int, LocalRank] = {}
        self._waiting: dict[int, list[Event]] = {}
        self._stop, self._wake, self._finished = threading.Event(), threading.Event(), threading.Event()
        self._relay: Relay | None = None
        self._threads: list[threading.Thread] = []
        self._due: dict[str, int] = {}
        self._turning = threading.Lock()
        self._linger_s = LINGER_S
        self._last_turn_ns = 0
        self._grace_until_ns = 0

    # --- life ------------------------------------------------------------------------------------

    def run(self) -> None:
        """The main loop. An error in one turn is logged and the next turn comes; it never ends the shipper."""
        self._spawn("lanterne-export", lambda: self.exporter.run(self._stop, self._wake))
        started = quiet_since = self._clock.monotonic_ns()
        try:
            while not self._stop.is_set():
                try:
                    with self._turning:
                        self.turn()
                except Exception as error:
                    self._log(f"{type(error).__name__}: {error}")
                now = self._clock.monotonic_ns()
                if any(not r.ended for r in self._ranks.values()):
                    quiet_since = now
                elif self._done(bool(self._ranks), (now - started) / 1e9, (now - quiet_since) / 1e9):
                    self._upkeep()
                    break
                self._sleep()
        finally:
            self._end()

    def _done(self, served: bool, age_s: float, quiet_s: float) -> bool:
        if quiet_s < QUIET_S or (not served and age_s < EMPTY_S):
            return False
        return self.spool.next() is None or quiet_s > QUIET_S + self._linger_s

    def hurry(self) -> None:
        """Told to end (SIGTERM): serve the ranks that still live, then give the backend only a short while."""
        self._linger_s = HURRY_S

    def finish(self, patience_s: float) -> None:
        """Thread mode, at the trainer's exit: a last drain, then at most ``patience_s`` for the backend to take it."""
        if self._finished.is_set():
            return
        deadline = time.monotonic() + patience_s
        try:
            with self._turning:
                self._flush()
            while self.spool.next() is not None and time.monotonic() < deadline and self.exporter.reachable():
                time.sleep(0.02)
        finally:
            self._stop.set()
            self._wake.set()
            self._finished.wait(max(0.0, deadline - time.monotonic()))

    def _upkeep(self) -> None:
        """Before leaving: send what earlier shippers had to leave behind, and tidy up behind jobs long gone."""
        base = self._folder.parent.parent
        if not self._only_pid and self.spool.next() is None and self.exporter.reachable():
            upkeep.adopt(base, self._settings, patience_s=self._linger_s)
        if not self._only_pid:
            upkeep.prune(base, keep=self._folder, now_s=self._clock.unix_ns() / 1e9)

    def _end(self) -> None:
        self._stop.set()
        self._wake.set()
        self._write_status("ended")
        for rank in self._ranks.values():
            rank.close()
        for thread in self._threads:
            thread.join(timeout=0.5)
        self._finished.set()

    def _spawn(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _sleep(self) -> None:
        """Until the next turn, or until a process ends."""
        fds = [r.pidfd for r in self._living() if r.pidfd >= 0]
        if not fds or self._only_pid:
            self._stop.wait(TICK_S)
        elif select.select(fds, [], [], TICK_S)[0]:
            self._stop.wait(0.05)  # give its parent the moment to note how it ended

    # --- one turn --------------------------------------------------------------------------------

    def turn(self) -> None:
        """Look at every rank, report what is due, and put all of it into the spool."""
        now = self._clock.monotonic_ns()
        if self._last_turn_ns and (now - self._last_turn_ns) / 1e9 > STARVED_S:
            self._grace_until_ns = now + int(self._settings.hang_floor_s / 2 * 1e9)
        self._last_turn_ns = now
        self._discover()
        urgent = False
        for rank in self._living():
            ended = rank.look()
            if ended is not None:
                self._say(rank, ended)
                urgent = True
        if now >= self._grace_until_ns:
            urgent |= self._report_stalls()
        if self._is_due("heartbeat", HEARTBEAT_S):
            counts = self.quality.counts()  # the shipper's own: told once, by its lowest rank
            for rank in sorted(self._living(), key=lambda r: r.rank):
                self._say(rank, rank.heartbeat(counts))
                counts = {}
        if self._is_due("sample", SAMPLE_S):
            for rank, events in self.sampler.take(self._living(), now):
                self._say(rank, *events)
        self._report_clock()
        urgent |= self._report_ends()
        if urgent or self._is_due("flush", self._settings.export_interval_s):
            self._flush()
        if self._is_due("status", 5.0):
            self._write_status("running")

    def _living(self) -> list[LocalRank]:
        return [r for r in self._ranks.values() if not r.ended]

    def _say(self, rank: LocalRank, *events: Event) -> None:
        self._waiting.setdefault(rank.rank, []).extend(events)

    def _is_due(self, what: str, period_s: float) -> bool:
        now = self._clock.monotonic_ns()
        if now < self._due.get(what, 0):
            return False
        self._due[what] = now + int(period_s * 1e9)
        return True

    def _discover(self) -> None:
        """Ranks whose ``rank-N.json`` has appeared, or whose process was replaced by a new one."""
        for path in self._folder.glob("rank-*.json"):
            number = path.name[len("rank-") : -len(".json")]
            if not number.isdigit():
                continue
            rank = int(number)
            known = self._ranks.get(rank)
            if known is not None and not (known.ended and self._pid_in(path) not in {0, known.process.pid}):
                continue
            state = known.state() if known is not None else self.spool.state.get("ranks", {}).get(number)
            self._add(rank, known, state)

    def _pid_in(self, path: Path) -> int:
        try:
            return int(json.loads(path.read_text(encoding="utf-8")).get("pid", 0))
        except (OSError, ValueError, AttributeError):
            return 0

    def _add(self, number: int, known: LocalRank | None, state: dict[str, Any] | None) -> None:
        path = self._folder / f"rank-{number}.json"
        pid = self._pid_in(path)
        if self._only_pid and pid != self._only_pid:
            return
        try:
            rank = LocalRank(
                self._folder, number, state, self._clock, floor_s=self._settings.hang_floor_s, environ=os.environ
            )
        except (ValueError, TypeError) as error:
            self._log(f"{path}: {error}")
            return
        if rank.ended and state is not None and state.get("pid") not in {None, pid}:
            rank.ended = False
        if known is not None:
            known.close()
        self._ranks[number] = rank
        if self._relay is None:
            self._start_relay(rank)

    def _start_relay(self, rank: LocalRank) -> None:
        settings = self._settings
        self._relay = Relay(
            Transport(resolve(settings, "logs", os.environ)),
            settings.endpoint,
            self._folder,
            rank.identity.job,
            rank.identity.attempt,
            self._clock,
            takes_commands=lambda: settings.commands and 0 in self._ranks and not self._ranks[0].ended,
            pinned_key=settings.command_key,
        )
        relay = self._relay
        self._spawn("lanterne-relay", lambda: relay.run(self._stop))

    # --- reports ---------------------------------------------------------------------------------

    def _report_stalls(self) -> bool:
        """Stacks of all newly stalled ranks at once, then their reports in one breath."""
        living = {r.rank: r for r in self._living() if not r.closed}
        stalled = newly_stalled({n: r.watch for n, r in living.items()})
        if not stalled:
            for rank in living.values():
                if rank.watch.since_ns:
                    self._say(rank, *rank.report_pending())
            return False
        stacks = collect_stacks({n: living[n].door for n in stalled})
        said = False
        for number in stalled:
            rank = living[number]
            if rank.watch.read_stack(stacks[number][0]):
                continue  # it compiles or saves: that phase has its own bound
            self._say(rank, *rank.report_stall(stacks[number]))
            said = True
        return said

    def _report_clock(self) -> None:
        while self._relay is not None and self._relay.snapshots:
            found = self._relay.snapshots.popleft()
            for rank in self._living():
                self._say(rank, rank.snapshot(found))

    def _report_ends(self) -> bool:
        """The last records and ``exited`` of every rank whose process is gone."""
        if self._only_pid:
            return False
        said = False
        for rank in self._living():
            ending = rank.ending()
            if ending is not None:
                self._say(rank, *rank.drain(), *rank.report_pending(), rank.report_exit(ending))
                said = True
        return said

    # --- to the spool ----------------------------------------------------------------------------

    def _flush(self) -> None:
        drained = []
        for rank in self._ranks.values():
            events = self._waiting.pop(rank.rank, [])
            if not rank.ended:
                events = events + rank.drain()
            if events:
                events.sort(key=lambda e: e.sequence)
                drained.append((rank.identity, events))
        if not drained:
            return
        parts = batches(drained, self.exporter.encodings, self.quality)
        ranks = {str(r.rank): {**r.state(), "pid": r.process.pid} for r in self._ranks.values()}
        self.spool.append(parts, {"ranks": ranks, "counts": self.quality.counts()})
        self._wake.set()

    def _write_status(self, state: str) -> None:
        found = {
            "pid": os.getpid(),
            "state": state,
            "ranks": sorted(self._ranks),
            "unsent_events": self.spool.unsent_events(),
            "spool_bytes": self.spool.size(),
            "sent_parts": self.exporter.sent_parts,
            "sent_bytes": self.exporter.sent_bytes,
            "last_reply": {"status": self.exporter.last.status, "says": self.exporter.last.says},
            "counts": self.quality.counts(),
        }
        path = self._folder / ("shipper.json" if not self._only_pid else f"shipper-{self._only_pid}.json")
        try:
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(found), encoding="utf-8")
            temporary.replace(path)
        except OSError:
            pass

    def _log(self, text: str) -> None:
        if self._is_due(f"log {text[:40]}", 10.0):
            sys.stderr.write(f"{time.strftime('%FT%T')} shipper {os.getpid()}: {text}\n")
            sys.stderr.flush()
