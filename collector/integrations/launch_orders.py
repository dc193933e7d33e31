"""Orders that ``lanterne run`` carries out itself: restart, restart without a node, give up.

A thread beside the supervised command asks the backend for them, as the shipper does for the trainer's. Each is
examined like any other (signature, job, attempt, expiry, counter), written to ``commands/launcher.wal`` of the
attempt's session folder with fsync, and only then is the command ended: an order is carried out once or not at all.
The next attempt gets the next attempt number, whatever counts torchrun keeps of its own restarts.

Every node's launcher takes the same order and comes to the same answer, so no vote is needed among them.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lanterne import orders
from lanterne.clock import Clock, SystemClock
from lanterne.collector import identity as identities
from lanterne.collector.votelog import VoteLog
from lanterne.errors import CommandRefused
from lanterne.nouns import NO_RANK, Event, EventName, Identity, Kind
from lanterne.settings import CollectorSettings

if TYPE_CHECKING:
    from lanterne.collector.export import Exporter, Transport
    from lanterne.collector.spool import Spool
    from lanterne.quality import Quality

POLL_S, POLL_MAX_S = 0.5, 30.0
NODES_A_POLL = 16
"""Every launcher asks each ``POLL_S`` up to so many nodes, more seldom in proportion beyond."""
PATIENCE_S = 20.0
"""How long a command that failed is waited for with an order, where the backend acts by itself."""
GRACE_S = 10.0
"""From SIGTERM to SIGKILL of the whole process tree."""
DELIVER_S = 3.0
GIVE_UP_EXIT = 76
"""Exit code after ``give_up`` and on a node that is left out: do not start this again."""
FOR_NEXT = {
    "nccl_algo": "NCCL_ALGO",
    "nccl_interface": "NCCL_SOCKET_IFNAME",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    "heartbeat_timeout_s": "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "micro_batch": "LANTERNE_MICRO_BATCH",
}
"""Parameters of ``restart`` and the environment variables that they set for the next attempt."""
_PLAIN = re.compile(r"^[A-Za-z0-9_.,:=^-]{1,64}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What comes after the command: the next attempt with more ``environment``, or the end with exit ``code``."""

    order: Mapping[str, Any]
    attempt: int = -1
    code: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def elastic(command: Sequence[str]) -> bool:
    """Whether torchrun's ``--nnodes MIN:MAX`` lets the job go on with one node fewer."""
    words = [word for part in command for word in part.split("=", 1)]
    for option, value in itertools.pairwise(words):
        if option == "--nnodes" and re.fullmatch(r"\d+:\d+", value):
            low, high = map(int, value.split(":"))
            return low < high
    return False


