"""Arrays kept for curves and maps: what was sent stays told apart from what was not."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from lanterne.backend.api import grids


def rows(*cells: tuple[int, int, float]) -> pa.Table:
    rank, step, value = zip(*cells, strict=True)
    return pa.table({"rank": rank, "step": step, "time_ns": [s + 1 for s in step], "value": value})


@pytest.mark.parametrize("odd_first", [True, False])
def test_a_step_that_was_not_a_number_is_sent_and_one_that_is_missing_is_not(odd_first: bool) -> None:
    with_nan, without = rows((0, 0, 1.0), (1, 1, math.nan)), rows((0, 2, 3.0), (2, 3, 4.0))
    if not odd_first:
        with_nan, without = rows((0, 0, 1.0), (1, 1, 2.0)), rows((0, 2, 3.0), (2, 3, math.nan))
    old = grids.read(with_nan, 1, None, summed=False)
    grid = old.joined(grids.read(without, 2, 2, summed=False))
    assert grid.sent(slice(0, 4)).tolist() == [
        [True, False, False], [False, True, False], [True, False, False], [False, False, True],
    ]  # fmt: skip
