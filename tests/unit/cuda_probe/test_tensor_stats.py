"""The overflow rule against torch's own conversions, on the CPU twin."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lanterne.cuda_probe import builder
from lanterne.cuda_probe.stats import Stats

pytestmark = pytest.mark.skipif(
    not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="no C++ compiler on this machine"
)


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> Stats:
    os.environ.setdefault("LANTERNE_CACHE", str(tmp_path_factory.mktemp("cache")))
    result = builder.build(tests=True, device=False)
    assert result.built, result.reason
    return Stats(Path(result.library).parent / builder.STATS_LIBRARY)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=64),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_counts_agree_with_torch(stats: Stats, values: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(values, dtype=torch.float32).to(dtype)
    wide = tensor.to(torch.float64)
    magnitude = wide.abs()
    finite = wide.isfinite()
    found = stats.cpu([tensor])
    assert found.total == len(values)
    assert found.nan == int(wide.isnan().sum())
    assert found.infinite == int(wide.isinf().sum())
    assert found.zeros == int((wide == 0).sum())
    for name, largest, smallest in (("fp16", 65504.0, 2**-24), ("e4m3", 448.0, 2**-9), ("e5m2", 57344.0, 2**-16)):
        assert getattr(found, f"{name}_over") == int((finite & (magnitude >= largest)).sum())
        assert getattr(found, f"{name}_under") == int((finite & (magnitude > 0) & (magnitude < smallest)).sum())
    assert found.max_abs == (float(magnitude[finite].max()) if finite.any() else 0.0)


def test_limits_are_those_of_the_formats() -> None:
    for dtype, largest, smallest in (
        (torch.float16, 65504.0, 2**-24),
        (torch.float8_e4m3fn, 448.0, 2**-9),
        (torch.float8_e5m2, 57344.0, 2**-16),
    ):
        assert torch.finfo(dtype).max == largest
        assert float(torch.tensor(smallest).to(dtype)) == smallest
        assert float(torch.tensor(smallest * 0.49).to(dtype)) == 0.0


def test_many_tensors_add_up(stats: Stats) -> None:
    tensors = [torch.full((n,), 7e4) for n in (1, 3, 1000)] + [torch.tensor([math.nan, math.inf])]
    found = stats.cpu(tensors)
    assert (found.total, found.fp16_over, found.nan, found.infinite, found.max_abs) == (1006, 1004, 1, 1, 7e4)


def test_what_it_cannot_read_is_refused(stats: Stats) -> None:
    with pytest.raises(ValueError, match=r"torch\.int64"):
        stats.cpu([torch.ones(3, dtype=torch.int64)])
    with pytest.raises(ValueError, match="contiguous"):
        stats.cpu([torch.ones(4, 4).t()[1:]])


@pytest.mark.slow
def test_the_device_kernel_compiles_where_nvcc_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not builder.find_nvcc() or not shutil.which("cmake"):
        pytest.skip("needs nvcc and cmake")
    monkeypatch.setenv("LANTERNE_CACHE", str(tmp_path))
    result = builder.build()
    assert result.built, result.reason
    assert Stats(Path(result.library).parent / builder.STATS_LIBRARY).has_cuda
