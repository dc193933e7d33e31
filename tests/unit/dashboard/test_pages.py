"""Every page renders from the API's shapes; house rules of the page; failure is said, not hidden."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import plotly.utils
import pytest

from lanterne.dashboard import callbacks, theme
from lanterne.dashboard.app import Page, create_dash, create_page
from lanterne.dashboard.client import Api
from lanterne.dashboard.pages import job
from lanterne.dashboard.view import View

PATHS = [
    "/", "/incidents", "/jobs/llama", "/jobs/llama/steps/200", "/jobs/llama/ranks/3", "/jobs/llama/communication",
    "/jobs/llama/sla", "/jobs/llama/events", "/jobs/llama/ranks", "/compare", "/incidents/inc-1", "/policies",
    "/settings",
]  # fmt: skip


def rendered(api: Api, path: str, search: str = "") -> tuple[list[Any], str]:
    body, _ = asyncio.run(callbacks.render(api, path, search, "http://127.0.0.1:4318" + path))
    return body, json.dumps(body, cls=plotly.utils.PlotlyJSONEncoder)


def walk(node: Any) -> Iterator[Any]:
    if isinstance(node, list | tuple):
        for part in node:
            yield from walk(part)
    elif hasattr(node, "_prop_names"):
        yield node
        for name in node._prop_names:
            yield from walk(getattr(node, name, None))


@pytest.mark.parametrize("path", PATHS)
def test_every_page_renders(api: Api, path: str) -> None:
    _, text = rendered(api, path)
    assert '"type": "H1"' in text


@pytest.mark.parametrize("path", PATHS)
def test_every_graph_has_the_one_configuration(api: Api, path: str) -> None:
    body, _ = rendered(api, path)
    for node in walk(body):
        if type(node).__name__ == "Graph":
            assert node.config == dict(theme.CONFIG)
            assert node.config["showSendToCloud"] is False


@pytest.mark.parametrize("path", PATHS)
def test_no_list_stands_inside_a_list_of_children(api: Api, path: str) -> None:
    """React takes it, and complains in the console only."""
    body, _ = rendered(api, path)
    for node in walk(body):
        children = getattr(node, "children", None)
        if isinstance(children, list):
            assert not any(isinstance(child, list | tuple) for child in children), node


@pytest.mark.parametrize("path", PATHS)
def test_no_frame_and_no_raw_markup(api: Api, path: str) -> None:
    body, _ = rendered(api, path)
    kinds = {type(node).__name__ for node in walk(body)}
    assert not kinds & {"Iframe", "DangerouslySetInnerHTML", "Script"}
    for node in walk(body):
        assert not getattr(node, "dangerously_allow_html", False)


def test_every_callback_is_async(api: Api) -> None:
    app = create_dash(api)
    app._setup_server()
    served = [entry["callback"] for entry in app.callback_map.values() if "callback" in entry]
    assert len(served) >= 12
    for call in served:
        assert inspect.iscoroutinefunction(inspect.unwrap(call)), call


def test_the_incident_page_names_the_culprit(api: Api, double: ModuleType) -> None:
    body, text = rendered(api, "/incidents/inc-1")
    culprit = next(node for node in walk(body) if getattr(node, "id", None) == "culprit")
    assert culprit.children == f"rank {double.LATE} on node-1"
    assert "120 ms" in text
    assert "93 %" in text
    assert "Approve now" in text


def test_the_job_page_leads_with_the_verdict(api: Api) -> None:
    _, text = rendered(api, "/jobs/llama")
    assert text.index("Rank 3 on node-1: slow compute since step 118") < text.index("Where the time goes")


def test_an_empty_fleet_tells_how_to_attach(double: ModuleType) -> None:
    api = Api("http://api", httpx.ASGITransport(double.create(0)))
    _, text = rendered(api, "/")
    assert "LANTERNE_ENDPOINT=http://127.0.0.1:4318" in text
    assert "lanterne.attach(model, optimizer)" in text


@pytest.mark.parametrize("path", ["/jobs/none", "/incidents/none", "/nowhere", "/jobs/llama/steps/x", "/jobs/a%2Fb"])
def test_what_is_not_there_is_said(api: Api, path: str) -> None:
    _, text = rendered(api, path)
    assert "Nothing here by this name" in text


def test_a_refusal_asks_to_sign_in() -> None:
    transport = httpx.MockTransport(
        lambda _: httpx.Response(401, json={"title": "Unauthorized", "detail": "a token is needed"})
    )
    _, text = rendered(Api("http://api", transport), "/")
    assert "Sign in to see this" in text


@pytest.mark.parametrize("reply", [httpx.Response(200, text="not json"), httpx.Response(500, text="<html>")])
def test_a_broken_backend_is_said(reply: httpx.Response) -> None:
    _, text = rendered(Api("http://api", httpx.MockTransport(lambda _: reply)), "/")
    assert "alert tone-bad" in text


def test_filters_and_sorting_choose_jobs(api: Api) -> None:
    _, all_jobs = rendered(api, "/")
    _, one = rendered(api, "/", "?find=job-2")
    assert "1 of 3" in one
    assert "3 of 3" in all_jobs
    _, none = rendered(api, "/", "?state=hung")
    assert "No job matches" in none


def _ask(page: Any, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(page), base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


def test_all_addresses_are_the_index_with_strict_headers(double: ModuleType) -> None:
    page = create_page("http://api", httpx.ASGITransport(double.create()))
    for path in ("/", "/jobs/llama", "/incidents/x", "/deep/er/still"):
        answer = _ask(page, path)
        assert answer.status_code == 200
        assert "<title>Lanterne</title>" in answer.text
        policy = answer.headers["content-security-policy"]
        assert "unsafe-eval" not in policy
        assert "script-src 'self'" in policy
        assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
        assert "http:" not in answer.text.replace("http://www.w3.org", "")
        assert "https:" not in answer.text
        assert "python_version" not in answer.text


def test_bundles_are_packed_once_and_kept(double: ModuleType) -> None:
    page = create_page("http://api", httpx.ASGITransport(double.create()))
    index = _ask(page, "/").text
    bundle = next(part.split('"')[0] for part in index.split('src="')[1:] if "dash_renderer" in part)
    first, second = (_ask(page, bundle, headers={"accept-encoding": "gzip"}) for _ in range(2))
    assert first.content == second.content
    assert first.headers["content-encoding"] == "gzip"
    assert "immutable" in second.headers["cache-control"]


def test_the_open_websocket_of_the_backend_is_closed(double: ModuleType) -> None:
    page = create_page("http://api", httpx.ASGITransport(double.create()))
    assert isinstance(page, Page)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(page({"type": "websocket", "path": "/_dash-ws-callback", "headers": []}, receive, send))
    assert [m["type"] for m in sent] == ["websocket.close"]


def test_credentials_of_the_reader_go_to_the_api(double: ModuleType) -> None:
    seen: list[str | None] = []

    def reply(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"items": [], "next": None})

    page = create_page("http://api", httpx.MockTransport(reply))
    body = {
        "output": "..page.children...title.data..",
        "outputs": [{"id": "page", "property": "children"}, {"id": "title", "property": "data"}],
        "inputs": [{"id": "url", "property": "pathname", "value": "/"}],
        "state": [
            {"id": "url", "property": "search", "value": ""},
            {"id": "url", "property": "href", "value": "http://x/"},
        ],
        "changedPropIds": ["url.pathname"],
    }
    answer = _ask(page, "/_dash-update-component", "POST", json=body, headers={"cookie": "lanterne_token=secret"})
    assert answer.status_code == 200
    assert seen == ["Bearer secret"]


def test_each_sentence_with_a_series_leads_to_its_plot(api: Api) -> None:
    body, _ = rendered(api, "/incidents/inc-1")
    places = {str(getattr(node, "id", "")) for node in walk(body)}
    leads = [node.href for node in walk(body) if str(getattr(node, "href", "")).startswith("#proof-")]
    assert leads
    assert {lead.removeprefix("#") for lead in leads} <= places


def test_a_click_on_a_pooled_cell_names_the_rank_in_it() -> None:
    values = np.zeros((1024, 8), dtype="<f4")
    values[777, 6] = 34.0

    def heatmap(request: httpx.Request) -> httpx.Response:
        asked = {k: int(v) for k, v in request.url.params.items() if v.isdecimal()}
        first, last = asked.get("from_rank", 0), asked.get("to_rank", 1023)
        low, high = asked.get("from_step", 0), asked.get("to_step", 7)
        width = -(-(last - first + 1) // asked["height"])
        part = values[first : last + 1, low : high + 1]
        pooled = np.maximum.reduceat(part, np.arange(0, len(part), width))
        body = {"ranks": list(range(first, last + 1, width)), "steps": list(range(low, high + 1)), "values": pooled}
        return httpx.Response(200, json=body | {"values": pooled.tolist()})

    found = asyncio.run(
        job.worst_in_cell(Api("http://api", httpx.MockTransport(heatmap)), "x", View(), rank=772, step=6)
    )
    assert found == (777, 6, 34.0)
