"""Commands to trainers and the policies that make them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query
from pydantic import BaseModel, Field

from lanterne import limits
from lanterne.backend import dispatch, policy
from lanterne.backend.api.context import Context, Ctx, Cursor, Limit, OfJob, Who, decode_cursor, encode_cursor, page
from lanterne.backend.api.problems import Problem
from lanterne.backend.store.access import Principal
from lanterne.backend.store.records import CommandRecord, rfc3339

router = APIRouter(tags=["commands"])
CommandId = Annotated[str, Path(pattern=limits.ID_PATTERN)]
State = Literal["proposed", "pending", "sent", "committed", "applied", "refused", "expired", "cancelled", "undone"]


class NewCommand(BaseModel):
    action: str = Field(max_length=64)
    parameters: dict[str, str | int | float | bool] = Field(default_factory=dict, max_length=20)
    ranks: Literal["all"] | list[Annotated[int, Field(ge=0, lt=limits.RANKS_MAX)]] = "all"
    reason: str = Field(default="", max_length=1_000)
    incident: str = Field(default="", max_length=128)
    expires_s: float = Field(default=300.0, gt=0, le=limits.COMMAND_AGE_S_MAX)


class PolicyBody(BaseModel, extra="allow"):
    """The fields of docs/policies.md; ``name`` and ``version`` are set by the server."""

    enabled: bool = True


def show_command(command: CommandRecord) -> dict[str, Any]:
    return {
        "id": command.id,
        "job": command.job,
        "attempt": command.attempt,
        "action": command.action,
        "parameters": dict(command.parameters),
        "ranks": command.ranks,
        "state": command.state,
        "reason": command.reason,
        "incident": command.incident or None,
        "policy": command.policy or None,
        "author": command.author,
        "issued_at": rfc3339(command.issued_ns),
        "expires_at": rfc3339(command.expires_ns),
        "timestamps": dict(command.timestamps),
        "results": [dict(r) for r in command.results],
    }


@router.get("/jobs/{job}/commands")
def commands(
    context: Ctx,
    who: Who,
    job: Annotated[str, Path(pattern=limits.ID_PATTERN)],
    state: State | None = None,
    attempt: Annotated[int | None, Query(ge=0, lt=1 << 31)] = None,
    where: Annotated[Literal["launcher"] | None, Query(description="Orders for `lanterne run`, signed")] = None,
    limit: Limit = limits.PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> dict[str, Any]:
    """Commands, the newest first. With ``state=pending`` and ``attempt`` (the shipper's poll) the items are the
    signed orders and nothing else, the oldest first. With ``where=launcher`` they are those for ``lanterne run``,
    also when another node's has taken them up, and ``ceiling`` says what the server's policies may do alone."""
    if not who.sees(job):
        raise Problem(404, f"there is no job {job}")
    if where == "launcher":
        found = context.control.commands(job, attempt=attempt, limit=limit)
        live = [c for c in found if dispatch.of_launcher(c) and c.state in dispatch.TAKEN_UP]
        live = [c for c in live if c.expires_ns > context.clock.unix_ns()]
        items = [c.wire for c in sorted(live, key=lambda c: c.counter)]
        return {"items": items, "next": None, "ceiling": context.settings.policy}
    before = decode_cursor(cursor, int, str)
    rows = context.control.commands(
        job, attempt=attempt, state=state, before=(before[0], before[1]) if before else None, limit=limit + 1
    )
    if state == "pending" and attempt is not None:
        return {"items": [c.wire for c in sorted(rows, key=lambda c: c.counter)], "next": None}
    return page(rows, limit, show_command, lambda c: encode_cursor(c.issued_ns, c.id))


@router.post("/jobs/{job}/commands", status_code=201)
def order(
    context: Ctx,
    who: Who,
    at: OfJob,
    new: NewCommand,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> dict[str, Any]:
    """Order an action. Under the ceiling ``approve`` or below it is only proposed and has to be approved."""
    propose = context.settings.policy in ("observe", "suggest") and not who.may("admin")
    made = dispatch.issue(
        context.control,
        at.job.id,
        at.attempt,
        new.action,
        new.parameters,
        ranks=new.ranks,
        propose=propose,
        reason=new.reason,
        incident=new.incident,
        author=who.actor,
        expires_s=new.expires_s,
        key=f"{at.job.id}/{idempotency_key}" if idempotency_key else None,
    )
    context.hub.publish("command", made.job, {"id": made.id, "state": made.state})
    return show_command(made)


def _command(context: Context, who: Principal, command: str) -> CommandRecord:
    found = context.control.command(command)
    if found is None or not who.sees(found.job):
        raise Problem(404, f"there is no command {command}")
    return found


@router.get("/commands/{command}")
def one_command(context: Ctx, who: Who, command: CommandId) -> dict[str, Any]:
    return show_command(_command(context, who, command))


@router.post("/commands/{command}/approve")
def approve(context: Ctx, who: Who, command: CommandId) -> dict[str, Any]:
    """Issue a proposed command; of two approvals at once the second gets 409."""
    _command(context, who, command)
    made = context.control.approve_command(command, who.actor)
    if made is None:
        raise Problem(409, "only a proposed command can be approved")
    context.hub.publish("command", made.job, {"id": made.id, "state": made.state})
    return show_command(made)


@router.post("/commands/{command}/cancel")
def cancel(context: Ctx, who: Who, command: CommandId) -> dict[str, Any]:
    """Take back a command that no trainer has taken up yet."""
    found = _command(context, who, command)
    if not context.control.set_command_state(command, "cancelled", expected=("proposed", "pending")):
        raise Problem(409, f"the command is {found.state}: only proposed and pending ones can be cancelled")
    context.hub.publish("command", found.job, {"id": command, "state": "cancelled"})
    return show_command(_command(context, who, command))


# --- policies ------------------------------------------------------------------------------------


def _show_policy(context: Context, found: policy.Policy) -> dict[str, Any]:
    """The policy with what it used over all jobs: actions within its budget's time, the last one, the switch."""
    now = context.clock.unix_ns()
    times = [
        at
        for body in context.control.policy_states(policy.book.NAME).values()
        for at in body.get("used", {}).get(found.name, ())
    ]
    stopped = any(body.get("stopped") for body in context.control.policy_states(policy.book.SWITCH).values())
    state = {
        "used": sum(now - at < found.budget_s * 1e9 for at in times),
        "breaker": "open" if stopped else "closed",
        "last": rfc3339(max(times, default=0)) or None,
    }
    return policy.body_of(found) | {"state": state}


@router.get("/policies")
def policies(context: Ctx) -> dict[str, Any]:
    """The policies in force, the shipped ones included."""
    return {"items": [_show_policy(context, p) for p in policy.policies(context.control)], "next": None}


@router.put("/policies/{name}")
def put_policy(
    context: Ctx, who: Who, name: Annotated[str, Path(pattern=limits.ID_PATTERN)], body: PolicyBody
) -> dict[str, Any]:
    """Replace a policy by its next version; it is checked first (400 says which field)."""
    fields = body.model_dump(exclude={"enabled", "name", "version", "state"})
    checked = policy.parse(fields | {"name": name, "enabled": body.enabled})
    record = context.control.put_policy(name, fields, enabled=body.enabled, author=who.actor)
    return _show_policy(context, checked) | {"version": record.version}
