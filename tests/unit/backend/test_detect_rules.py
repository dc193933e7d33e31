"""For every rule one fault that fires it and one neighbour that must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from detect_runs import T0, event, facts, series

from lanterne.backend import detect, incidents
from lanterne.backend.detect.base import Levels, levels_of
from lanterne.causal.facts import FactEvent, Facts, Place
from lanterne.errors import UsageError
from lanterne.nouns import Collective

Make = Callable[[], Facts]
AT = 100


def late(ms: float, rank: int = 2, steps: slice = slice(AT, None)) -> Facts:
    found = series()
    found["lateness_ms"][steps, rank] += ms
    found["step_ms"][steps] += ms
    return facts(found)


def sporadic(every: int) -> Facts:
    found = series()
    rows = np.arange(20, 200, every)
    found["lateness_ms"][rows, 1] += 400
    found["step_ms"][rows] += 400
    return facts(found)


def put(name: str, rows: slice, value: float, rank: int | None = None, *, factor: bool = False) -> Facts:
    found = series()
    columns = slice(None) if rank is None else rank
    found[name][rows, columns] = found[name][rows, columns] * value if factor else value
    return facts(found)


def waiting(ms: float, steps: slice = slice(AT, None)) -> Facts:
    found = series()
    found["data_wait_ms"][steps] += ms
    found["step_ms"][steps] += ms
    return facts(found)


def transfers(factor: float, steps: slice = slice(AT, None)) -> Facts:
    found = series(step_ms=200.0)
    more = found["transfer_ms"][steps] * (factor - 1)
    found["transfer_ms"][steps] += more
    found["step_ms"][steps] += more
    return facts(found)


def slower(factor: float, steps: int) -> Facts:
    found = series(400, step_ms=900.0)
    found["step_ms"][200 : 200 + steps] *= factor
    return facts(found)


def garbage(ms: float, everybody: bool = False) -> Facts:
    found = series()
    found["gc_ms"][AT::2, :] += ms if everybody else 0.0
    found["gc_ms"][AT::2, 1] += 0.0 if everybody else ms
    return facts(found)


def throttled(bits: int, clock: float) -> Facts:
    found = series()
    found["gpu_throttle"][AT:, 3] = bits
    found["gpu_clock_mhz"][AT:, 3] = clock
    return facts(found)


def growing(mb_a_step: float, ranks: slice) -> Facts:
    found = series()
    found["rss_bytes"][AT:, ranks] += mb_a_step * 1e6 * np.arange(100)[:, None]
    return facts(found)


def skipped(steps: tuple[int, ...], scale: float = 1024.0) -> Facts:
    return facts(series(), [event("overflow", r, s, scale_after=scale) for s in steps for r in range(4)])


def scale(to: float) -> Facts:
    found = series()
    found["loss_scale"][150:] = to
    return facts(found, [event("overflow", 0, 150)])


def rate(factor: float, planned: bool, everywhere: bool = True) -> Facts:
    found = series()
    found["lr"][AT:, slice(None) if everywhere else 1] *= factor
    if planned:
        found["lr_planned"][AT:] *= factor
    return facts(found)


def stepped_down() -> Facts:
    found = series()
    del found["lr_planned"]
    found["lr"][AT:] *= 0.1
    return facts(found)


def checkpoint(ms: float) -> Facts:
    found = series()
    found["checkpoint_ms"] = np.zeros((200, 4))
    found["checkpoint_ms"][[29, 59, 89, 119]] = 900.0
    found["checkpoint_ms"][149] = ms
    found["step_ms"] += found["checkpoint_ms"]
    return facts(found)


def saved(missing: bool) -> Facts:
    told = [event("checkpoint_saved", r, s) for s in (50, 100) for r in range(4)]
    return facts(series(), told[:-1] if missing else told)


def checksum(rows: slice) -> Facts:
    found = series()
    found["parameter_checksum"][rows, 2] += 1.0
    return facts(found)


def seeds(*values: int) -> Facts:
    return facts(series(), [event("seed", r, 0, torch=v) for r, v in enumerate(values)])


def stall(phase: str, over: bool = False, last: int = 199) -> Facts:
    told: list[FactEvent] = [event("stall", 1, last, phase=phase, stalled_s=9.0, bound_s=5.0)]
    if over:
        told.append(event("stall_ended", 1, last, phase=phase))
    calls = [Collective(rank=r, group="0-3", sequence=400, op="allreduce", step=last, entered_ns=T0) for r in (0, 2, 3)]
    return facts(series(), told, [] if over else calls)


def silent(steps: int, said: str = "") -> Facts:
    found = series(400, step_ms=300.0)
    for name in found:
        found[name][400 - steps :, 2] = np.nan
    return facts(found, [event(said, 2, 400 - steps)] if said else [])


def exited(code: int, signal: int = 0) -> Facts:
    return facts(series(), [event("exited", 2, 199, exit_code=code, signal=signal)])


def told(name: str, **attributes: object) -> Facts:
    return facts(series(), [event(name, 1, 150, **attributes)])  # type: ignore[arg-type]


def of_agent(category: str, state: str) -> Facts:
    said = event("host_finding", -1, -1, category=category, state=state, host="node0", source="cgroup", what="/x")
    return replace(facts(series(), [said]), places={r: Place(host="node0") for r in range(4)})


def probed(*gemm_ms: float, copy_ms: float = 2.0, step: int = 150, device: str = "cuda:0") -> Facts:
    said = [
        event("device_probe", r, step, device=device, gemm_ms=ms, copy_ms=copy_ms if r == 1 else 2.0)
        for r, ms in enumerate(gemm_ms)
    ]
    return facts(series(), said)


def syncing(ms: float, steps: int, rank: int | None = None, first: int = 200) -> Facts:
    found = series(400)
    columns = slice(None) if rank is None else rank
    found["wait_ms"][first : first + steps, columns] += ms
    found["step_ms"][first : first + steps] += ms if rank is None else 0.0
    return facts(found)


def signed(value: float) -> Facts:
    """A loss about zero with heavy tails, as policy gradients have it."""
    found = series(400)
    found["loss"] = np.random.default_rng(13).standard_t(5, (400, 1)) * 0.6 * np.ones((1, 4))
    found["loss"][300:302] = value
    return facts(found)


def scattered(sigma: float, steps: int) -> Facts:
    found = series(400)
    found["loss"][300 : 300 + steps] += np.random.default_rng(1).normal(0, sigma, (steps, 1))
    return facts(found)


def vanished(*, level: float = 1e-8, for_steps: int = 140, every: int = 1, flat: bool = True) -> Facts:
    """Gradients of next to nothing from step 60 on, in a loss that stands still or goes on falling."""
    found = series()
    if flat:
        found["loss"][60:] = 1.9 + np.random.default_rng(2).normal(0, 0.01, (140, 1))
    found["grad_norm"][60 : 60 + for_steps] = level
    found["grad_norm"][np.arange(200) % every != 0] = np.nan
    return facts(found)


def longer(tokens: float) -> Facts:
    """Steps that take 1.8 times as long from step 200 on, and carry ``tokens`` times the tokens."""
    found = series(400, step_ms=900.0)
    found["step_ms"][200:] *= 1.8
    found["tokens"] = np.where(np.arange(400)[:, None] < 200, 1024.0, 1024.0 * tokens) * np.ones((1, 4))
    return facts(found)


def noise_levels(*often: int) -> Facts:
    """Losses of a denoiser: small, ten times as much at the steps ``often``, and a last one of twelve times."""
    found, rng = series(400), np.random.default_rng(6)
    found["loss"] = 0.05 * np.exp(rng.normal(0, 0.1, (400, 1))) * np.ones((1, 4))
    found["loss"][list(often)] *= 10.0
    found["loss"][350] = 0.6
    return facts(found)


def tailed(share: float) -> Facts:
    """Norms of policy gradients: now and then five times the usual, and the last one a little more."""
    found, rng = series(400), np.random.default_rng(4)
    often = np.where(rng.random((400, 1)) < share, 4.5, 1.0)
    found["grad_norm"] = np.exp(rng.normal(0, 0.2, (400, 1))) * often * np.ones((1, 4))
    found["grad_norm"][350] = 8.0
    return facts(found)


def called(calls: str) -> Facts:
    return facts(series(), [event("amp_calls", r, 3, calls=calls) for r in range(4)])


def optimizers(usual: float, other: float, odd: int = 1) -> Facts:
    told = [event("optimizer_state", r, 20, betas=f"{other if r < odd else usual},0.999") for r in range(4)]
    return facts(series(), told)


RULES: dict[str, tuple[str, Make, Make]] = {
    "straggler": ("straggler", lambda: late(60), lambda: late(6)),
    "straggler, not for one bad step": ("straggler", lambda: late(60), lambda: late(60, steps=slice(100, 103))),
    "intermittent straggler": ("intermittent_straggler", lambda: sporadic(10), lambda: sporadic(90)),
    "step time": ("step_time", lambda: slower(1.6, 150), lambda: slower(1.6, 10)),
    "step time of more work": ("step_time", lambda: longer(1.0), lambda: longer(2.0)),
    "data stall": ("data_stall", lambda: waiting(90), lambda: waiting(8)),
    "garbage collection": ("gc_pause", lambda: garbage(80), lambda: garbage(12)),
    "slow transfer": ("slow_transfer", lambda: transfers(6), lambda: transfers(1.6)),
    "transfers that are slow at the start alone": (
        "slow_transfer",
        lambda: transfers(6, slice(40, 70)),
        lambda: transfers(6, slice(0, 40)),
    ),
    "throttling": ("thermal_throttle", lambda: throttled(0x40, 1200), lambda: throttled(0x04, 1200)),
    "throttling without loss": ("thermal_throttle", lambda: throttled(0x40, 1200), lambda: throttled(0x40, 1970)),
    "device errors": (
        "device_error",
        lambda: put("gpu_ecc_errors", slice(AT, None), 3.0, 1),
        lambda: put("gpu_ecc_errors", slice(0, None), 3.0, 1),
    ),
    "hang": ("hang", lambda: stall("forward"), lambda: stall("forward", over=True)),
    "a long checkpoint is no hang": ("hang", lambda: stall("backward"), lambda: stall("checkpoint")),
    "a long compile is no hang": ("hang", lambda: stall("forward"), lambda: stall("compile")),
    "an eval is no hang": ("hang", lambda: stall("forward"), lambda: stall("eval")),
    "crash by code": ("crash", lambda: exited(1), lambda: exited(0)),
    "crash by signal": ("crash", lambda: exited(0, 9), lambda: exited(0, 15)),
    "silence": ("silent_rank", lambda: silent(200), lambda: silent(5)),
    "silence after a clean end": ("silent_rank", lambda: silent(200), lambda: silent(200, "closed")),
    "mismatch": ("collective_mismatch", lambda: told("collective_mismatch", group="0-3"), lambda: told("recompile")),
    "out of memory": (
        "out_of_memory",
        lambda: told("out_of_memory", allocated_bytes=8e10),
        lambda: told("gc_pause", duration_ms=9.0),
    ),
    "memory in an exception": (
        "out_of_memory",
        lambda: told("exception", type="RuntimeError", message="CUDA out of memory"),
        lambda: told("exception", type="RuntimeError", message="shapes differ"),
    ),
    "leak": ("memory_leak", lambda: growing(12, slice(1, 2)), lambda: growing(12, slice(0, 4))),
    "small growth": ("memory_leak", lambda: growing(12, slice(1, 2)), lambda: growing(0.5, slice(1, 2))),
    "non-finite": (
        "nonfinite",
        lambda: put("grad_norm", slice(AT, AT + 3), np.inf),
        lambda: put("grad_norm", slice(AT, AT + 3), np.nan),
    ),
    "overflow": ("overflow", lambda: skipped((100, 104, 109)), lambda: skipped((40, 90, 140))),
    "scaler settling": ("overflow", lambda: skipped((100, 101, 102)), lambda: skipped((0, 1, 2, 3))),
    "scale collapse": ("loss_scale_collapse", lambda: scale(0.5), lambda: scale(32768.0)),
    "loss spike": (
        "loss_spike",
        lambda: put("loss", slice(AT, AT + 3), 12.0),
        lambda: put("loss", slice(AT, AT + 3), 2.4),
    ),
    "loss spike among rewards of either sign": ("loss_spike", lambda: signed(40.0), lambda: signed(8.0)),
    "gradient spike": (
        "grad_spike",
        lambda: put("grad_norm", slice(AT, AT + 2), 40.0),
        lambda: put("grad_norm", slice(AT, AT + 2), 3.0),
    ),
    "gradient spike among tails": ("grad_spike", lambda: tailed(0.0), lambda: tailed(0.04)),
    "gradient spike of a run without a past": (
        "grad_spike",
        lambda: put("grad_norm", slice(130, 131), 8.0),
        lambda: put("grad_norm", slice(40, 41), 10.0),
    ),
    "gradient explosion": (
        "grad_explosion",
        lambda: put("grad_norm", slice(AT, None), 5e4),
        lambda: put("grad_norm", slice(AT, None), 50.0),
    ),
    "gradient vanishing": ("grad_vanishing", lambda: vanished(), lambda: vanished(for_steps=15)),
    "gradient vanishing, sampled": (
        "grad_vanishing",
        lambda: vanished(every=10),
        lambda: vanished(every=10, level=1e-5),
    ),
    "small gradients of a loss that still falls": ("grad_vanishing", vanished, lambda: vanished(flat=False)),
    "a loss that stands still with gradients": ("grad_vanishing", vanished, lambda: vanished(level=0.1)),
    "sync delay": ("sync_delay", lambda: syncing(1500, 10), lambda: syncing(1500, 2)),
    "sync delay under the level": ("sync_delay", lambda: syncing(1500, 10), lambda: syncing(600, 10)),
    "sync that always takes long": ("sync_delay", lambda: syncing(1500, 10), lambda: syncing(1500, 400, first=0)),
    "sync skew": ("sync_skew", lambda: syncing(200, 10, rank=1), lambda: syncing(200, 2, rank=1)),
    "sync skew of next to nothing": ("sync_skew", lambda: syncing(200, 10, rank=1), lambda: syncing(40, 10, rank=1)),
    "sync that one rank always waits": (
        "sync_skew",
        lambda: syncing(200, 10, rank=1),
        lambda: syncing(200, 400, rank=1, first=0),
    ),
    "loss variance": ("loss_variance", lambda: scattered(0.3, 100), lambda: scattered(0.04, 100)),
    "loss variance of one window": ("loss_variance", lambda: scattered(0.3, 100), lambda: scattered(0.3, 20)),
    "loss spike among tails": ("loss_spike", noise_levels, lambda: noise_levels(7, 15, 21, *range(40, 400, 30))),
    "loss variance of one bad batch": ("loss_variance", lambda: scattered(0.3, 100), lambda: scattered(0.3, 1)),
    "scaler misuse": (
        "scaler_misuse",
        lambda: called("scale,backward,clip,unscale,step,update"),
        lambda: called("scale,backward,unscale,clip,step,update"),
    ),
    "scaler never updated": (
        "scaler_misuse",
        lambda: called("scale,backward,step"),
        lambda: called("backward,clip,optimizer_step"),
    ),
    "optimizer settings": ("optimizer_mismatch", lambda: optimizers(0.9, 0.8), lambda: optimizers(0.9, 0.9)),
    "optimizer of two camps": ("optimizer_mismatch", lambda: optimizers(0.9, 0.8), lambda: optimizers(0.9, 0.8, odd=2)),
    "learning rate off its plan": ("lr_drift", lambda: rate(10, planned=False), lambda: rate(10, planned=True)),
    "a decay without a plan": ("lr_drift", lambda: rate(0.1, planned=False), stepped_down),
    "learning rates differ": (
        "lr_disagree",
        lambda: rate(1.5, planned=False, everywhere=False),
        lambda: rate(1.5, planned=True),
    ),
    "synchronised gradients differ": (
        "replica_divergence",
        lambda: put("grad_norm", slice(AT, None), 1.01, 2, factor=True),
        lambda: put("grad_norm", slice(AT, None), 1.01, factor=True),
    ),
    "gradients that summing order moves": (
        "replica_divergence",
        lambda: put("grad_norm", slice(AT, None), 1.01, 2, factor=True),
        lambda: put("grad_norm", slice(AT, None), 1.0001, 2, factor=True),
    ),
    "norms of shards that never agreed": (
        "replica_divergence",
        lambda: put("grad_norm", slice(AT, None), 1.01, 2, factor=True),
        lambda: put("grad_norm", slice(0, None), 1.01, 2, factor=True),
    ),
    "replicas differ": ("replica_divergence", lambda: checksum(slice(AT, None)), lambda: checksum(slice(0, 1))),
    "seeds differ": ("seed_mismatch", lambda: seeds(7, 7, 9, 7), lambda: seeds(7, 8, 9, 10)),
    "checkpoint stall": ("checkpoint_stall", lambda: checkpoint(9000), lambda: checkpoint(1800)),
    "checkpoint damaged": (
        "checkpoint_corrupt",
        lambda: told("checkpoint_verified", ok=False),
        lambda: told("checkpoint_verified", ok=True),
    ),
    "a slow device": ("slow_device", lambda: probed(1.0, 1.5, 1.02, 0.99), lambda: probed(1.0, 1.15, 1.02, 0.99)),
    "a device that copies slowly": (
        "slow_device",
        lambda: probed(1.0, 1.0, 1.0, copy_ms=4.0),
        lambda: probed(1.4, 1.5, 1.6, 1.4, copy_ms=2.1),
    ),
    "cores that are shared": (
        "slow_device",
        lambda: probed(0.25, 0.26, 0.6, device="cpu:0"),
        lambda: probed(0.25, 0.26, 0.42, device="cpu:0"),
    ),
    "a device without enough peers": ("slow_device", lambda: probed(1.0, 9.0, 1.0), lambda: probed(1.0, 9.0)),
    "a busy neighbour": (
        "host_contention",
        lambda: of_agent("host_contention", "begun"),
        lambda: of_agent("host_contention", "ended"),
    ),
    "a full disk": ("storage_slow", lambda: of_agent("storage_slow", "lasts"), lambda: of_agent("none", "begun")),
    "checkpoint incomplete": ("checkpoint_incomplete", lambda: saved(True), lambda: saved(False)),
}


@pytest.mark.parametrize("rule", list(RULES))
def test_it_fires_and_its_neighbour_does_not(rule: str) -> None:
    kind, fault, neighbour = RULES[rule]
    assert kind in {a.kind for a in detect.run(fault())}, "the fault was not seen"
    assert kind not in {a.kind for a in detect.run(neighbour())}, "the neighbour raised an alarm"


@pytest.mark.parametrize(("steps", "says"), [(5, ["99.5% quantile"]), (2, [])])
def test_three_steps_above_the_quantile_are_a_spike_where_no_single_one_is(steps: int, says: list[str]) -> None:
    found = detect.run(put("loss", slice(AT, AT + steps), 4.0))
    assert [text for a in found for text in ("99.5% quantile",) if text in a.says] == says
    assert {a.kind for a in found} == ({"loss_spike"} if says else set())


@pytest.mark.parametrize(("name", "value"), [("grad_norm", 12.0), ("loss_spikeness", 0.5)])
def test_a_level_fires_alone_only_where_it_was_chosen(name: str, value: float) -> None:
    found = series()
    found["grad_norm"] *= 0
    found["grad_norm"] += 3.0
    found[name] = np.full((200, 4), value)
    chosen = detect.run(facts(found), Levels(chosen=frozenset({name})))
    assert [(a.kind, a.fired_by) for a in chosen] == [(name, "level")]
    assert detect.run(facts(found)) == []


def test_a_crossed_level_makes_an_incident_grave_but_does_not_name_it() -> None:
    found = series(400)
    found["lateness_ms"][200:, 2] += 1500
    found["wait_ms"][200:] += 1500
    found["step_ms"][200:] += 1500
    run = facts(found)
    anomalies = detect.run(run)
    assert {"straggler", "sync_delay"} <= {a.kind for a in anomalies}
    (case,) = incidents.join(run, anomalies)
    assert (case.incident.kind, str(case.incident.severity)) == ("straggler", "P0")


def test_levels_come_from_the_settings() -> None:
    assert levels_of("") == Levels()
    assert levels_of(" grad_norm=12 sync_ms=500.5 ") == Levels(
        grad_norm=12.0, sync_ms=500.5, chosen=frozenset({"grad_norm", "sync_ms"})
    )
    for text in ("grad=12", "grad_norm", "grad_norm=much", "grad_norm=nan", "chosen=1"):
        with pytest.raises(UsageError, match="levels"):
            levels_of(text)
    waits = syncing(600, 10)
    assert [(a.kind, a.fired_by) for a in detect.run(waits, levels_of("sync_ms=500"))] == [("sync_delay", "level")]
    assert detect.run(waits) == []


def test_every_kind_is_tested() -> None:
    tested = {kind for kind, _, _ in RULES.values()} | {"grad_norm", "loss_spikeness"}
    tested |= {"heartbeat_lost", "version_gap", "liveness"}  # test_heartbeat.py
    assert tested >= set(detect.KINDS)


@pytest.mark.parametrize(("last", "found"), [(128, True), (190, False)])
def test_one_check_of_replicas_suffices_where_no_other_comes_for_a_while(last: int, found: bool) -> None:
    sums = np.full((200, 4), np.nan)
    sums[[0, 64, last]] = float(1 << 51)
    sums[last, 3] += 1
    told = detect.replicas.divergence(facts({**series(), "parameter_checksum": sums}))
    assert [a.subject.rank for a in told] == ([3] if found else [])
