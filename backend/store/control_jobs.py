"""Jobs, attempts, ranks and the jobs' keys in the control database."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import func, select

from lanterne.backend.store.database import Database, dumps
from lanterne.backend.store.models import Attempt, Job, JobKey, Rank
from lanterne.backend.store.records import AttemptRecord, JobRecord, RankRecord
from lanterne.nouns import NO_RANK, Identity
from lanterne.orders import generate_key


def _rank_record(row: Rank, world_size: int) -> RankRecord:
    identity = Identity(
        job=row.job,
        attempt=row.attempt,
        rank=row.rank,
        local_rank=row.local_rank,
        world_size=world_size,
        host=row.host,
        pid=row.pid,
        backend=row.backend,
        device=row.device,
        mesh=json.loads(row.mesh),
    )
    return RankRecord(identity=identity, first_seen_ns=row.first_seen_ns, last_seen_ns=row.last_seen_ns)


class Jobs(Database):
    """What exists: written by ingest as identities are seen."""

    def touch(self, seen: Iterable[Identity], at_ns: int | None = None) -> None:
        """Record identities as seen at ``at_ns`` (server Unix ns, default now); new jobs and attempts appear."""
        at = self.clock.unix_ns() if at_ns is None else at_ns
        found = list(seen)
        if not found:
            return
        times = {"first_seen_ns": at, "last_seen_ns": at}
        jobs = {i.job: {"id": i.job, "service": i.service_name[:256], **times} for i in found}
        attempts: dict[tuple[str, int], dict[str, Any]] = {}
        for i in found:
            old = attempts.setdefault(
                (i.job, i.attempt), {"job": i.job, "attempt": i.attempt, "world_size": 0, **times}
            )
            old["world_size"] = max(old["world_size"], i.world_size)
        ranks = {
            (i.job, i.attempt, i.rank): {
                "job": i.job,
                "attempt": i.attempt,
                "rank": i.rank,
                "local_rank": i.local_rank,
                "host": i.host[:256],
                "device": i.device[:128],
                "pid": i.pid,
                "backend": i.backend[:64],
                "mesh": dumps(dict(i.mesh)),
                **times,
            }
            for i in found
            if i.rank != NO_RANK
        }
        with self.writing() as session:
            self._upsert(session, Job, list(jobs.values()), ["id"], ["last_seen_ns"])
            self._upsert(session, Attempt, list(attempts.values()), ["job", "attempt"], ["last_seen_ns", "world_size"])
            changing = ["last_seen_ns", "local_rank", "host", "device", "pid", "backend", "mesh"]
            self._upsert(session, Rank, list(ranks.values()), ["job", "attempt", "rank"], changing)

    def _upsert(
        self, session: Any, model: Any, rows: list[dict[str, Any]], key: list[str], changing: list[str]
    ) -> None:
        if not rows:
            return
        statement = self._insert(model)
        new = {name: getattr(statement.excluded, name) for name in changing}
        if "world_size" in new:  # a foreign sender of the same job knows no world size: keep the larger
            column = model.__table__.c.world_size
            greatest = func.max if self._engine.dialect.name == "sqlite" else func.greatest
            new["world_size"] = greatest(column, statement.excluded.world_size)
        session.execute(statement.on_conflict_do_update(index_elements=key, set_=new), rows)

    def job(self, job: str) -> JobRecord | None:
        found = self.jobs(only=job, limit=1)
        return found[0] if found else None

    def jobs(
        self, *, only: str | None = None, before: tuple[int, str] | None = None, limit: int = 1000
    ) -> list[JobRecord]:
        """Newest first; ``before`` is (last_seen_ns, id) of the last one of the page before."""
        query = select(Job).order_by(Job.last_seen_ns.desc(), Job.id.desc()).limit(limit)
        if only is not None:
            query = query.where(Job.id == only)
        if before is not None:
            query = query.where(
                (Job.last_seen_ns < before[0]) | ((Job.last_seen_ns == before[0]) & (Job.id < before[1]))
            )
        with self.reading() as session:
            rows = list(session.scalars(query))
            ids = [row.id for row in rows]
            attempts: dict[str, list[AttemptRecord]] = {i: [] for i in ids}
            for a in session.scalars(select(Attempt).where(Attempt.job.in_(ids)).order_by(Attempt.attempt)):
                attempts[a.job].append(
                    AttemptRecord(
                        job=a.job,
                        attempt=a.attempt,
                        world_size=a.world_size,
                        first_seen_ns=a.first_seen_ns,
                        last_seen_ns=a.last_seen_ns,
                    )
                )
        return [
            JobRecord(
                id=row.id,
                first_seen_ns=row.first_seen_ns,
                last_seen_ns=row.last_seen_ns,
                service=row.service,
                attempts=attempts[row.id],
            )
            for row in rows
        ]

    def count_jobs(self) -> int:
        with self.reading() as session:
            return int(session.scalar(select(func.count()).select_from(Job)) or 0)

    def ranks(self, job: str, attempt: int) -> list[RankRecord]:
        """Ranks seen in an attempt, in rank order."""
        query = select(Rank).where(Rank.job == job, Rank.attempt == attempt).order_by(Rank.rank)
        with self.reading() as session:
            size = session.scalar(select(Attempt.world_size).where(Attempt.job == job, Attempt.attempt == attempt))
            return [_rank_record(row, size or 0) for row in session.scalars(query)]

    def rank_places(self, keys: Iterable[tuple[str, int]]) -> list[tuple[str, int, int, str, int]]:
        """(job, attempt, rank, host, last_seen_ns) of all ranks seen in these (job, attempt), in no order."""
        wanted = dict(keys)
        query = select(Rank.job, Rank.attempt, Rank.rank, Rank.host, Rank.last_seen_ns).where(Rank.job.in_(wanted))
        with self.reading() as session:
            return [
                (job, attempt, rank, host, seen)
                for job, attempt, rank, host, seen in session.execute(query)
                if wanted[job] == attempt
            ]

    def job_key(self, job: str) -> tuple[bytes, bytes]:
        """(private, public) Ed25519 halves of the job, raw 32 bytes each; made once at first use."""
        with self.reading() as session:
            row = session.get(JobKey, job)
        if row is None:
            private, public = (bytes.fromhex(half) for half in generate_key())
            values = {"job": job, "private": private, "public": public, "created_ns": self.clock.unix_ns()}
            with self.writing() as session:
                session.execute(self._insert(JobKey).on_conflict_do_nothing(index_elements=["job"]), values)
                row = session.get_one(JobKey, job)
        return row.private, row.public
