"""Incidents with their causes, graphs, decisions, notes and silences in the control database."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from sqlalchemy import delete, func, select, update

from lanterne.backend.store.database import Database, dumps
from lanterne.backend.store.models import CauseRow, DecisionRow, IncidentRow, NoteRow, SilenceRow
from lanterne.backend.store.records import (
    BY_HAND,
    OPEN_STATUSES,
    DecisionRecord,
    IncidentRecord,
    IncidentSummary,
    NoteRecord,
    SilenceRecord,
    rfc3339,
)
from lanterne.nouns import Incident, IncidentStatus, to_json


def incident_of(body: Mapping[str, Any]) -> Incident:
    """An Incident from its JSON form (inverse of :func:`lanterne.nouns.to_json`)."""
    return msgspec.convert(body, Incident)


def _record(row: IncidentRow) -> IncidentRecord:
    return IncidentRecord(
        incident=incident_of(json.loads(row.body)),
        job=row.job,
        attempt=row.attempt,
        opened_ns=row.opened_ns,
        updated_ns=row.updated_ns,
        fingerprint=row.fingerprint,
        verdict=row.verdict,
    )


def _decision(row: DecisionRow) -> DecisionRecord:
    return DecisionRecord(
        incident=row.incident,
        job=row.job,
        policy=row.policy,
        chose=row.chose,
        says=row.says,
        at_ns=row.at_ns,
        body=json.loads(row.body),
    )


class Incidents(Database):
    """The findings and what people said and decided about them."""

    def save_incident(
        self, job: str, attempt: int, incident: Incident, *, fingerprint: str = "", verdict: str = ""
    ) -> None:
        """Insert or replace by ``incident.id``; its causes are replaced with it. Empty texts keep what was there."""
        now = self.clock.unix_ns()
        with self.writing() as session:
            row = session.get(IncidentRow, incident.id)
            if row is None:
                row = IncidentRow(
                    id=incident.id, job=job, attempt=attempt, opened_ns=now, fingerprint="", verdict="", graph=""
                )
                session.add(row)
            row.kind, row.severity, row.status = incident.kind, str(incident.severity), str(incident.status)
            row.opened_step, row.updated_ns, row.body = incident.opened_step, now, dumps(to_json(incident))
            row.fingerprint = fingerprint or row.fingerprint
            row.verdict = verdict or row.verdict
            session.flush()
            session.execute(delete(CauseRow).where(CauseRow.incident == incident.id))
            for place, cause in enumerate(incident.causes):
                session.add(
                    CauseRow(
                        incident=incident.id,
                        place=place,
                        category=str(cause.category),
                        rank=cause.subject.rank,
                        host=cause.subject.host,
                        since_step=cause.since_step,
                        confidence=cause.confidence,
                        gpu_hours=cause.cost.gpu_hours,
                    )
                )

    def incident(self, incident: str) -> IncidentRecord | None:
        with self.reading() as session:
            row = session.get(IncidentRow, incident)
            return None if row is None else _record(row)

    def incidents(
        self,
        job: str | None = None,
        *,
        attempt: int | None = None,
        open_only: bool = False,
        status: str | None = None,
        before: tuple[int, str] | None = None,
        limit: int = 1000,
    ) -> list[IncidentRecord]:
        """Newest first; ``before`` is (opened_ns, id) of the last one of the page before."""
        query = select(IncidentRow).order_by(IncidentRow.opened_ns.desc(), IncidentRow.id.desc()).limit(limit)
        if job is not None:
            query = query.where(IncidentRow.job == job)
        if attempt is not None:
            query = query.where(IncidentRow.attempt == attempt)
        if open_only:
            query = query.where(IncidentRow.status.in_(OPEN_STATUSES))
        if status is not None:
            query = query.where(IncidentRow.status == status)
        if before is not None:
            at, last = before
            query = query.where(
                (IncidentRow.opened_ns < at) | ((IncidentRow.opened_ns == at) & (IncidentRow.id < last))
            )
        with self.reading() as session:
            return [_record(row) for row in session.scalars(query)]

    def set_incident_status(self, incident: str, status: IncidentStatus) -> IncidentRecord | None:
        """A person closes it: status in columns and body alike, and the stamp ``closed``; None where there is none."""
        with self.writing() as session:
            row = session.get(IncidentRow, incident)
            if row is None:
                return None
            row.status, row.updated_ns = str(status), self.clock.unix_ns()
            body = json.loads(row.body)
            row.body = dumps(
                body | {"status": str(status), "ledger": body["ledger"] | {BY_HAND: rfc3339(row.updated_ns)}}
            )
            session.flush()
            return _record(row)

    def incident_summary(self, jobs: Sequence[str]) -> dict[str, IncidentSummary]:
        """What the job list says of incidents, by job; jobs without any are there too."""
        with self.reading() as session:
            opened = select(IncidentRow.job, IncidentRow.verdict, IncidentRow.kind).where(
                IncidentRow.job.in_(jobs), IncidentRow.status.in_(OPEN_STATUSES)
            )
            found = dict.fromkeys(jobs, IncidentSummary())
            for job, verdict, kind in session.execute(opened.order_by(IncidentRow.opened_ns.desc())):
                old = found[job]
                found[job] = IncidentSummary(
                    open=old.open + 1, verdict=old.verdict or verdict, hang_open=old.hang_open or kind == "hang"
                )
            costs = (
                select(IncidentRow.job, func.sum(CauseRow.gpu_hours))
                .join(CauseRow, CauseRow.incident == IncidentRow.id)
                .where(IncidentRow.job.in_(jobs), CauseRow.place == 0)
                .group_by(IncidentRow.job)
            )
            for job, lost in session.execute(costs):
                found[job] = replace(found[job], gpu_hours_lost=float(lost or 0.0))
        return found

    def save_graph(self, incident: str, graph: Mapping[str, Any]) -> None:
        """Keep ``{"nodes": [...], "edges": [...]}`` of docs/seams.md beside the incident, if there is one."""
        with self.writing() as session:
            row = session.get(IncidentRow, incident)
            if row is not None:
                row.graph = dumps(to_json(graph))

    def graph(self, incident: str) -> dict[str, Any] | None:
        """The graph behind the diagnosis; empty lists where none was kept, None when there is no such incident."""
        with self.reading() as session:
            row = session.get(IncidentRow, incident)
        if row is None:
            return None
        found: dict[str, Any] = json.loads(row.graph) if row.graph else {"nodes": [], "edges": []}
        return found

    def save_decision(self, decision: DecisionRecord) -> None:
        with self.writing() as session:
            session.add(
                DecisionRow(
                    incident=decision.incident,
                    job=decision.job,
                    policy=decision.policy,
                    chose=decision.chose,
                    says=decision.says,
                    body=dumps(to_json(decision.body)),
                    at_ns=decision.at_ns or self.clock.unix_ns(),
                )
            )

    def decisions(self, incident: str) -> list[DecisionRecord]:
        """Oldest first."""
        query = select(DecisionRow).where(DecisionRow.incident == incident).order_by(DecisionRow.id)
        with self.reading() as session:
            return [_decision(d) for d in session.scalars(query)]

    def recent_decisions(
        self, *, job: str | None = None, policy: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[tuple[int, DecisionRecord]]:
        """(row number, decision), newest first; ``before`` is the number of the last row already seen."""
        query = select(DecisionRow).order_by(DecisionRow.id.desc()).limit(limit)
        if job is not None:
            query = query.where(DecisionRow.job == job)
        if policy is not None:
            query = query.where(DecisionRow.policy == policy)
        if before is not None:
            query = query.where(DecisionRow.id < before)
        with self.reading() as session:
            return [(d.id, _decision(d)) for d in session.scalars(query)]

    def add_note(self, incident: str, author: str, says: str) -> None:
        with self.writing() as session:
            session.add(NoteRow(incident=incident, author=author, says=says, at_ns=self.clock.unix_ns()))

    def notes(self, incident: str) -> list[NoteRecord]:
        query = select(NoteRow).where(NoteRow.incident == incident).order_by(NoteRow.id)
        with self.reading() as session:
            return [
                NoteRecord(incident=n.incident, author=n.author, says=n.says, at_ns=n.at_ns)
                for n in session.scalars(query)
            ]

    def add_silence(self, job: str, fingerprint: str, until_ns: int, *, author: str = "", says: str = "") -> None:
        with self.writing() as session:
            session.add(SilenceRow(job=job, fingerprint=fingerprint, until_ns=until_ns, author=author, says=says))

    def silences(self, job: str) -> list[SilenceRecord]:
        """Those of a job that are not yet over."""
        return self.all_silences(job)

    def all_silences(self, job: str | None = None) -> list[SilenceRecord]:
        """Those not yet over, the first to end first; of all jobs without ``job``."""
        query = select(SilenceRow).where(SilenceRow.until_ns > self.clock.unix_ns()).order_by(SilenceRow.until_ns)
        if job is not None:
            query = query.where(SilenceRow.job == job)
        with self.reading() as session:
            return [
                SilenceRecord(
                    id=s.id, job=s.job, fingerprint=s.fingerprint, until_ns=s.until_ns, author=s.author, says=s.says
                )
                for s in session.scalars(query)
            ]

    def end_silence(self, number: int) -> None:
        """End a silence now."""
        with self.writing() as session:
            session.execute(update(SilenceRow).where(SilenceRow.id == number).values(until_ns=self.clock.unix_ns()))
