"""For admins: ad-hoc SQL, tokens, the audit trail, export of rows."""

from __future__ import annotations

import io
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field

from lanterne import limits
from lanterne.backend.api import adhoc, shapes
from lanterne.backend.api.context import Ctx, Cursor, Limit, OfJob, Step, decode_cursor, encode_cursor, page
from lanterne.backend.api.problems import Problem
from lanterne.backend.store.records import TokenRecord, rfc3339
from lanterne.errors import LimitExceeded

router = APIRouter(tags=["admin"])
EXPORT_ROWS_MAX = 2_000_000
_ORDER = {"spans": "start_ns", "points": "time_ns", "logs": "time_ns", "waits": "step", "rank_steps": "step"}
_MEDIA = {
    "parquet": "application/vnd.apache.parquet",
    "arrow": "application/vnd.apache.arrow.stream",
    "csv": "text/csv; charset=utf-8",
}


class Sql(BaseModel):
    sql: str = Field(min_length=1, max_length=adhoc.SQL_CHARS_MAX)
    job: str | None = Field(default=None, pattern=limits.ID_PATTERN)


class NewToken(BaseModel):
    scopes: list[Literal["ingest", "read", "operate", "admin"]] = Field(min_length=1, max_length=4)
    job: str = Field(default="", pattern=r"^[A-Za-z0-9._:-]{0,128}$")
    label: str = Field(default="", max_length=128)
    days: float = Field(default=90.0, gt=0, le=3650)


@router.post("/query", response_model=shapes.Result)
async def query(context: Ctx, body: Sql) -> dict[str, Any]:
    """One SELECT over the tables and views of docs/api.md, in a locked-down process; ``job`` narrows the rows."""
    async with context.heavy:
        return await adhoc.run(context.store, body.sql, body.job)


def _show(token: TokenRecord) -> dict[str, Any]:
    return {
        "id": token.id,
        "scopes": sorted(token.scopes),
        "job": token.job or None,
        "label": token.label,
        "created_at": rfc3339(token.created_ns),
        "expires_at": rfc3339(token.expires_ns) or None,
        "revoked_at": rfc3339(token.revoked_ns) or None,
        "used_at": rfc3339(token.used_ns) or None,
    }


@router.get("/tokens")
def tokens(context: Ctx) -> dict[str, Any]:
    return {"items": [_show(t) for t in context.control.tokens()], "next": None}


@router.post("/tokens", status_code=201)
def create_token(context: Ctx, new: NewToken) -> dict[str, Any]:
    """A new token; its text is in this answer and nowhere else."""
    text, record = context.control.create_token(new.scopes, job=new.job, label=new.label, expires_s=new.days * 86_400)
    return _show(record) | {"token": text}


@router.delete("/tokens/{token}", status_code=204)
def revoke_token(context: Ctx, token: Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")]) -> Response:
    """Revoke; it works within a second."""
    if not context.control.revoke_token(token):
        raise Problem(404, f"there is no valid token {token}")
    return Response(status_code=204)


@router.get("/audit")
def audit(context: Ctx, limit: Limit = limits.PAGE_ROWS_DEFAULT, cursor: Cursor = None) -> dict[str, Any]:
    """Who did what, the newest first."""
    before = decode_cursor(cursor, int)
    rows = context.control.audit_log(before=before[0] if before else None, limit=limit + 1)
    return page(
        rows,
        limit,
        lambda a: {
            "id": a.id,
            "at": rfc3339(a.at_ns),
            "actor": a.actor,
            "action": a.action,
            "subject": a.subject,
            "detail": dict(a.detail),
            "request_id": a.request_id,
        },
        lambda a: encode_cursor(a.id),
    )


@router.get("/jobs/{job}/export/{table}")
def export(
    context: Ctx,
    at: OfJob,
    table: Literal["spans", "points", "logs", "waits", "rank_steps"],
    form: Annotated[Literal["parquet", "arrow", "csv"], Query(alias="format")] = "parquet",
    from_step: Step = None,
    to_step: Step = None,
) -> Response:
    """Rows of one attempt as Parquet, Arrow stream or CSV."""
    source = f"{table}_history" if table in ("spans", "points", "logs") else table
    rows = context.store.query(
        f"SELECT * FROM {source} WHERE job = ? AND attempt = ? AND step BETWEEN ? AND ?"
        f" ORDER BY {_ORDER[table]} LIMIT {EXPORT_ROWS_MAX + 1}",
        [*at.key, -1 if from_step is None else from_step, limits.STEP_MAX if to_step is None else to_step],
    )
    if rows.num_rows > EXPORT_ROWS_MAX:
        raise LimitExceeded(f"more than {EXPORT_ROWS_MAX} rows; narrow from_step and to_step")
    headers = {"content-disposition": f'attachment; filename="{table}.{form}"'}
    return Response(_encoded(rows, form), media_type=_MEDIA[form], headers=headers)


def _encoded(rows: pa.Table, form: str) -> bytes:
    sink = io.BytesIO()
    if form == "parquet":
        pa.parquet.write_table(rows, sink, compression="zstd")
    elif form == "arrow":
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
    else:
        pa.csv.write_csv(_flat(rows), sink)
    return sink.getvalue()


def _flat(rows: pa.Table) -> pa.Table:
    """For CSV: maps as JSON, ids as hex; a text that a spreadsheet would run as a formula gets a quote before it."""
    import json

    for at, field in enumerate(rows.schema):
        column = rows.column(at)
        if pa.types.is_map(field.type):
            texts = [None if v is None else json.dumps(dict(v), ensure_ascii=False) for v in column.to_pylist()]
        elif pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            texts = [None if v is None else v.hex() for v in column.to_pylist()]
        elif pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            texts = ["'" + v if v and v[0] in "=+-@\t\r" else v for v in column.to_pylist()]
        else:
            continue
        rows = rows.set_column(at, field.name, pa.array(texts, pa.string()))
    return rows
