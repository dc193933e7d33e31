"""Commands, policies and the audit trail in the control database."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select

from lanterne import limits
from lanterne.backend.store.control_jobs import Jobs
from lanterne.backend.store.database import dumps
from lanterne.backend.store.models import AuditRow, CommandRow, PolicyRow, PolicyState
from lanterne.backend.store.records import (
    COMMAND_STATES,
    AuditRecord,
    CommandRecord,
    PolicyRecord,
    rfc3339,
)
from lanterne.errors import CommandRefused
from lanterne.nouns import to_json
from lanterne.orders import check_shape, sign


def _record(row: CommandRow) -> CommandRecord:
    return CommandRecord(
        id=row.id,
        job=row.job,
        attempt=row.attempt,
        action=row.action,
        parameters=json.loads(row.parameters),
        ranks=json.loads(row.ranks),
        state=row.state,
        reason=row.reason,
        incident=row.incident,
        policy=row.policy,
        author=row.author,
        issued_ns=row.issued_ns,
        expires_ns=row.expires_ns,
        counter=row.counter,
        signature=row.signature,
        timestamps=json.loads(row.timestamps),
        results=json.loads(row.results),
    )


class Commands(Jobs):
    """Orders to trainers: signed when they are issued, counted per attempt, moved by compare-and-set."""

    def create_command(
        self,
        job: str,
        attempt: int,
        action: str,
        parameters: Mapping[str, Any],
        *,
        ranks: str | Sequence[int] = "all",
        state: str = "pending",
        reason: str = "",
        incident: str = "",
        policy: str = "",
        author: str = "",
        expires_s: float = limits.COMMAND_AGE_S_MAX,
        idempotency_key: str | None = None,
    ) -> CommandRecord:
        """A signed command with the attempt's next counter; state ``pending`` or ``proposed`` (to be approved).

        With an ``idempotency_key`` used before, the command made then is returned and nothing is added.
        Raises :class:`CommandRefused` on an action, parameter or rank outside ``lanterne.orders``, an age beyond
        ``limits.COMMAND_AGE_S_MAX``, or another first state.
        """
        if not 0 < expires_s <= limits.COMMAND_AGE_S_MAX:
            raise CommandRefused(f"expires_s: {expires_s} is outside 0 to {limits.COMMAND_AGE_S_MAX}")
        if state not in ("pending", "proposed"):
            raise CommandRefused(f"state: a command starts as pending or proposed, not as {state!r}")
        private, _ = self.job_key(job)
        now = self.clock.unix_ns()
        with self.writing() as session:
            if idempotency_key is not None:
                same = session.scalar(select(CommandRow).where(CommandRow.idempotency_key == idempotency_key))
                if same is not None:
                    return _record(same)
            last = select(func.max(CommandRow.counter)).where(CommandRow.job == job, CommandRow.attempt == attempt)
            row = CommandRow(
                id=secrets.token_hex(12),
                job=job,
                attempt=attempt,
                action=action,
                parameters=dumps(to_json(parameters)),
                ranks=dumps(ranks if isinstance(ranks, str) else list(ranks)),
                state=state,
                reason=reason,
                incident=incident,
                policy=policy,
                author=author,
                idempotency_key=idempotency_key,
                issued_ns=now,
                expires_ns=now + int(expires_s * 1e9),
                counter=(session.scalar(last) or 0) + 1,
                signature="",
                timestamps=dumps({state: rfc3339(now)}),
                results="[]",
            )
            row.signature = sign(_record(row).wire, private.hex())["signature"]
            check_shape(_record(row).wire)
            session.add(row)
            session.flush()
            return _record(row)

    def approve_command(self, command: str, actor: str) -> CommandRecord | None:
        """Move ``proposed`` to ``pending``, issued anew (times, counter, signature); None when it was not proposed."""
        found = self.command(command)
        if found is None:
            return None
        private, _ = self.job_key(found.job)
        now = self.clock.unix_ns()
        with self.writing() as session:
            row = session.get_one(CommandRow, command)
            if row.state != "proposed":
                return None
            last = select(func.max(CommandRow.counter)).where(
                CommandRow.job == row.job, CommandRow.attempt == row.attempt
            )
            row.expires_ns, row.issued_ns = now + (row.expires_ns - row.issued_ns), now
            row.counter = (session.scalar(last) or 0) + 1
            row.state, row.author = "pending", row.author or actor
            row.timestamps = dumps(json.loads(row.timestamps) | {"pending": rfc3339(now)})
            row.signature = sign(_record(row).wire, private.hex())["signature"]
            session.flush()
            return _record(row)

    def command(self, command: str) -> CommandRecord | None:
        with self.reading() as session:
            row = session.get(CommandRow, command)
            return None if row is None else _record(row)

    def commands(
        self,
        job: str | None = None,
        *,
        attempt: int | None = None,
        state: str | None = None,
        incident: str | None = None,
        before: tuple[int, str] | None = None,
        limit: int = 1000,
    ) -> list[CommandRecord]:
        """Newest first; pending ones past their age are turned to ``expired`` before they are shown."""
        self._expire()
        query = select(CommandRow).order_by(CommandRow.issued_ns.desc(), CommandRow.id.desc()).limit(limit)
        for column, value in (
            (CommandRow.job, job),
            (CommandRow.attempt, attempt),
            (CommandRow.state, state),
            (CommandRow.incident, incident),
        ):
            if value is not None:
                query = query.where(column == value)
        if before is not None:
            at, last = before
            query = query.where((CommandRow.issued_ns < at) | ((CommandRow.issued_ns == at) & (CommandRow.id < last)))
        with self.reading() as session:
            return [_record(row) for row in session.scalars(query)]

    def _expire(self) -> None:
        now = self.clock.unix_ns()
        stale = (CommandRow.state.in_(("proposed", "pending", "sent")), CommandRow.expires_ns < now)
        with self.reading() as session:
            found = list(session.scalars(select(CommandRow.id).where(*stale)))
        for command in found:
            reason = "nobody carried it out in time"
            if self.set_command_state(command, "expired", expected=("proposed", "pending", "sent"), reason=reason):
                self.audit("server", "command.expired", command, {"detail": reason})

    def set_command_state(
        self, command: str, state: str, *, expected: Sequence[str] | None = None, reason: str | None = None
    ) -> bool:
        """Set the state if it is one of ``expected`` (None = any); True when this call changed it.

        Raises ValueError on a state that is not in ``records.COMMAND_STATES``.
        """
        if state not in COMMAND_STATES:
            raise ValueError(f"command state {state!r} is not one of {', '.join(COMMAND_STATES)}")
        with self.writing() as session:
            row = session.get(CommandRow, command)
            if row is None or row.state == state or (expected is not None and row.state not in expected):
                return False
            stamps = json.loads(row.timestamps) | {state: rfc3339(self.clock.unix_ns())}
            row.state, row.timestamps = state, dumps(stamps)
            if reason is not None:
                row.reason = reason
        return True

    def add_command_results(self, command: str, results: Sequence[Mapping[str, Any]]) -> None:
        """Append the ranks' ``{rank, step, phase, before, after, detail}``; the same (rank, phase) is replaced."""
        with self.writing() as session:
            row = session.get(CommandRow, command)
            if row is None:
                return
            known = [*json.loads(row.results), *map(dict, results)]
            row.results = dumps(to_json(list({(r.get("rank"), r.get("phase")): r for r in known}.values())))

    # --- policies ---

    def policies(self) -> list[PolicyRecord]:
        """The newest version of each policy, by name."""
        newest = (
            select(PolicyRow.name, func.max(PolicyRow.version).label("version")).group_by(PolicyRow.name).subquery()
        )
        query = select(PolicyRow).join(
            newest, (PolicyRow.name == newest.c.name) & (PolicyRow.version == newest.c.version)
        )
        with self.reading() as session:
            return [
                PolicyRecord(
                    name=p.name,
                    version=p.version,
                    enabled=p.enabled,
                    body=json.loads(p.body),
                    author=p.author,
                    created_ns=p.created_ns,
                )
                for p in session.scalars(query.order_by(PolicyRow.name))
            ]

    def put_policy(self, name: str, body: Mapping[str, Any], *, enabled: bool = True, author: str = "") -> PolicyRecord:
        """Add the next version of a policy."""
        now = self.clock.unix_ns()
        with self.writing() as session:
            last = session.scalar(select(func.max(PolicyRow.version)).where(PolicyRow.name == name)) or 0
            text = dumps(to_json(body))
            session.add(
                PolicyRow(name=name, version=last + 1, enabled=enabled, body=text, author=author, created_ns=now)
            )
        return PolicyRecord(
            name=name, version=last + 1, enabled=enabled, body=json.loads(text), author=author, created_ns=now
        )

    def policy_state(self, name: str, job: str) -> dict[str, Any]:
        """What a policy has used up for a job; empty before its first action."""
        with self.reading() as session:
            row = session.get(PolicyState, (name, job))
        found: dict[str, Any] = json.loads(row.body) if row else {}
        return found

    def policy_states(self, name: str) -> dict[str, dict[str, Any]]:
        """By job."""
        with self.reading() as session:
            rows = session.scalars(select(PolicyState).where(PolicyState.name == name))
            return {row.job: json.loads(row.body) for row in rows}

    def save_policy_state(self, name: str, job: str, body: Mapping[str, Any]) -> None:
        values = {"name": name, "job": job, "body": dumps(to_json(body)), "updated_ns": self.clock.unix_ns()}
        statement = self._insert(PolicyState).values(values)
        new = {"body": statement.excluded.body, "updated_ns": statement.excluded.updated_ns}
        with self.writing() as session:
            session.execute(statement.on_conflict_do_update(index_elements=["name", "job"], set_=new))

    # --- audit ---

    def audit(
        self, actor: str, action: str, subject: str, detail: Mapping[str, Any] | None = None, *, request_id: str = ""
    ) -> None:
        """Add a line to the audit trail; it is only ever added to."""
        with self.writing() as session:
            session.add(
                AuditRow(
                    at_ns=self.clock.unix_ns(),
                    actor=actor[:128],
                    action=action[:64],
                    subject=subject[:256],
                    detail=dumps(to_json(detail or {})),
                    request_id=request_id[:64],
                )
            )

    def audit_log(self, *, before: int | None = None, limit: int = 100) -> list[AuditRecord]:
        """Newest first; ``before`` is the id of the last line of the page before."""
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
        if before is not None:
            query = query.where(AuditRow.id < before)
        with self.reading() as session:
            return [
                AuditRecord(
                    id=a.id,
                    at_ns=a.at_ns,
                    actor=a.actor,
                    action=a.action,
                    subject=a.subject,
                    detail=json.loads(a.detail),
                    request_id=a.request_id,
                )
                for a in session.scalars(query)
            ]
