"""Numbers, ages and URLs as a person reads and shares them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.dashboard import export, view, words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.041, "41 µs"), (9.14, "9.14 ms"), (812.4, "812 ms"), (1_410.0, "1.41 s"), (200_000.0, "3 min 20 s"),
        (None, "–"), (float("nan"), "–"), (0, "0 ms"),
    ],
)  # fmt: skip
def test_milliseconds(value: Any, text: str) -> None:
    assert words.milliseconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(8.3, "8.3 s"), (18_240, "5 h 04 min"), (183_600, "2 d 3 h")])
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.00756, "27.2 GPU-s"), (0.21, "0.21 GPU-h"), (1234.0, "1,234 GPU-h")])
def test_gpu_hours(value: float, text: str) -> None:
    assert words.gpu_hours(value) == text


def test_ages_count_from_the_time_given() -> None:
    now = datetime(2026, 11, 29, 12, 0, 4, tzinfo=UTC)
    assert words.age("2026-11-29T12:00:00Z", now) == "4 s ago"
    assert words.age("not a time", now) == "–"


def test_a_headline_names_subject_cause_and_onset() -> None:
    cause = {"category": "lr_misconfigured", "subject": {"rank": None}, "since_step": 1118}
    assert words.headline({"causes": [cause]}) == "The whole job: LR misconfigured since step 1,118"
    assert "not diagnosed" in words.headline({"kind": "hang", "causes": []})


def test_an_abstention_says_what_is_missing() -> None:
    cause = {"category": "unknown", "subject": {}, "since_step": 7, "needs": ["stacks of rank 3"]}
    text = words.headline({"kind": "hang", "causes": [cause]})
    assert "cannot tell" in text
    assert "stacks of rank 3" in text


@given(st.text())
def test_any_query_string_gives_a_view_whose_link_gives_it_back(search: str) -> None:
    found = view.parse(search)
    again = view.parse(view.link("/", found).removeprefix("/"))
    assert again == found


def test_a_view_survives_its_link() -> None:
    wanted = view.View(from_step=3, to_step=90, smooth=0.6, log=True, heat="wait_ms", find="a&b=c", axis="time")
    assert view.parse(view.link("/x", wanted).removeprefix("/x")) == wanted


def test_ids_are_quoted_in_addresses() -> None:
    assert view.job_url("a/../b c", "steps", 3) == "/jobs/a%2F..%2Fb%20c/steps/3"


def test_markdown_neutralises_hostile_text() -> None:
    evil = "<script>x</script> [a](javascript:b) | `c`"
    cause = {
        "category": "slow_compute",
        "subject": {"rank": 1},
        "evidence": [{"says": evil, "value": 1.0, "unit": "ms"}],
    }
    text = export.markdown({"id": "i", "job": "j", "causes": [cause], "ledger": {}, "symptoms": [], "commands": []})
    assert "<script>" not in text.replace("\\<", "")
    assert "\\[a\\](javascript:b) \\|" in text


def test_a_spreadsheet_does_not_run_what_a_trainer_sent() -> None:
    text = export.table(["a"], [["=1+1"], [-2.5], ["fine"], [None]])
    assert text.split("\r\n") == ["a", "'=1+1", "-2.5", "fine", '""', ""] or "'=1+1" in text
    assert "-2.5" in text
