"""The planner against the worked figures of its sources, and against nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.backend.plan import GIB, Cluster, Model, plans
from lanterne.errors import UsageError

GPT3 = Model(parameters=175e9, layers=96, hidden=12288, heads=96, sequence=2048, global_batch=1536)


def test_model_states_are_sixteen_bytes_and_two_for_fp32_gradients() -> None:
    one = plans(
        Model(parameters=7.5e9, layers=36, hidden=4096, heads=32, sequence=1024, global_batch=1), Cluster(devices=1)
    )
    assert one[0].states_gib == pytest.approx(7.5e9 * 18 / GIB, rel=0.01)
    assert not one[0].fits
    assert "usable" in one[0].why


def test_gpt3_on_1024_devices_needs_tensor_and_pipeline_parallelism() -> None:
    found = plans(GPT3, Cluster(devices=1024))
    best = found[0]
    assert best.fits
    assert best.dp * best.tp * best.pp == 1024
    assert best.states_gib + best.activations_gib < 80
    assert best.tp > 1 or best.pp > 1
    narrow = plans(GPT3, Cluster(devices=8))
    assert not any(p.fits for p in narrow)


def test_more_replicas_shrink_what_zero_shards() -> None:
    small = plans(GPT3, Cluster(devices=256))
    large = plans(GPT3, Cluster(devices=512))
    key = {(p.tp, p.pp): p for p in small if p.zero == 3}
    shared = [(key[p.tp, p.pp], p) for p in large if (p.tp, p.pp) in key and p.zero == 3]
    assert shared
    assert all(b.states_gib <= a.states_gib for a, b in shared)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"layers": 0}, "layers is 0"), ({"heads": 7}, "not divisible"), ({"global_batch": 1}, "no layout divides")],
)
def test_impossible_input_is_refused_with_the_reason(change: dict[str, int], says: str) -> None:
    fields = {n: getattr(GPT3, n) for n in Model.__dataclass_fields__} | change
    with pytest.raises(UsageError, match=says):
        plans(Model(**fields), Cluster(devices=97))


@given(st.integers(1, 64), st.sampled_from([8, 12, 24, 48]), st.sampled_from([1, 2, 4]))
def test_every_plan_uses_every_device(hosts: int, layers: int, micro: int) -> None:
    model = Model(
        parameters=1e9,
        layers=layers,
        hidden=2048,
        heads=16,
        sequence=2048,
        global_batch=hosts * 8 * 4,
        micro_batch=micro,
    )
    for plan in plans(model, Cluster(devices=hosts * 8)):
        assert plan.dp * plan.tp * plan.pp == hosts * 8
        assert plan.micro_batches * plan.dp * micro == model.global_batch
