"""RFC 9457 problem+json for every error of the server, also those raised outside FastAPI."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from lanterne.backend.store.events import QueueFull
from lanterne.errors import CommandRefused, LanterneError, LimitExceeded, StoreUnavailable, UnreadableInput, UsageError

log = logging.getLogger(__name__)

MEDIA = "application/problem+json"
_STATUS: tuple[tuple[type[LanterneError], int], ...] = (
    (StoreUnavailable, 503),
    (QueueFull, 503),
    (LimitExceeded, 413),
    (CommandRefused, 409),
    (UnreadableInput, 422),
    (UsageError, 400),
    (LanterneError, 400),
)


class Problem(HTTPException):
    """Raise it in a handler: ``Problem(404, "no such job")``."""

    def __init__(self, status: int, detail: str, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)


def problem_body(status: int, detail: str, *, request_id: str = "", errors: list[Any] | None = None) -> bytes:
    """The JSON of a problem."""
    try:
        title = HTTPStatus(status).phrase
    except ValueError:
        title = "Error"
    body: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    if request_id:
        body["request_id"] = request_id
    if errors:
        body["errors"] = errors
    return json.dumps(body).encode()


def problem(
    request: Request,
    status: int,
    detail: str,
    *,
    errors: list[Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    request_id = str(request.scope.get("lanterne.request_id", ""))
    content = problem_body(status, detail, request_id=request_id, errors=errors)
    return Response(content, status_code=status, media_type=MEDIA, headers=headers)


def install(app: FastAPI) -> None:
    """Turn every exception into a problem; an unexpected one is logged and told without its text."""

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem(request, error.status_code, str(error.detail), headers=dict(error.headers or {}) or None)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        errors = [{"where": ".".join(map(str, e["loc"])), "says": str(e["msg"])} for e in error.errors()[:20]]
        return problem(request, 422, "the request does not fit its schema", errors=errors)

    async def ours(request: Request, error: Exception) -> Response:
        status = next(s for kind, s in _STATUS if isinstance(error, kind))
        headers = {"retry-after": "2"} if status == 503 else None
        return problem(request, status, str(error), headers=headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("request failed: %s %s", request.method, request.url.path, exc_info=error)
        return problem(request, 500, "an unexpected error; the server's log has it under the request id")

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(LanterneError, ours)
    app.add_exception_handler(Exception, unexpected)
