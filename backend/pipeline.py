"""The way of one step's events, from the store to a verdict and a remedy. It reads like DESIGN section 5:

events of a job are in the store -> ``align`` makes offsets, order and waits -> ``detect`` returns anomalies
-> ``incidents`` joins them -> ``causal.diagnose`` ranks the causes -> the policy decides and the dispatcher
writes a command -> its outcome is an event again. Nothing calls backwards.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lanterne.backend import dispatch
from lanterne.backend.alerts import Alerter
from lanterne.backend.align.clocks import UNKNOWN_NS, Clocks
from lanterne.backend.align.facts import assemble, placed, read_window
from lanterne.backend.align.follow import Follower
from lanterne.backend.align.frame import Frame
from lanterne.backend.detect import heartbeat
from lanterne.backend.detect.base import Levels, levels_of
from lanterne.backend.detect.heartbeat import Beats
from lanterne.backend.detect.safety import Safety
from lanterne.backend.incidents import FOLDED, Case, family
from lanterne.backend.judgement import Judgement, evaluate, graph_of, judge, report_of, sentence, shown
from lanterne.backend.policy import Door, defaults
from lanterne.backend.sla.watch import BurnWatch, burning
from lanterne.backend.store.batch import Batch
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.records import BY_HAND, AttemptRecord, IncidentRecord
from lanterne.causal.facts import Facts
from lanterne.clock import Clock, SystemClock, thread_cpu_ns
from lanterne.errors import LanterneError
from lanterne.nouns import NO_RANK, BreakerState, Identity, Incident, IncidentStatus, Report
from lanterne.settings import ServerSettings

__all__ = ["LiveRunner", "React", "judge", "report"]

log = logging.getLogger(__name__)

PERIOD_S, PERIOD_SOON_S = 0.6, 0.3
REST_FACTOR = 3.0
"""An evaluation that took t seconds of CPU is followed by at least this times t of rest: a quarter of a core at most.

