"""A person at a job of 1,024 ranks: from the fleet to the rank that is slow."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.conftest import Site, await_incident
from tests.e2e.feed import send

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
RANK, SINCE = 777, 30


def test_the_culprit_of_a_thousand_is_found_by_clicking(page: Any, site: Site) -> None:
    send(site.base, "large", [("slow_compute", RANK, SINCE)], dp=1_024, steps=60)
    await_incident(site.base, "large", patience_s=300.0)
    page.goto(site.base)
    page.click("main a:text-is('large')")
    page.wait_for_selector("#heat .hm image")
    assert f"Rank {RANK}" in page.inner_text(".verdict h2")
    page.locator("#picked").scroll_into_view_if_needed()
    box = page.locator("#heat .nsewdrag").bounding_box()
    row = (RANK // 4 + 0.5) / 256
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * row)
    page.wait_for_timeout(400)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("#picked strong")
    assert int(re.findall(r"rank (\d+)", page.inner_text("#picked"))[0]) == RANK
    page.click(".verdict h2 a")
    page.wait_for_selector("#culprit")
    assert f"rank {RANK}" in page.inner_text("#culprit")
    page.wait_for_selector("#graph canvas")
    page.goto(f"{site.base}/jobs/large/ranks?find=rank {RANK}")
    page.click(f"main a:text-is('rank {RANK}')")
    page.wait_for_selector(f"h1:text-is('Rank {RANK}')")
    page.goto(f"{site.base}/jobs/large/steps/{SINCE + 10}")
    page.wait_for_selector("#lanes .barlayer .point")
    assert f"rank {RANK}" in page.inner_text("main ol.plain")
    page.goto(f"{site.base}/jobs/large/communication")
    page.wait_for_selector("#waits .hm image")
