"""Hostile and broken data on the page: scripts in names, many names, NaN and gaps, missing ranks, an empty job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from lanterne.nouns import Event, Identity, Kind
from tests.e2e.conftest import EVIL, Site
from tests.e2e.feed import post

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAMES = 3_000
WHO = Identity(job="hostile", rank=0, local_rank=0, world_size=4, host=EVIL, device=EVIL)


def step(number: int, now: int, **more: Any) -> Event:
    return Event(
        kind=Kind.STEP, name="step", sequence=number, lamport=number, unix_ns=now + number * 10**8,
        monotonic_ns=1 + number, step=number, duration_ns=10**8, **more,
    )  # fmt: skip


def metrics(first: int, now: int, values: dict[str, float]) -> Iterator[Event]:
    for at, (name, value) in enumerate(values.items()):
        yield Event(
            kind=Kind.METRIC, name=name, sequence=first + at, lamport=first + at, unix_ns=now, monotonic_ns=first + at,
            step=at % 20, value=value,
        )  # fmt: skip


@pytest.fixture(scope="module")
def hostile(site: Site) -> str:
    """A job of four ranks, two of them mute, with a gap, NaN and scripts in names; and another without a step."""
    now = time.time_ns() - 20 * 10**9
    steps = [step(n, now) for n in range(20) if not 8 <= n < 12]
    names = {f"custom.{EVIL}.{n}": float(n) for n in range(NAMES)}
    loss = [
        Event(
            kind=Kind.METRIC, name="training.loss", sequence=90_000 + n, lamport=n, unix_ns=now + n * 10**8,
            monotonic_ns=90_000 + n, step=n, value=float("nan") if n % 3 else 2.0 + n,
        )
        for n in range(20)
    ]  # fmt: skip
    words = Event(
        kind=Kind.EVENT, name="exception", sequence=99_000, lamport=1, unix_ns=now, monotonic_ns=99_000, step=3,
        body=EVIL, attributes={EVIL: EVIL},
    )  # fmt: skip
    bare = Event(kind=Kind.EVENT, name="attached", sequence=0, lamport=0, unix_ns=now, monotonic_ns=1)
    with httpx.Client(base_url=site.base, timeout=60.0) as client:
        post(client, [(WHO, [*steps, *metrics(1_000, now, names), *loss, words])])
        post(client, [(replace(WHO, rank=2, local_rank=2), steps)])
        post(client, [(replace(WHO, job="empty"), [bare])])
    return "hostile"


def test_nothing_a_trainer_sent_runs(page: Any, site: Site, hostile: str) -> None:
    for below in ("", "/ranks", "/ranks/0", "/events", "/communication", "/steps/5"):
        page.goto(f"{site.base}/jobs/{hostile}{below}", wait_until="commit")
        page.wait_for_selector("main h1")
        page.wait_for_timeout(500)
        assert page.evaluate("window.pwned") is None, below
        assert page.evaluate("document.querySelectorAll('main img[src=x]').length") == 0, below
    assert EVIL in page.evaluate("fetch('/api/v1/jobs/hostile/ranks').then(r => r.text())").replace('\\"', '"')


def test_what_is_missing_is_said_and_not_drawn(page: Any, site: Site, hostile: str) -> None:
    page.goto(f"{site.base}/jobs/{hostile}?heat=step_ms")
    page.wait_for_selector("#heat .hm image")
    page.wait_for_selector(".js-plotly-plot .scatterlayer .trace")
    cells = page.evaluate("document.querySelector('#heat .js-plotly-plot').calcdata[0][0].z.map(row => [...row])")
    assert all(value is None or value != value for value in cells[0][8:12])
    page.click("details summary:has-text('more metrics')")
    assert "through the API" in page.inner_text("details.panel")
    page.goto(site.base)
    page.wait_for_selector(f"main tr:has-text('{hostile}') td:text-is('2 of 4')")


def test_a_job_without_a_step_says_so(page: Any, site: Site, hostile: str) -> None:
    page.goto(f"{site.base}/jobs/empty")
    page.wait_for_selector("#heat :text('was measured yet')")
    assert page.inner_text(".tile .value >> nth=0") == "–"
