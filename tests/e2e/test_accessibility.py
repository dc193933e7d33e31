"""axe-core on every page, light and dark, and what it cannot see: focus order, keyboard, a narrow screen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import Site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}
CONTRAST = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
"""All that the other theme can change."""
PAGES = (
    "/", "/incidents", "/incidents/{incident}", "/jobs/slow", "/jobs/slow/steps/80", "/jobs/slow/ranks/3",
    "/jobs/slow/ranks", "/jobs/slow/communication", "/jobs/slow/sla", "/jobs/slow/events", "/compare?jobs=slow",
    "/policies", "/settings",
)  # fmt: skip


def test_no_page_has_a_serious_fault(page: Any, site: Site) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the dev extra brings axe-core")
    found: list[str] = []
    for path in PAGES:
        page.goto(site.base + path.format(incident=site.incident), wait_until="commit")
        page.wait_for_selector("main h1")
        page.wait_for_timeout(600)
        for rules in (RULES, CONTRAST):
            for fault in axe.Axe().run(page, options=rules).response["violations"]:
                if fault["impact"] in {"serious", "critical"}:
                    where = "; ".join(node["html"][:160] for node in fault["nodes"][:3])
                    found.append(f"{path} {fault['id']} ({fault['help']}): {where}")
            page.keyboard.press("t")
    assert found == []


def test_the_keyboard_reaches_the_culprit(page: Any, site: Site) -> None:
    page.goto(f"{site.base}/jobs/slow")
    page.wait_for_selector(".verdict h2 a")
    page.keyboard.press("Tab")
    reached: list[str] = []
    for _ in range(40):
        reached.append(page.evaluate("document.activeElement.textContent.trim()"))
        if page.evaluate("document.activeElement.matches('.verdict h2 a')"):
            break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or reached[-1] == "", reached[-1]
        page.keyboard.press("Tab")
    else:
        raise AssertionError(f"the verdict's link is not reached: {reached}")
    page.keyboard.press("Enter")
    page.wait_for_selector("#culprit")


def test_a_narrow_screen_scrolls_in_one_direction_only(page: Any, site: Site) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for path in ("/", "/jobs/slow", "/incidents/{incident}", "/settings"):
        page.goto(site.base + path.format(incident=site.incident), wait_until="commit")
        page.wait_for_selector("main h1")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