While a remedy is under way it is ``PERIOD_SOON_S`` or that time once: its outcome is waited for."""
IDLE_CHECK_S = 2.0
ACTIVE_S = 900.0
"""Jobs silent for longer are left alone until they speak again."""
CLOCKS_EVERY_S = 5.0
BEATS_EVERY_S = 1.0
LIVE_STEPS = 400
WHOLE_STEPS = 2_000
"""Steps of the report of a whole attempt; earlier incidents come from the control store."""

_BEATS = """
SELECT rank, received_ns, time_ns, step FROM logs
WHERE job = ? AND attempt = ? AND name = 'heartbeat' AND rank >= 0 AND received_ns > ? ORDER BY received_ns
"""

React = Callable[[Incident, Facts], Incident | None]
"""The policy's door: given an incident and the facts, decide and dispatch; returns the incident with its new
status and ledger, or None when nothing changed."""


@dataclass(slots=True)
class _Watched:
    """What the runner remembers of one attempt."""

    cases: list[Case] = field(default_factory=list)
    saved: dict[str, Incident] = field(default_factory=dict)
    waits_until: int | None = None
    clock_at_ns: int = 0
    last_ns: int = 0
    beats: Beats = field(default_factory=Beats)
    beats_at_ns: int = 0
    safety: Safety | None = None
    follower: Follower | None = None
    ranks: dict[int, Identity] = field(default_factory=dict)


class LiveRunner:
    """Watches all active jobs on one daemon thread; cheap while nothing comes in."""

    def __init__(
        self,
        store: EventStore,
        control: ControlStore,
        settings: ServerSettings,
        *,
        clock: Clock | None = None,
        react: React | None = None,
        alerter: Alerter | None = None,
    ) -> None:
        self.store, self.control, self.settings = store, control, settings
        self.clock: Clock = clock or SystemClock()
        self.react: React = react or Door(control, store, settings, self.clock, self._breakers)
        self.alerter = alerter
        self.burn = None if alerter is None else BurnWatch(alerter, burning(store, control))
        self.levels = levels_of(settings.levels)
        self.evaluations = 0
        self._dirty: set[tuple[str, int]] = set()
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._lock = threading.Lock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._unsubscribe: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    # --- life ---

    def start(self) -> None:
        """Subscribe to the store and start the thread. Jobs that were active before are picked up as well."""
        self._unsubscribe = self.store.subscribe(self._committed)
        self._pick_up()
        self._thread = threading.Thread(target=self._run, name="lanterne-pipeline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for an evaluation in progress. Safe to call twice."""
        self._stop.set()
        self._wake.set()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._thread is not None:
            self._thread.join(timeout=30)
            self._thread = None

    def _pick_up(self) -> None:
        since = self.clock.unix_ns() - int(ACTIVE_S * 1e9)
        jobs = self.control.jobs(limit=200)  # of other backends, too, where the control database is shared
        recent = [job.attempt for job in jobs if job.last_seen_ns >= since and self.store.holds(job.id)]
        with self._lock:
            self._dirty |= {(a.job, a.attempt) for a in recent if a is not None}
        self._wake.set()

    def _committed(self, batches: Sequence[Batch]) -> None:
        """After a commit, on the writer's thread: note who spoke."""
        keys = {(run.job, run.attempt) for batch in batches for run in batch.runs if run.rank != NO_RANK}
        if keys:
            with self._lock:
                self._dirty |= keys
            self._wake.set()

    def _run(self) -> None:
        defaults()  # read now: the first incident should not wait for it
        while not self._stop.is_set():
            self._wake.wait(IDLE_CHECK_S)
            if self._stop.is_set():
                return
            self._wake.clear()
            began = thread_cpu_ns()
            try:
                self.run_once()
            except Exception:  # one bad job must not end the watch over the others
                log.exception("pipeline: an evaluation failed")
            took_s = (thread_cpu_ns() - began) / 1e9
            hurry = self._remedied()
            self._stop.wait(max(PERIOD_SOON_S, took_s) if hurry else max(PERIOD_S, REST_FACTOR * took_s))

    def run_once(self) -> int:
        """Evaluate every attempt with new data, and those that went quiet with an open end; returns how many."""
        with self._lock:
            keys, self._dirty = self._dirty, set()
        now = self.clock.unix_ns()
        quiet = {
            key
            for key, watched in self._watched.items()
            if key not in keys and any(case.open for case in watched.cases) and now - watched.last_ns < ACTIVE_S * 1e9
        }
        for key, watched in self._watched.items():
            if key not in keys | quiet and now - watched.last_ns > ACTIVE_S * 1e9:
                watched.follower = None  # its memory; it is built anew when the job speaks again
        for key in sorted(keys | quiet):
            if self._stop.is_set():
                break
            try:
                self.evaluate(*key)
            except LanterneError as error:
                log.warning("pipeline: job %s attempt %d: %s", *key, error)
                with self._lock:
                    self._dirty.add(key)
        return len(keys)

    def _remedied(self) -> bool:
        """Is a remedy under way? Then somebody waits for its outcome."""
        under_way = (IncidentStatus.ACTING, IncidentStatus.VERIFYING)
        return any(case.incident.status in under_way for watched in self._watched.values() for case in watched.cases)

    # --- one evaluation ---

    def evaluate(self, job: str, attempt: int) -> Judgement:
        """Build the facts, judge them, save what is new, let the policy react."""
        key = (job, attempt)
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _Watched(cases=known_cases(self.control, job, attempt))
            if self.alerter is not None:
                self.alerter.remember(case.incident for case in watched.cases)
        now = self.clock.unix_ns()
        facts, clocks = self._facts(job, attempt, watched, now)
        beats = self._heard(job, attempt, watched, now)
        judgement = evaluate(facts, watched.cases, now_ns=now, levels=self.levels, beats=beats, before=watched.safety)
        watched.safety = judgement.safety
        settled = [self._settle(job, attempt, watched, case, facts) for case in judgement.cases]
        watched.cases = [case for case in settled if FOLDED not in case.incident.ledger]
        watched.last_ns = now
        self._keep_waits(job, attempt, watched, facts)
        self._keep_clocks(job, attempt, watched, facts, clocks)
        if self.burn is not None:
            self.burn.look(job, now)
        self.evaluations += 1
        report = report_of(facts, watched.cases, watched.safety)
        return Judgement(report=report, cases=tuple(watched.cases), safety=judgement.safety)

    def safety(self, job: str, attempt: int) -> Safety | None:
        """Breakers and service rules of an attempt as of its last evaluation; None where there was none yet."""
        watched = self._watched.get((job, attempt))
        return None if watched is None else watched.safety

    def _breakers(self, job: str, attempt: int) -> Sequence[BreakerState]:
        found = self.safety(job, attempt)
        return () if found is None else found.moved

    def _heard(self, job: str, attempt: int, watched: _Watched, now_ns: int) -> Beats:
        """The heartbeats with those that came since the last look, at most once a second."""
        if now_ns - watched.beats_at_ns >= BEATS_EVERY_S * 1e9:
            since = max(watched.beats.newest_ns, now_ns - int(heartbeat.KEPT_S * 1e9))
            found = self.store.query(_BEATS, [job, attempt, since])
            columns = [found.column(name).to_numpy().astype(np.int64) for name in found.column_names]
            watched.beats, watched.beats_at_ns = heartbeat.joined(watched.beats, *columns), now_ns
        return watched.beats

    def _facts(self, job: str, attempt: int, watched: _Watched, now: int) -> tuple[Facts, Clocks]:
        """Series of the last steps from the store, calls from the stream that aligns them as they come in."""
        frame = read_window(self.store, job, attempt, LIVE_STEPS, calls=False)
        if watched.follower is None:
            watched.follower = Follower(self.store, job, attempt, LIVE_STEPS)
        watched.follower.catch_up(now)
        frame, seen_ns = _until_ended(self.control, frame, now)
        expected = _world_size(self.control, job, attempt)
        since = int(frame.spans.step.min()) if len(frame.spans.step) else 0
        aligned = watched.follower.aligned(sorted(frame.hosts), since=since)
        facts, clocks = assemble(frame, now_ns=seen_ns, ranks_expected=expected, sources=("live",), aligned=aligned)
        if not watched.ranks.keys() >= set(facts.ranks):
            watched.ranks = {r.identity.rank: r.identity for r in self.control.ranks(job, attempt)}
        facts = placed(facts, watched.ranks)
        late = watched.follower.aligner.late
        if late:
            note = f"{late} collective calls came more than {LIVE_STEPS} steps late and are not aligned"
            facts = replace(facts, quality=replace(facts.quality, notes=(*facts.quality.notes, note)))
        return facts, clocks

    def _settle(self, job: str, attempt: int, watched: _Watched, case: Case, facts: Facts) -> Case:
        """Save a case that changed, then hand it to the policy and save what that did."""
        current = self.control.incident(case.incident.id)
        case = _merged(case, current)
        self._save(job, attempt, watched, case)
        if case.open and case.incident.causes:
            changed = self.react(case.incident, facts)
            if changed is not None:
                case = replace(case, incident=changed)
                self._save(job, attempt, watched, case)
        return case

    def _save(self, job: str, attempt: int, watched: _Watched, case: Case) -> None:
        if watched.saved.get(case.incident.id) == case.incident:
            self._announce(job, case)  # still open after hours, or its silence is over
            return
        self.control.save_incident(job, attempt, case.incident, fingerprint=case.fingerprint, verdict=sentence(case))
        if case.diagnosis is not None:
            self.control.save_graph(case.incident.id, graph_of(case.diagnosis))
        watched.saved[case.incident.id] = case.incident
        self._announce(job, case)

    def _announce(self, job: str, case: Case) -> None:
        if self.alerter is not None:
            self.alerter.notify(case.incident, job, fingerprint=case.fingerprint, says=sentence(case))

    def _keep_waits(self, job: str, attempt: int, watched: _Watched, facts: Facts) -> None:
        """Append the waits of steps that all ranks have finished, once each, for the API's views."""
        if watched.waits_until is None:
            found = self.store.rows(
                "SELECT max(step) AS m FROM waits WHERE job = ? AND attempt = ?", [job, attempt]
            )  # a server that was restarted goes on where it was
            watched.waits_until = int(found[0]["m"]) if found and found[0]["m"] is not None else -1
        done = np.isfinite(facts.get("step_ms"))
        if not done.any():
            return
        last = len(facts.steps) - 1 - done[::-1].argmax(axis=0)
        ready = int(facts.steps[int(last[done.any(axis=0)].min())])
        w = facts.waits
        rows = np.flatnonzero((w.step > watched.waits_until) & (w.step <= ready))
        if not len(rows):
            return
        self.store.append_waits(
            {
                "job": [job] * len(rows),
                "attempt": [attempt] * len(rows),
                "group_name": [w.group[g] for g in w.group_index[rows]],
                "group_sequence": w.sequence[rows],
                "step": w.step[rows],
                "rank": w.rank[rows],
                "op": [w.op[n] for n in w.op_index[rows]],
                "bytes": w.bytes[rows],
                "lateness_ms": w.lateness_ms[rows],
                "wait_ms": w.wait_ms[rows],
                "transfer_ms": w.transfer_ms[rows],
                "error_ms": w.error_ms[rows],
            }
        )
        watched.waits_until = ready

    def _keep_clocks(self, job: str, attempt: int, watched: _Watched, facts: Facts, clocks: Clocks) -> None:
        """Append each rank's offset now and then, for the API's rank list."""
        if facts.now_ns - watched.clock_at_ns < CLOCKS_EVERY_S * 1e9 or not facts.ranks or not len(facts.steps):
            return
        found = [clocks.at(rank, facts.now_ns) for rank in facts.ranks]
        found = [c for c in found if c.error_ns < UNKNOWN_NS]
        if not found:
            return
        self.store.append_clocks(
            {
                "job": [job] * len(found),
                "attempt": [attempt] * len(found),
                "rank": [c.rank for c in found],
                "at_ns": [c.at_ns for c in found],
                "offset_ns": [c.offset_ns for c in found],
                "error_ns": [c.error_ns for c in found],
                "drift_ppm": [c.drift_ppm for c in found],
            }
        )
        watched.clock_at_ns = facts.now_ns


