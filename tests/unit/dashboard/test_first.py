"""The first picture: the page as plain HTML in the index, with the reader's rights, and nothing that runs."""

from __future__ import annotations

import asyncio
from html.parser import HTMLParser
from types import ModuleType

import httpx
import pytest
from dash import dcc, html

from lanterne.dashboard.app import create_page
from lanterne.dashboard.first import html_of

EVIL = '"><img src=x onerror=alert(1)><script>alert(2)</script>'


def index(transport: httpx.AsyncBaseTransport, path: str, **headers: str) -> httpx.Response:
    page = create_page("http://api", transport)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(page), base_url="http://page") as client:
            await client.get("/settings")
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(("path", "says"), [("/", "llama"), ("/jobs/llama", "Step time"), ("/nowhere", "Nothing here")])
def test_the_index_holds_the_page_that_was_asked_for(double: ModuleType, path: str, says: str) -> None:
    answer = index(httpx.ASGITransport(double.create()), path)
    first, _, live = answer.text.partition('id="react-entry-point"')
    assert answer.status_code == 200
    assert says in first
    assert '<div id="first">' in first
    assert "DashRenderer" in live
    assert "no-cache" in answer.headers["cache-control"]


def test_the_readers_own_rights_ask_for_it() -> None:
    seen: list[str] = []

    def api(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization", ""))
        return httpx.Response(401, json={"title": "no"})

    text = index(httpx.MockTransport(api), "/", cookie='lanterne_token=abc; "bad').text
    assert "Sign in to see this" in text
    assert seen[-1] == "Bearer abc"
    seen.clear()
    index(httpx.MockTransport(api), "/", authorization="Bearer own", cookie="lanterne_token=abc")
    assert seen[-1] == "Bearer own"


def test_a_slow_api_does_not_hold_the_index_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanterne.dashboard.first.PATIENCE_S", 0.05)

    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.5)
        return httpx.Response(500)

    text = index(httpx.MockTransport(slow), "/").text
    assert 'id="first"' not in text
    assert "DashRenderer" in text


def test_nothing_in_it_runs() -> None:
    nodes = [
        html.P(EVIL, title=EVIL, className=EVIL, style={"color": EVIL}),
        html.A("x", href="javascript:alert(1)"),
        html.A("y", href="//elsewhere/"),
        dcc.Link(EVIL, href=f"/jobs/{EVIL}"),
        dcc.Input(value=EVIL, placeholder=EVIL),
        html.Button("order", id="order"),
        html.Button("theme", id="theme"),
        html.Div(n_clicks=3, **{"data-x": EVIL, "aria-label": EVIL}),
    ]
    tags: list[str] = []
    names: set[str] = set()
    addresses: list[str] = []
    dead: list[bool] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            if tag == "button":
                dead.append(("disabled", None) in attrs)
            names.update(name for name, _ in attrs)
            addresses.extend(value or "" for name, value in attrs if name == "href")

    Reader().feed(html_of(nodes))
    assert tags == ["p", "a", "a", "a", "input", "button", "button", "div"]
    assert dead == [True, False]
    assert not [name for name in names if name.startswith("on")]
    assert addresses == [f"/jobs/{EVIL}"]
