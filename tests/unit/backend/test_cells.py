"""The heat map's cells against a plain loop."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.backend.api import cells


@given(
    st.integers(1, 9), st.integers(1, 14), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1)
)  # fmt: skip
def test_a_tile_holds_its_greatest_known_value(rows: int, columns: int, high: int, wide: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    block = np.where(random.random((rows, columns)) < 0.4, np.nan, random.normal(size=(rows, columns)))
    found = cells.pool(block, high, wide)
    for y in range(found.shape[0]):
        for x in range(found.shape[1]):
            tile = block[y * high : (y + 1) * high, x * wide : (x + 1) * wide]
            known = tile[~np.isnan(tile)]
            assert np.isnan(found[y, x]) if not known.size else found[y, x] == known.max()


@pytest.mark.parametrize(("last", "wide"), [(1_999, 4), (9_999, 20), (10, 1), (123_456, 247)])
def test_blocks_are_cut_between_cells_and_leave_nothing_out(last: int, wide: int) -> None:
    window = cells.Window(ranks=(0, 1_023), steps=(7, last), step_width=wide)
    blocks = list(window.blocks())
    assert blocks[0][0] == 7
    assert blocks[-1][1] == last
    assert all(after[0] == before[1] + 1 for before, after in pairwise(blocks))
    assert all((first - 7) % wide == 0 for first, _ in blocks)
    assert sum(-(-(b - a + 1) // wide) for a, b in blocks) == window.shape[1]