def _merged(case: Case, current: IncidentRecord | None) -> Case:
    """What people and policies wrote in the meantime wins over what this thread remembers."""
    if current is None:
        return case
    stored, mine = current.incident, case.incident
    ledger = {**mine.ledger, **stored.ledger}
    remedied = (IncidentStatus.ACTING, IncidentStatus.VERIFYING)
    theirs = stored.status in remedied or mine.status in remedied or BY_HAND in stored.ledger
    status = stored.status if theirs else mine.status
    if status is not IncidentStatus.RESOLVED:
        ledger.pop("verified", None)
    causes = mine.causes
    if "decided" in ledger and causes and stored.causes and stored.causes[0].category is causes[0].category:
        causes = (replace(causes[0], remedy=stored.causes[0].remedy), *causes[1:])  # what was decided stands
    return replace(case, incident=replace(mine, ledger=ledger, status=status, causes=causes))


def _until_ended(control: ControlStore, frame: Frame, now_ns: int) -> tuple[Frame, int]:
    """The frame and the time at which to judge it: an attempt that was ended by order is judged as it was then."""
    ended_ns = dispatch.ended_ns(control, frame.job, frame.attempt)
    if not ended_ns:
        return frame, now_ns
    return replace(frame, logs=[log for log in frame.logs if log.time_ns <= ended_ns]), min(now_ns, ended_ns)


