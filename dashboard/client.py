"""The page's only source: HTTP requests to the REST API, with the reader's own credentials.

The page holds no right of its own. A browser's ``Authorization`` header or its session cookie is handed on with
every request, so what a reader may not ask of the API, the page does not show either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote

import dash
import httpx
import msgspec

COOKIE = "lanterne_token"
TIMEOUT_S = 20.0


class ApiError(Exception):
    """The API refused or could not be reached. ``status`` 0 = no answer."""

    def __init__(self, status: int, title: str, detail: str = "") -> None:
        self.status, self.title, self.detail = status, title, detail
        super().__init__(f"{status} {title}: {detail}")


def path(*parts: object) -> str:
    """A path below ``/api/v1`` with every part quoted, slashes included."""
    return "/api/v1/" + "/".join(quote(str(part), safe="") for part in parts)


_asking: ContextVar[Mapping[str, str] | None] = ContextVar("asking", default=None)


@contextmanager
def reader(headers: Mapping[str, str]) -> Iterator[None]:
    """Ask the API within this block with the credentials in ``headers`` (names in lower case) of a plain request."""
    token = _asking.set(headers)
    try:
        yield
    finally:
        _asking.reset(token)


def _cookies(text: str) -> dict[str, str]:
    try:
        return {name: found.value for name, found in SimpleCookie(text).items()}
    except CookieError:
        return {}


def _credentials() -> dict[str, str]:
    cookies: Mapping[str, str]
    asking = _asking.get()
    if asking is not None:
        headers = dict(asking)
        cookies = _cookies(headers.get("cookie", ""))
    else:
        context = dash.callback_context
        try:
            headers = {str(k).lower(): str(v) for k, v in (context.headers or {}).items()}
            cookies = context.cookies or {}
        except (LookupError, dash.exceptions.MissingCallbackContextException):
            return {}
    if "authorization" in headers:
        return {"authorization": headers["authorization"]}
    token = cookies.get(COOKIE)
    return {"authorization": f"Bearer {token}"} if token else {}


def _problem(answer: httpx.Response) -> ApiError:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    body = body if isinstance(body, dict) else {}
    title = str(body.get("title") or answer.reason_phrase or "refused")
    return ApiError(answer.status_code, title, str(body.get("detail") or ""))


class Api:
    """Asynchronous client of ``/api/v1``. Raises :class:`ApiError` for every answer that is not 2xx."""

    def __init__(self, base: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._client = httpx.AsyncClient(base_url=base, transport=transport, timeout=TIMEOUT_S, follow_redirects=False)

    async def _send(self, method: str, where: str, **more: Any) -> Any:
        try:
            answer = await self._client.request(method, where, headers=_credentials(), **more)
        except httpx.HTTPError as error:
            raise ApiError(0, "the server does not answer", str(error) or type(error).__name__) from error
        if not answer.is_success:
            raise _problem(answer)
        if not answer.content:
            return {}
        try:
            return msgspec.json.decode(answer.content)
        except (ValueError, RecursionError) as error:
            raise ApiError(answer.status_code, "the server's answer is not JSON", where) from error

    async def get(self, *parts: object, **query: Any) -> Any:
        """The JSON of one resource; query values of None are left out."""
        return await self._send("GET", path(*parts), params={k: v for k, v in query.items() if v is not None})

    async def items(self, *parts: object, most: int = 1_000, **query: Any) -> list[dict[str, Any]]:
        """A list's items, page after page, up to ``most``."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while len(found) < most:
            page = await self.get(*parts, cursor=cursor, **query)
            found.extend(page.get("items") or [])
            cursor = page.get("next")
            if not cursor:
                break
        return found[:most]

    async def post(self, *parts: object, body: Mapping[str, Any] | None = None) -> Any:
        """Send an order; the JSON of the answer."""
        return await self._send("POST", path(*parts), json=dict(body or {}))

    async def delete(self, *parts: object) -> None:
        """Take a resource away."""
        await self._send("DELETE", path(*parts))

    async def put(self, *parts: object, body: Mapping[str, Any]) -> Any:
        """Replace a resource; the JSON of the answer."""
        return await self._send("PUT", path(*parts), json=dict(body))
