"""A small client of the REST API (docs/api.md) for scripts and notebooks.

    with Client("http://127.0.0.1:4318") as client:
        for job in client.jobs():
            print(job["id"], job["verdict"])

Answers are the API's JSON as dictionaries; lists follow their cursors by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

import httpx

from lanterne import limits
from lanterne.errors import LanterneError
from lanterne.settings import DEFAULT_ENDPOINT

Json = dict[str, Any]


class Refused(LanterneError):
    """The server answered with an error. ``status`` is the HTTP status; 0 = it could not be reached."""

    def __init__(self, status: int, says: str) -> None:
        super().__init__(says)
        self.status = status


class Client:
    """Every method raises :class:`Refused`. Use it as a context manager, or ``close`` it."""

    def __init__(self, endpoint: str = "", *, token: str = "", timeout_s: float = 60.0) -> None:
        """``endpoint`` and ``token`` default to ``LANTERNE_ENDPOINT`` and ``LANTERNE_TOKEN``."""
        token = token or os.environ.get("LANTERNE_TOKEN", "")
        self._http = httpx.Client(
            base_url=endpoint or os.environ.get("LANTERNE_ENDPOINT", "") or DEFAULT_ENDPOINT,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=timeout_s,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # --- reading ---

    def jobs(self) -> Iterator[Json]:
        """All jobs, the newest first."""
        return self._pages("/jobs")

    def job(self, job: str) -> Json:
        """One job with its settings, mesh and hosts."""
        return self._json(f"/jobs/{_part(job)}")

    def ranks(self, job: str, *, page: int = limits.PAGE_ROWS_MAX) -> Iterator[Json]:
        """The ranks of a job; ``page`` is how many are fetched at a time."""
        return self._pages(f"/jobs/{_part(job)}/ranks", page=page)

    def metric(self, job: str, name: str, **query: Any) -> Json:
        """``{name, unit, series: [{rank, label, step, time, value}]}``; ``query``: rank, from_step, aggregate, …"""
        return self._json(f"/jobs/{_part(job)}/metrics", {"name": name, **query})

    def steps(self, job: str, **query: Any) -> Iterator[Json]:
        """Steps with their duration (ms) and slowest rank."""
        return self._pages(f"/jobs/{_part(job)}/steps", query)

    def collectives(self, job: str, **query: Any) -> Iterator[Json]:
        """Aligned collectives with skew and transfer (ms)."""
        return self._pages(f"/jobs/{_part(job)}/collectives", query)

    def incidents(self, job: str = "") -> Iterator[Json]:
        """Incidents of a job, or of all."""
        return self._pages(f"/jobs/{_part(job)}/incidents" if job else "/incidents")

    def report(self, job: str) -> Json:
        """The report (schema ``lanterne.report/1``)."""
        return self._json(f"/jobs/{_part(job)}/report")

    def query(self, sql: str, *, job: str | None = None) -> list[Json]:
        """Rows of one SELECT; needs the scope admin. Raises :class:`Refused` when the answer was cut at its bound."""
        found = self._send("POST", "/query", json={"sql": sql, "job": job}).json()
        if found["truncated"]:
            raise Refused(200, f"more than {len(found['rows'])} rows; narrow the query or use export")
        return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]

    def export(self, job: str, table: str, form: Literal["parquet", "arrow", "csv"] = "parquet") -> bytes:
        """All rows of a table of a job in a file form."""
        return self._send("GET", f"/jobs/{_part(job)}/export/{_part(table)}", params={"format": form}).content

    # --- doing ---

    def order(self, job: str, action: str, parameters: Mapping[str, Any] | None = None, *, reason: str = "") -> Json:
        """Give a signed order to a job; needs the scope operate."""
        body = {"action": action, "parameters": dict(parameters or {}), "reason": reason}
        found: Json = self._send("POST", f"/jobs/{_part(job)}/commands", json=body).json()
        return found

    def judge(self, incident: str, status: Literal["dismissed", "resolved"], note: str = "") -> Json:
        """Close an incident by hand; needs the scope operate."""
        body = {"status": status, "note": note}
        found: Json = self._send("POST", f"/incidents/{_part(incident)}/status", json=body).json()
        return found

    def diagnose(self, *paths: str | Path) -> Json:
        """Upload files of a dead job; the report."""
        files = [("files", (Path(p).name, Path(p).read_bytes())) for p in paths]
        found: Json = self._send("POST", "/diagnose", files=files).json()
        return found

    # --- inside ---

    def _json(self, path: str, query: Mapping[str, Any] | None = None) -> Json:
        found: Json = self._send("GET", path, params=query).json()
        return found

    def _pages(
        self, path: str, query: Mapping[str, Any] | None = None, *, page: int = limits.PAGE_ROWS_MAX
    ) -> Iterator[Json]:
        asked: Json = {"limit": page, **(query or {})}
        while True:
            found = self._json(path, asked)
            yield from found["items"]
            if found["next"] is None:
                return
            asked["cursor"] = found["next"]

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, f"/api/v1{path}", **more)
        except httpx.HTTPError as error:
            raise Refused(0, f"{self._http.base_url} cannot be reached: {error}") from error
        if answer.is_success:
            return answer
        try:
            problem = answer.json()
            says = str(problem.get("detail") or problem.get("title"))
        except (ValueError, AttributeError):
            says = answer.text[:500]
        raise Refused(answer.status_code, f"{method} {path}: {answer.status_code} {says}")


def _part(name: str) -> str:
    return quote(name, safe="")