def known_cases(control: ControlStore, job: str, attempt: int) -> list[Case]:
    """Incidents that an earlier life of the server saved, as cases to go on with."""
    cases = []
    for record in control.incidents(job, attempt=attempt):
        incident = record.incident
        if FOLDED in incident.ledger:
            continue
        first = incident.opened_step or 0
        since = [c.since_step for c in incident.causes if c.since_step is not None]
        cases.append(
            Case(
                incident=incident,
                fingerprint=record.fingerprint,
                first_step=min([first, *since]),
                last_step=max([first, *since]),
                families=frozenset({family(incident.kind)}),
            )
        )
    return cases


def _attempt(control: ControlStore, job: str) -> AttemptRecord | None:
    found = control.job(job)
    return None if found is None else found.attempt


def _world_size(control: ControlStore, job: str, attempt: int) -> int:
    found = control.job(job)
    sizes = [a.world_size for a in found.attempts if a.attempt == attempt] if found is not None else []
    return max(sizes, default=0)


def report(
    store: EventStore, control: ControlStore, job: str, attempt: int | None = None, *, clock: Clock | None = None,
    levels: Levels | None = None,
) -> Report:  # fmt: skip
    """The report of a job's attempt (the newest one by default), over the whole attempt; the job may be over.

    Incidents keep the identity, status and ledger under which the control store knows them. Raises
    LanterneError when the job is not known.
    """
    newest = _attempt(control, job)
    if newest is None:
        raise LanterneError(f"job {job!r} is not known; see GET /api/v1/jobs")
    chosen = newest.attempt if attempt is None else attempt
    now = (clock or SystemClock()).unix_ns()
    frame, seen_ns = _until_ended(control, read_window(store, job, chosen, WHOLE_STEPS), now)
    expected = _world_size(control, job, chosen)
    facts, _ = assemble(frame, now_ns=seen_ns, ranks_expected=expected, sources=("live",))
    facts = placed(facts, {r.identity.rank: r.identity for r in control.ranks(job, chosen)})
    known = known_cases(control, job, chosen)
    judgement = evaluate(facts, known, now_ns=now, levels=levels)
    stored = {record.incident.id: record for record in control.incidents(job, attempt=chosen)}
    cases = [_merged(case, stored.get(case.incident.id)) for case in judgement.cases]
    first = int(facts.steps[0]) if len(facts.steps) else 0
    return report_of(
        facts, [*_led_here(control, job, chosen), *(case for case in cases if _stands(case, first))], judgement.safety
    )


def _led_here(control: ControlStore, job: str, attempt: int) -> list[Case]:
    """Incidents of earlier attempts about which something was done: without them nobody knows why there is a next."""
    return [
        case
        for earlier in {r.attempt for r in control.incidents(job) if r.attempt < attempt}
        for case in known_cases(control, job, earlier)
        if "acted" in case.incident.ledger and shown(case)
    ]


def _stands(case: Case, first_step: int) -> bool:
    """A case that the whole attempt shows, that lies before its window, or that led somewhere."""
    if case.anomalies and not case.missed:
        return shown(case)
    if case.open and case.incident.kind in heartbeat.KINDS:
        return True  # only the live runner hears heartbeats
    before = case.first_step < first_step
    led = case.incident.status in (IncidentStatus.ACTING, IncidentStatus.VERIFYING, IncidentStatus.RESOLVED)
    return shown(case) and (before or led)
