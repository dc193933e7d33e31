"""Every text pattern is documented by an example line that it matches, and is cheap to pass over."""

from __future__ import annotations

import pytest

from lanterne.backend.readers.patterns import Pattern, match, patterns


@pytest.mark.parametrize("pattern", patterns(), ids=lambda p: p.name)
def test_a_pattern_matches_its_example(pattern: Pattern) -> None:
    assert pattern.name in [p.name for p, _ in match(pattern.example)]
    assert pattern.source


def test_names_are_unique() -> None:
    names = [p.name for p in patterns()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "line", ["", "step 10 loss 2.3 lr 1e-4", "everything is fine", "INFO epoch 3 begins", "accuracy 0.91"]
)
def test_ordinary_lines_say_nothing_alarming(line: str) -> None:
    harmless = {"env_var", "world_size", "software_version", "batches"}
    assert {p.event for p, _ in match(line)} <= harmless
