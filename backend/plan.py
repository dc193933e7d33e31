"""A parallel and memory plan for a transformer: which (dp, tp, pp) fit, and which of them waste least.

Memory follows Rajbhandari et al. 2020 (ZeRO: optimizer states, gradients and weights over the replicas) and
Korthikanti et al. 2022 (activations of a transformer layer, with selective recomputation and sequence parallelism).
Time is a model, not a measurement: pipeline bubble (p - 1) / m of 1F1B (Narayanan et al. 2021) and the bytes that each
kind of parallelism sends; it ranks plans, it does not promise throughput.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lanterne.errors import UsageError

GIB = 1 << 30
WEIGHT_BYTES, GRADIENT_BYTES = 2, 4
OPTIMIZER_BYTES = 12
"""FP32 master weight and two Adam moments."""
ACTIVATION_BYTES_PER_ELEMENT = 34
RESERVE_SHARE = 0.08
"""Share of device memory left to the context, NCCL buffers and fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shape of the model; ``parameters`` counts elements. Batches are in sequences."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    sequence: int
    global_batch: int
    micro_batch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``intra_gbps`` and ``inter_gbps`` are GB/s a device can send inside and between hosts."""

    devices: int
    devices_per_host: int = 8
    memory_gib: float = 80.0
    tflops: float = 400.0
    intra_gbps: float = 300.0
    inter_gbps: float = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One layout. Sizes in GiB per device; ``step_s`` and its parts are the model's estimate in seconds."""

    dp: int
    tp: int
    pp: int
    micro_batches: int
    zero: int
    recompute: bool
    states_gib: float
    activations_gib: float
    free_gib: float
    bubble: float
    step_s: float
    communication_s: float
    fits: bool
    why: str = ""


def _check(model: Model, cluster: Cluster) -> None:
    for owner in (model, cluster):
        for name in owner.__dataclass_fields__:
            if getattr(owner, name) <= 0:
                raise UsageError(f"plan: {name} is {getattr(owner, name)}; it must be positive")
    if model.hidden % model.heads:
        raise UsageError(f"plan: hidden {model.hidden} is not divisible by heads {model.heads}")


def _layouts(model: Model, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    for tp in (2**k for k in range(cluster.devices_per_host.bit_length())):
        if tp > cluster.devices_per_host or model.heads % tp or cluster.devices % tp:
            continue
        for pp in range(1, min(model.layers, cluster.devices // tp) + 1):
            if model.layers % pp or cluster.devices % (tp * pp):
                continue
            dp = cluster.devices // (tp * pp)
            if model.global_batch % (dp * model.micro_batch) == 0:
                yield dp, tp, pp


def _states(model: Model, dp: int, tp: int, pp: int, zero: int) -> float:
    own = model.parameters / (tp * pp)
    weights = own * WEIGHT_BYTES / (dp if zero >= 3 else 1)
    gradients = own * GRADIENT_BYTES / (dp if zero >= 2 else 1)
    optimizer = own * OPTIMIZER_BYTES / (dp if zero >= 1 else 1)
    return (weights + gradients + optimizer) / GIB


def _activations(model: Model, tp: int, pp: int, micro_batches: int, recompute: bool) -> float:
    size = model.sequence * model.micro_batch * model.hidden
    attention = 5 * model.heads * model.sequence / model.hidden
    per_layer = 2 * size if recompute else size * (ACTIVATION_BYTES_PER_ELEMENT + attention) / tp
    in_flight = min(pp, micro_batches)
    work = size * (ACTIVATION_BYTES_PER_ELEMENT + attention) / tp if recompute else 0.0
    return (per_layer * model.layers / pp * in_flight + work) / GIB


def _time(model: Model, cluster: Cluster, plan: tuple[int, int, int], m: int, recompute: bool) -> tuple[float, float]:
    dp, tp, pp = plan
    tokens = model.global_batch * model.sequence
    flops = (8 if recompute else 6) * model.parameters * tokens
    compute = flops / (cluster.devices * cluster.tflops * 1e12) * (1 + (pp - 1) / m)
    size = 2 * model.sequence * model.micro_batch * model.hidden
    tensor = 4 * 2 * (tp - 1) / tp * size * model.layers / pp * m / (cluster.intra_gbps * 1e9) if tp > 1 else 0.0
    local = dp * tp * pp <= cluster.devices_per_host
    data_rate = (cluster.intra_gbps if local else cluster.inter_gbps) * 1e9
    data = 2 * (dp - 1) / dp * model.parameters / (tp * pp) * GRADIENT_BYTES / data_rate if dp > 1 else 0.0
    pipe = 2 * size * m / (cluster.inter_gbps * 1e9) if pp > 1 else 0.0
    communication = tensor + pipe + 0.3 * data
    return compute + communication, communication


def plans(model: Model, cluster: Cluster) -> list[Plan]:
    """All layouts that divide, those that fit first, fastest first. Raises :class:`UsageError` on impossible input.

    ``zero`` is the smallest stage that fits; recomputation is switched on only where it is needed to fit.
    """
    _check(model, cluster)
    found: list[Plan] = []
    budget = cluster.memory_gib * (1 - RESERVE_SHARE)
    for dp, tp, pp in _layouts(model, cluster):
        m = model.global_batch // (dp * model.micro_batch)
        choices = [(zero, recompute) for recompute in (False, True) for zero in (0, 1, 2, 3)]
        for zero, recompute in choices:
            states = _states(model, dp, tp, pp, zero)
            activations = _activations(model, tp, pp, m, recompute)
            if states + activations <= budget:
                break
        fits = states + activations <= budget
        step, communication = _time(model, cluster, (dp, tp, pp), m, recompute)
        found.append(
            Plan(
                dp=dp, tp=tp, pp=pp, micro_batches=m, zero=zero, recompute=recompute, states_gib=round(states, 2),
                activations_gib=round(activations, 2), free_gib=round(cluster.memory_gib - states - activations, 2),
                bubble=round((pp - 1) / m, 4), step_s=round(step, 4), communication_s=round(communication, 4),
                fits=fits, why="" if fits else f"needs {states + activations:.1f} GiB, {budget:.1f} GiB are usable",
            )
        )  # fmt: skip
    if not found:
        raise UsageError(
            f"plan: no layout divides {cluster.devices} devices, {model.layers} layers, {model.heads} heads and a "
            f"global batch of {model.global_batch}; change one of them"
        )
    return sorted(found, key=lambda p: (not p.fits, p.step_s))
