"""A person at the page: from the fleet to the culprit by clicking, and what the pages owe besides."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import CULPRIT, EVIL, Site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_from_the_fleet_to_the_culprit(page: Any, site: Site) -> None:
    page.goto(site.base)
    page.click("main a:text-is('slow')")
    page.wait_for_selector(".verdict h2")
    assert f"Rank {CULPRIT}" in page.inner_text(".verdict h2")
    page.wait_for_selector("#heat .hm image")
    page.wait_for_selector(".js-plotly-plot .scatterlayer .trace")
    page.click(".verdict h2 a")
    page.wait_for_selector("#culprit")
    assert re.search(rf"\brank {CULPRIT}\b", page.inner_text("#culprit"))
    assert page.url.endswith(site.incident)
    text = page.inner_text("main")
    assert "slow compute" in text
    assert "Since step" in text
    page.wait_for_selector("#graph canvas")


def test_a_click_on_the_heat_map_leads_to_step_and_rank(page: Any, site: Site) -> None:
    page.goto(f"{site.base}/jobs/slow")
    page.wait_for_selector("#heat .hm image")
    box = page.locator("#heat .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] * (CULPRIT + 0.5) / 8)
    page.wait_for_timeout(400)
    page.mouse.down()
    page.mouse.up()
    page.click("#picked >> text=open the step")
    page.wait_for_selector("#lanes .barlayer .point")
    assert "/steps/" in page.url
    assert f"rank {CULPRIT}" in page.inner_text("main ol.plain")
    number = int(page.url.rsplit("/", 1)[1])
    page.keyboard.press("]")
    page.wait_for_selector(f"h1:text-is('Step {number + 1}')")


def test_a_view_stands_in_the_url_and_comes_back(page: Any, site: Site) -> None:
    page.goto(f"{site.base}/jobs/slow?heat=wait_ms&log=1&from=20&to=80")
    page.wait_for_selector("#heat .hm image")
    checked = page.eval_on_selector_all("[aria-pressed=true][data-value]", "found => found.map(f => f.dataset.value)")
    assert "wait_ms" in checked
    assert "1" in checked
    page.click("button:text-is('own work')")
    page.wait_for_url("**heat=busy_ms**")
    page.click("#reset-zoom")
    page.wait_for_url(lambda url: "from=" not in url)
    assert "log=1" in page.url


def test_every_page_opens(page: Any, site: Site) -> None:
    for path in (
        "/incidents",
        "/policies",
        "/settings",
        "/jobs/slow/ranks/3",
        "/jobs/slow/communication",
        "/jobs/slow/events",
    ):
        page.goto(site.base + path)
        page.wait_for_selector("main h1")
        assert page.title().endswith("Lanterne")


def test_what_is_not_there_is_said(page: Any, site: Site) -> None:
    page.goto(f"{site.base}/jobs/nobody")
    page.wait_for_selector("text=Nothing here by this name")


def test_exports_carry_the_verdict(page: Any, site: Site, tmp_path: Path) -> None:
    page.goto(f"{site.base}/incidents/{site.incident}")
    for name, check in (("Markdown", "# Rank 3"), ("JSON", '"slow_compute"')):
        with page.expect_download() as waiting:
            page.click(f"button:text-is('{name}')")
        target = tmp_path / name
        waiting.value.save_as(target)
        assert check in target.read_text(encoding="utf-8")
    page.goto(f"{site.base}/jobs/slow/steps/80")
    with page.expect_download() as waiting:
        page.click("#trace")
    waiting.value.save_as(tmp_path / "trace")
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]


def test_a_table_is_saved_as_shown(page: Any, site: Site, tmp_path: Path) -> None:
    page.goto(site.base)
    page.wait_for_selector("#first", state="detached")
    page.hover("main table")
    with page.expect_download() as waiting:
        page.click("main .tabled .save")
    waiting.value.save_as(tmp_path / "jobs")
    head, *rows = (tmp_path / "jobs").read_text(encoding="utf-8").splitlines()
    assert head.startswith('"Job","State","Ranks"')
    assert any(row.startswith('"slow') for row in rows)


def test_the_verdict_is_there_before_any_script(browser: Any, site: Site) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(site.base)
    tab.click("main a:text-is('slow')")
    assert f"Rank {CULPRIT}" in tab.inner_text(".verdict h2")
    tab.click(".verdict h2 a")
    assert f"rank {CULPRIT}" in tab.inner_text("#culprit")
    context.close()


def test_an_order_goes_out_after_a_second_look_and_can_be_cancelled(page: Any, site: Site) -> None:
    page.goto(f"{site.base}/incidents/{site.incident}")
    page.click("summary:has-text('Order profile')")
    page.click("button:text-is('Order now')")
    page.wait_for_selector("#done .alert")
    page.wait_for_selector("article.order")
    orders = httpx.get(f"{site.base}/api/v1/jobs/slow/commands", timeout=30).json()["items"]
    assert [(o["action"], o["ranks"]) for o in orders] == [("profile", [CULPRIT])]
    page.click("article.order button:text-is('Cancel')")
    page.wait_for_selector("article.order .chip:has-text('cancelled')")


def test_hostile_notes_and_names_stay_text(page: Any, site: Site) -> None:
    page.goto(f"{site.base}/incidents/{site.incident}")
    httpx.post(
        f"{site.base}/api/v1/incidents/{site.incident}/notes", json={"says": EVIL}, timeout=30
    ).raise_for_status()
    page.wait_for_selector("#notes :text('onerror')")
    assert page.evaluate("window.pwned") is None


def test_the_fleet_lives_without_a_reload(page: Any, site: Site) -> None:
    from tests.e2e.feed import send

    page.goto(site.base)
    page.wait_for_selector("main table")
    page.evaluate("window.kept = 1")
    name = f"late-{time.monotonic_ns()}"
    send(site.base, name, [], dp=2, steps=20)
    page.wait_for_selector(f"main a:text-is('{name}')")
    assert page.evaluate("window.kept") == 1


def test_theme_keyboard_and_names(page: Any, site: Site) -> None:
    page.goto(site.base)
    page.wait_for_selector("main table")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    page.keyboard.press("g")
    page.keyboard.press("i")
    page.wait_for_url("**/incidents")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, a[href], input, [role=img], [role=figure], [role=region]')]
          .filter(e => !(e.textContent.trim() || e.getAttribute('aria-label') || e.title || e.placeholder
                         || (e.labels && e.labels.length)))
          .map(e => e.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("main h1").count() == 1