class Orders:
    """The launcher's side. ``start``/``started``/``ended``/``close`` belong to the main thread.

    ``notes`` is the folder in which shippers leave word of the session folders that they serve.
    """

    def __init__(
        self, settings: CollectorSettings, command: Sequence[str], environ: Mapping[str, str], notes: Path,
        *, torchrun: bool = True, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.command, self.environ, self.notes = settings, command, environ, notes
        self.torchrun = torchrun
        self.clock: Clock = clock or SystemClock()
        self.host = identities.node_name(environ)
        self.ceiling, self.key, self.restarts = "", settings.command_key, 0
        self.attempt_min = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._taken: Next | None = None
        self._over = self._asked = False
        self._seen: set[str] = set()
        self._lock, self._stop, self._gone = threading.Lock(), threading.Event(), threading.Event()
        self._link: _Link | None = None
        self._thread = threading.Thread(target=self._run, name="lanterne-launch", daemon=True)

    # --- main thread -----------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def started(self, process: subprocess.Popen[bytes]) -> None:
        """A command runs; what was ordered before it is carried out with that."""
        self._gone.clear()
        with self._lock:
            self._process, done, self._taken = process, self._taken, None
        if done is not None:
            self._say(done.order, "applied", before={"attempt": done.attempt - 1}, after={"attempt": done.attempt})

    def ended(self, code: int, stopped: Callable[[], bool]) -> Next | None:
        """The command is gone with ``code``; what comes next, None for the end.

        A command that failed by itself is waited for with an order, unless nobody would give one or ``stopped()``:
        a person or the scheduler ended it.
        """
        self._gone.set()
        deadline = self.clock.monotonic_ns() + int(PATIENCE_S * 1e9)
        while self._taken is None and code and self._hopes() and self.clock.monotonic_ns() < deadline:
            if stopped() or self._stop.wait(0.05):
                break
        with self._lock:
            taken = None if stopped() else self._taken
            self._over = taken is None or taken.attempt < 0
        if taken is not None and taken.attempt < 0:
            self._say(taken.order, "applied", after={"exit_code": taken.code})
        return taken

    def _hopes(self) -> bool:
        """May an order still come? Not known before the backend was asked once, where there is somebody to ask for."""
        undecided = not self._asked and self._session() is not None
        return (self.ceiling == "auto" or undecided) and self.restarts < self.settings.restarts

    def close(self) -> None:
        """End the thread and give the backend a moment to take what was said. Never raises."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        if self._link is not None:
            self._link.close(self.clock)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        wait = POLL_S
        while not self._stop.wait(wait):
            try:
                wait = self._pace() if self._turn() else min(POLL_MAX_S, wait * 2)
            except Exception as error:  # the command must not suffer from what asks beside it
                sys.stderr.write(f"lanterne: orders of the launcher: {type(error).__name__}: {error}\n")
                wait = POLL_MAX_S

    def _session(self) -> Path | None:
        """The session folder ``<dir>/<job>/<attempt>`` of the attempt that attached last."""
        found = sorted(self.notes.glob("shipper-*"), key=lambda note: note.stat().st_mtime)
        return Path(found[-1].read_text(encoding="utf-8")) if found else None

    def _pace(self) -> float:
        """Seconds between two questions: thousands of nodes must not ask twice a second each."""
        session = self._session()
        abouts = [] if session is None else list(session.glob("rank-*.json"))
        try:
            world = int(json.loads(abouts[0].read_text(encoding="utf-8"))["identity"]["world_size"]) if abouts else 1
        except (OSError, ValueError, KeyError, TypeError):
            world = 1
        nodes = world / max(len(abouts), 1)
        return POLL_S * min(max(1.0, nodes / NODES_A_POLL), POLL_MAX_S / POLL_S)

    def _turn(self) -> bool:
        """Ask once; False when nobody answered."""
        session = self._session()
        if session is None:
            return True
        if self._link is None:
            self._link = _Link(self.settings, self.environ, self.notes)
        job, attempt = session.parent.name, max(int(session.name), self.attempt_min)
        found = self._link.get(f"/jobs/{quote(job, safe='')}/commands?where=launcher&attempt={attempt}")
        self._asked = True
        if not isinstance(found, dict) or not isinstance(found.get("items"), list):
            return False
        self.ceiling = str(found.get("ceiling", ""))
        for order in found["items"][:100]:
            known = orders.ACTIONS.get(str(order.get("action"))) if isinstance(order, dict) else None
            if known is not None and known.where == "launcher":
                self.take(order, session, attempt)
        return True

    def take(self, order: Mapping[str, Any], session: Path, attempt: int) -> None:
        """Examine one order, put it on record, and end the command for it. A refusal is said, not raised."""
        if str(order.get("id")) in self._seen:
            return
        self._seen.add(str(order.get("id")))
        self._say(order, "received", job=session.parent.name, attempt=attempt)
        log: VoteLog | None = None
        try:
            log = VoteLog(session / "commands" / "launcher.wal")
            self._examine(order, session, attempt, log.last_counter)
            planned = self._plan(order, session.parent.name, attempt)
            number = int(order["counter"])
            log.write("vote", round=number, id=order["id"], counter=number, vote="yes", at_ns=self.clock.unix_ns())
            log.write("decision", round=number, decision="commit")
        except (CommandRefused, OSError) as error:
            self._say(order, "refused", job=session.parent.name, attempt=attempt, detail=str(error)[:1000])
            return
        finally:
            if log is not None:
                log.close()
        self._carry_out(planned, attempt)

    def _examine(self, order: Mapping[str, Any], session: Path, attempt: int, last_counter: int) -> None:
        self.key = self.key or self._first_key(session)
        orders.examine(
            order, public=self.key, job=session.parent.name, attempt=attempt, now_ns=self.clock.unix_ns(),
            last_counter=last_counter,
        )  # fmt: skip

    def _first_key(self, session: Path) -> str:
        """The key that the shipper pinned; on a node without rank 0, where none is, the one the backend gives now."""
        try:
            told = json.loads((session / "commands" / "key.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            told = self._link.get(f"/jobs/{quote(session.parent.name, safe='')}/key") if self._link else None
        if not isinstance(told, dict) or not (told.get("public_key") or told.get("key")):
            raise CommandRefused(f"no public key for job {session.parent.name} is known")
        return str(told.get("public_key") or told["key"])

    def _plan(self, order: Mapping[str, Any], job: str, attempt: int) -> Next:
        action, parameters = str(order["action"]), order["parameters"]
        if action == "give_up":
            return Next(order=order, code=GIVE_UP_EXIT)
        if self.restarts >= self.settings.restarts:
            raise CommandRefused(
                f"{action}: this launch was restarted {self.restarts} times, LANTERNE_RESTARTS allows no more"
            )
        if action == "restart_without_node":
            if not elastic(self.command):
                raise CommandRefused(
                    f"{action}: this launch has a fixed number of nodes; start it with --nnodes MIN:MAX"
                )
            if parameters["host"] == self.host:
                return Next(order=order, code=GIVE_UP_EXIT)
        wanted = {FOR_NEXT[name]: str(value) for name, value in parameters.items() if name in FOR_NEXT}
        odd = [f"{name} {value!r}" for name, value in wanted.items() if not _PLAIN.match(value)]
        if odd:
            raise CommandRefused(f"{action}: {', '.join(odd)} holds characters other than letters, digits and _.,:=^-")
        base = attempt + 1 - identities.own_attempt(self.environ, elastic=self.torchrun)
        wanted |= {identities.ATTEMPT_BASE: str(base), "LANTERNE_JOB": job}
        return Next(order=order, attempt=attempt + 1, environment=wanted)

    def _carry_out(self, planned: Next, attempt: int) -> None:
        with self._lock:
            late = self._over
            if not late:
                self._taken, process = planned, self._process
                if planned.attempt > 0:
                    self.restarts += 1
                    self.attempt_min = planned.attempt
        if late:
            self._say(planned.order, "refused", attempt=attempt, detail="the command has ended for good")
            return
        self._say(planned.order, "committed", attempt=attempt)
        sys.stderr.write(f"lanterne: {planned.order['action']} ordered ({planned.order['id']}); ending the command\n")
        if process is not None and not self._gone.is_set():
            end_tree(process, self._gone.wait)

    def _say(self, order: Mapping[str, Any], phase: str, *, job: str = "", attempt: int = -1, **fields: Any) -> None:
        if self._link is None:
            return
        told = {k: v if isinstance(v, str) else json.dumps(v) for k, v in fields.items()}
        more = {"id": str(order.get("id", "")), "action": str(order.get("action", "")), "host": self.host, **told}
        event = Event(
            kind=Kind.EVENT, name=EventName.COMMAND, sequence=-1, lamport=-1, unix_ns=self.clock.unix_ns(),
            monotonic_ns=self.clock.monotonic_ns(), attributes={**more, "phase": phase, "rank": NO_RANK},
        )  # fmt: skip
        whose = attempt if attempt >= 0 else int(order.get("attempt", 0))
        self._link.send(Identity(job=job or str(order["job"]), attempt=whose, rank=NO_RANK, host=self.host), event)


def end_tree(process: subprocess.Popen[bytes], gone: Callable[[float], bool], grace_s: float = GRACE_S) -> None:
    """SIGTERM to the command; after ``grace_s`` SIGKILL to it and to all that it started. Never raises.

    ``gone(seconds)`` waits for the command's end, which the main thread sees.
    """
    import psutil

    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
    except (psutil.Error, OSError):
        return
    gone(grace_s)
    for member in family:
        try:
            member.kill()
        except psutil.Error:
            continue


class _Link:
    """Questions to ``/api/v1`` and events to OTLP, over the collector's own transport and spool."""

    def __init__(self, settings: CollectorSettings, environ: Mapping[str, str], notes: Path) -> None:
        from lanterne.collector.export import Exporter, Transport, resolve
        from lanterne.collector.spool import Spool
        from lanterne.quality import Quality

        self.quality: Quality = Quality()
        self.base = settings.endpoint.rstrip("/") + "/api/v1"
        self.transport: Transport = Transport(resolve(settings, "logs", environ))
        self.spool: Spool = Spool(notes / "spool", quality=self.quality, bytes_max=settings.spool_bytes)
        self.exporter: Exporter = Exporter(self.spool, settings, environ, quality=self.quality)
        self.stop, self.wake, self.lock = threading.Event(), threading.Event(), threading.Lock()
        self.thread = threading.Thread(
            target=self.exporter.run, args=(self.stop, self.wake), name="lanterne-export", daemon=True
        )
        self.thread.start()

    def get(self, path: str) -> Any:
        try:
            status, _, body = self.transport.request("GET", self.base + path)
            return json.loads(body) if status == 200 else None
        except (OSError, ValueError, RecursionError):
            return None

    def send(self, identity: Identity, event: Event) -> None:
        from lanterne.collector.export import batches, full_identity

        try:
            with self.lock:
                parts = batches([(full_identity(identity), [event])], self.exporter.encodings, self.quality)
                self.spool.append(parts, {})
        except OSError:
            return
        self.wake.set()

    def close(self, clock: Clock) -> None:
        deadline = clock.monotonic_ns() + int(DELIVER_S * 1e9)
        while self.spool.next() is not None and self.exporter.reachable() and clock.monotonic_ns() < deadline:
            self.stop.wait(0.02)
        self.stop.set()
        self.wake.set()
        self.thread.join(timeout=1.0)
        self.transport.close()
        self.exporter.close()
