"""Policies: what may be written, what is decided, what is done about it and how it is judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanterne import orders
from lanterne.backend import dispatch, policy
from lanterne.backend.policy.book import Book
from lanterne.backend.policy.decide import History, decide
from lanterne.backend.policy.outcome import met_by
from lanterne.backend.store import migrate
from lanterne.backend.store.control import ControlStore
from lanterne.causal.facts import Diagnosis, FactEvent, Facts
from lanterne.clock import SimulatedClock
from lanterne.errors import UnreadableInput, UsageError
from lanterne.nouns import (
    BreakerState,
    Cause,
    CauseCategory,
    EventName,
    Evidence,
    Identity,
    Incident,
    IncidentStatus,
    Severity,
    Subject,
)
from lanterne.settings import ServerSettings

JOB = "job-a"
S = 1_000_000_000


def incident(category: CauseCategory = CauseCategory.LR_MISCONFIGURED, **changes: Any) -> Incident:
    cause = Cause(category=category, since_step=60, confidence=0.95, **changes)
    return Incident(
        id="i1", kind="numerics", severity=Severity.P1, status=IncidentStatus.DIAGNOSED, opened_step=60,
        opened_at="2026-01-01T00:00:00.000000Z", causes=(cause,),
    )  # fmt: skip


def facts(steps: int = 80, jump: int = 60, back: int | None = None, events: list[FactEvent] | None = None) -> Facts:
    """Four ranks whose rate of 0.002 is 12 times too high from ``jump`` on, until ``back``."""
    at = np.arange(steps)
    rate = np.where((at >= jump) & (at < (steps if back is None else back)), 0.024, 0.002)
    loss = np.where(at < jump, 1.0, 1.4)
    shape = (steps, 4)
    series = {
        "lr": np.broadcast_to(rate[:, None], shape).copy(),
        "lr_planned": np.full(shape, 0.002),
        "loss": np.broadcast_to(loss[:, None], shape).copy(),
    }
    return Facts(
        job=JOB, attempt=0, ranks_expected=4, ranks=(0, 1, 2, 3), steps=at.astype(np.int64), series=series,
        events=events or [],
    )  # fmt: skip


def told(command: str, phase: str, step: int, ranks: range = range(4), **attributes: Any) -> list[FactEvent]:
    return [
        FactEvent(
            name=EventName.COMMAND, rank=rank, step=step, job_ns=5 * S,
            attributes={"id": command, "phase": phase, "step": str(step), **attributes},
        )
        for rank in ranks
    ]  # fmt: skip


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(unix_ns=1_800_000_000 * S)


@pytest.fixture
def control(tmp_path: Path, clock: SimulatedClock) -> Iterator[ControlStore]:
    settings = ServerSettings(data=str(tmp_path))
    migrate.upgrade(settings, branch="control")
    store = ControlStore.open(settings, clock=clock)
    store.touch([Identity(job=JOB, rank=r, world_size=4) for r in range(4)])
    yield store
    store.close()


def react(control: ControlStore, found: Incident, seen: Facts, ceiling: str = "auto") -> Incident:
    control.save_incident(JOB, 0, found)
    after = policy.react(
        control, None, JOB, 0, found, Diagnosis(kind="numerics", causes=found.causes), seen,
        ServerSettings(policy=ceiling), control.clock.unix_ns(),
    )  # fmt: skip
    control.save_incident(JOB, 0, after)
    return after


# --- data ----------------------------------------------------------------------------------------


def test_every_cause_has_a_default_and_every_default_survives_the_catalog() -> None:
    shipped = policy.defaults()
    assert {c for p in shipped for c in p.causes} == set(map(str, CauseCategory))
    assert [policy.parse(policy.body_of(p)) for p in shipped] == list(shipped)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- {name: a, action: format_disk}", "is not one of"),
        ("- {name: a, action: scale_lr, parameters: {factor: 9}}", "outside 0.01 to 2"),
        ("- {name: a, action: scale_lr, parameters: {faktor: 1}}", "unknown keys faktor"),
        ("- {name: a, action: scale_lr, parameters: {factor: '=1 +'}}", "not a CEL expression"),
        ("- {name: a, when: 'cause.'}", "not a CEL expression"),
        ("- {name: a, mode: always}", "is not one of observe"),
        ("- {name: a, causes: [gremlins]}", "not a cause category"),
        ("- {name: a, budget: many}", "not a number"),
        ("- {name: a, tries: 3}", "from 1 to 2"),
        ("- {name: a, ranks: culprit, action: set_lr, parameters: {lr: 1}}", "all ranks or none"),
        ("- {name: a}\n- {name: a}", "twice"),
        ("- {name: 'A b'}", "does not match"),
        ("- {name: a, verify: {want: fall}}", "metric: is missing"),
        ("- {name: a, surprise: 1}", "unknown keys surprise"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        policy.parse_text(text, "mine.yaml")


@pytest.mark.parametrize("text", ["{", "just words", "a: 1", "- [", "!!python/object:os.system {}"])
def test_a_file_that_is_no_policy_is_unreadable(text: str) -> None:
    with pytest.raises(UnreadableInput):
        policy.parse_text(text, "mine.yaml")


plain = st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.integers()
nested = st.recursive(plain, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3))


@given(nested)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_orders_from_anywhere_never_raise_anything_else(raw: Any) -> None:
    from lanterne.errors import CommandRefused

    order = {
        "id": "a", "job": "j", "attempt": 0, "action": "scale_lr", "parameters": {"factor": raw}, "ranks": raw,
        "issued_ns": 0, "expires_ns": 1, "counter": 1, "signature": raw,
    }  # fmt: skip
    for broken in (order, {**order, "parameters": raw}, {**order, "counter": raw, "ranks": "all"}):
        with pytest.raises(CommandRefused):
            orders.examine(broken, public="00" * 32, job="j", attempt=0, now_ns=0)


# --- decisions -----------------------------------------------------------------------------------


def choose(found: Incident, seen: Facts, *, ceiling: str = "auto", now: int = 10_000 * S, **history: Any) -> Any:
    return decide(policy.defaults(), JOB, 0, found, seen, History(**history), ceiling, now)


def test_a_jumped_rate_is_set_back_to_its_plan() -> None:
    chosen = choose(incident(), facts())
    assert (chosen.chose, chosen.policy) == ("act", "lr-back-to-plan")
    assert chosen.orders[0].action == "set_lr"
    assert chosen.orders[0].parameters == {"planned": True, "lr": pytest.approx(0.002)}
    assert chosen.before == {"lr": pytest.approx(0.024), "loss": pytest.approx(1.4)}


@pytest.mark.parametrize(
    ("ceiling", "chose"), [("observe", "observe"), ("suggest", "suggest"), ("approve", "propose"), ("auto", "act")]
)
def test_the_ceiling_lowers_every_mode(ceiling: str, chose: str) -> None:
    assert choose(incident(), facts(), ceiling=ceiling).chose == chose


SIGN = "lr-back-to-plan/lr_misconfigured/job"


@pytest.mark.parametrize(
    ("history", "why"),
    [
        ({"stopped": "pulled by anna"}, "stop switch"),
        ({"open": ["other"]}, "another remedy is being verified"),
        ({"tries": {SIGN: 2}, "failed": {SIGN: 2}}, "tried 2 times, 2 without success"),
        ({"used": {"lr-back-to-plan": [9_000 * S, 9_500 * S]}}, "budget"),
        ({"used": {"lr-back-to-plan": [9_995 * S]}}, "cool-down"),
    ],
)
def test_reasons_to_hold(history: dict[str, Any], why: str) -> None:
    chosen = choose(incident(), facts(), **history)
    assert chosen.chose == "hold"
    assert why in chosen.why


def test_too_little_confidence_holds() -> None:
    found = incident()
    unsure = replace(found, causes=(replace(found.causes[0], confidence=0.3),))
    assert choose(unsure, facts()).why == "confidence 0.30 is below 0.60"


def test_the_blast_radius_holds() -> None:
    narrow = replace(policy.defaults()[0], blast_radius="rank")
    chosen = decide([narrow], JOB, 0, incident(), facts(), History(), "auto", 10 * S)
    assert chosen.why == "blast radius: it would touch the job, the policy allows rank"


def _breaker(state: str = "open", failures: int = 0) -> BreakerState:
    return BreakerState(group="0,1,2,3", state=state, since_step=50, opened_times=1, failures=failures, why="slow")


STACKS = policy.parse({"name": "look", "causes": ["slow_link"], "mode": "auto", "action": "collect_stacks"})
SLOWER = policy.parse(
    {"name": "slower", "causes": ["slow_link"], "mode": "auto", "action": "scale_lr", "parameters": {"factor": 0.5}}
)


@pytest.mark.parametrize(
    ("rule", "breaker", "held"),
    [
        (None, _breaker(failures=3), True),  # a group whose calls fail carries nothing out together
        (None, _breaker(), False),  # a rate that jumped is no matter of slow calls
        (None, _breaker("half_open", failures=1), False),  # its one trial
        (None, _breaker("closed"), False),
        (SLOWER, _breaker(), True),  # what calls say while they are slow is not trusted
        (STACKS, _breaker(failures=3), False),  # looking is always allowed
    ],
)
def test_an_open_breaker_of_a_group_shapes_the_decision(rule: Any, breaker: BreakerState, held: bool) -> None:
    found = incident(CauseCategory.SLOW_LINK if rule else CauseCategory.LR_MISCONFIGURED)
    rules = [rule] if rule else policy.defaults()
    chosen = decide(rules, JOB, 0, found, facts(), History(breakers=(breaker,)), "auto", 10 * S)
    assert chosen.chose == ("hold" if held else "act")
    assert chosen.why.startswith("open breaker: group 0,1,2,3 since step 50") is held


def test_an_open_breaker_does_not_hold_a_restart_and_can_be_asked_for() -> None:
    found = incident(CauseCategory.RANK_CRASHED, subject=Subject(rank=2))
    chosen = choose(found, facts(), breakers=(_breaker(failures=3),))
    assert (chosen.chose, chosen.orders[0].action) == ("act", "restart")
    rule = policy.parse({"name": "a", "when": "breakers.open == 1 && breakers.half_open == 0", "action": "empty_cache"})
    for breakers, chose in (((_breaker(),), "suggest"), ((), "none")):
        assert decide([rule], JOB, 0, incident(), facts(), History(breakers=breakers), "auto", 10 * S).chose == chose


@pytest.mark.parametrize(
    ("bound_s", "idle_s", "action"),
    [(5.0, 9.0, "collect_stacks"), (5.0, 11.0, "restart"), (40.0, 60.0, "collect_stacks")],
)
def test_a_hang_is_restarted_after_twice_the_bound_of_its_phase(bound_s: float, idle_s: float, action: str) -> None:
    stall = FactEvent(name=EventName.STALL, rank=2, step=79, job_ns=80 * S, attributes={"bound_s": bound_s})
    seen = facts(events=[stall])
    seen = replace(seen, step_start_ns=np.arange(80, dtype=np.int64) * S + S, now_ns=int((80 + idle_s) * S))
    found = incident(CauseCategory.RANK_HUNG, subject=Subject(rank=2))
    assert choose(found, seen).orders[0].action == action


def test_a_parameter_out_of_bounds_holds() -> None:
    rule = policy.parse({"name": "a", "mode": "auto", "action": "scale_lr", "parameters": {"factor": "=lr.now * 1e6"}})
    chosen = decide([rule], JOB, 0, incident(), facts(), History(), "auto", 10 * S)
    assert chosen.chose == "hold"
    assert "outside" in chosen.why


def test_a_condition_over_a_series_that_is_not_there_is_not_met() -> None:
    rule = policy.parse({"name": "a", "when": "series.nothing.last > 1.0", "action": "empty_cache"})
    assert decide([rule], JOB, 0, incident(), facts(), History(), "auto", 10 * S).chose == "none"


def test_the_deployment_matrix_of_the_contract() -> None:
    surge, steps = facts(), 80
    at = np.arange(steps)
    grown = np.broadcast_to(np.where(at < 60, 1.0, 4.5)[:, None], (steps, 4))
    spiky = np.broadcast_to(np.where(at < 60, 0.1, 0.6)[:, None], (steps, 4))
    sparse = np.broadcast_to(np.where(at < 60, 0.5, 0.25)[:, None], (steps, 4))
    surge = replace(surge, series={**surge.series, "grad_norm": grown, "loss_spikeness": spiky})
    found = incident(CauseCategory.TRAINING_INSTABILITY)
    assert [o.action for o in choose(found, surge).orders] == ["save_checkpoint", "pause"]
    thin = replace(surge, series={**surge.series, "grad_sparsity": sparse})
    assert [o.action for o in choose(found, thin).orders] == ["clip_grad_norm", "scale_lr"]


def _read_back(rank: int, step: int, ok: bool) -> FactEvent:
    return FactEvent(
        name=EventName.CHECKPOINT_VERIFIED, rank=rank, step=step, job_ns=step * S + rank, attributes={"ok": ok}
    )


@pytest.mark.parametrize(
    ("said", "met"),
    [
        ([_read_back(r, 72, True) for r in range(4)], True),
        ([_read_back(r, 72, r != 2) for r in range(4)], False),
        ([_read_back(r, 72, True) for r in range(4)] + [_read_back(2, 79, False)], True),  # there is one to go back to
        ([_read_back(r, 72 + r, True) for r in range(4)], False),  # of no step is there a whole one
        ([_read_back(r, 72, True) for r in range(3)], False),  # one rank has not read its own yet
        ([_read_back(r, 60, True) for r in range(4)], False),  # before the order
        ([], False),
    ],
)
def test_an_ordered_checkpoint_helped_when_every_rank_read_it_back(said: list[FactEvent], met: bool) -> None:
    rule = next(p for p in policy.defaults() if p.name == "checkpoint-save-again").verify
    assert rule is not None
    assert met_by(rule, facts(events=[_read_back(2, 65, False), *said]), 70, {}, 1.0)[0] is met


@pytest.mark.parametrize(("value", "actions"), [(1.6e9, ["save_checkpoint", "restart"]), (0.9e9, ["save_checkpoint"])])
def test_a_leak_is_restarted_once_the_memory_has_tripled(value: float, actions: list[str]) -> None:
    proof = Evidence(says="grows", value=value, unit="bytes", baseline=0.5e9)
    found = incident(CauseCategory.MEMORY_LEAK, subject=Subject(rank=2), evidence=(proof,))
    chosen = choose(found, facts())
    assert [o.action for o in chosen.orders] == actions
    assert chosen.chose == ("act" if len(actions) == 2 else "propose")


def test_an_unknown_cause_is_left_alone() -> None:
    assert choose(incident(CauseCategory.UNKNOWN), facts()).chose == "none"


# --- the loop ------------------------------------------------------------------------------------


def test_observe_touches_nothing_and_says_what_would_have_been_done(control: ControlStore) -> None:
    after = react(control, incident(), facts(), "observe")
    assert not control.commands(JOB)
    decision = control.decisions("i1")[0]
    assert decision.chose == "observe"
    assert decision.body["orders"][0]["action"] == "set_lr"
    assert after.ledger["decided"]
    assert after.causes[0].remedy.action == "set_lr"


def test_an_act_writes_one_order_that_the_trainer_accepts(control: ControlStore, clock: SimulatedClock) -> None:
    after = react(control, incident(), facts())
    assert after.status is IncidentStatus.ACTING
    react(control, after, facts())
    made = control.commands(JOB)
    assert len(made) == 1
    _, public = control.job_key(JOB)
    orders.examine(made[0].wire, public=public.hex(), job=JOB, attempt=0, now_ns=clock.unix_ns())


def test_an_order_that_helped_is_verified(control: ControlStore, clock: SimulatedClock) -> None:
    react(control, incident(), facts())
    order = control.commands(JOB)[0].id
    clock.advance(3 * S)
    seen = facts(steps=90, back=84, events=told(order, "applied", 83, before="24e-3", after="2e-3"))
    changed = policy.verify(control, None, seen, clock.unix_ns())
    assert [i.status for i in changed] == [IncidentStatus.RESOLVED]
    assert set(changed[0].ledger) >= {"decided", "acted", "verified"}
    assert control.command(order).state == "applied"  # type: ignore[union-attr]
    assert "lr is 0.002" in control.notes("i1")[0].says


def test_an_order_that_did_not_help_is_undone_tried_twice_and_then_left(
    control: ControlStore, clock: SimulatedClock
) -> None:
    found, tried = incident(), []
    for turn in range(2):
        found = react(control, found, facts(steps=80 + 200 * turn))
        assert found.status is IncidentStatus.ACTING
        order = next(c for c in control.commands(JOB) if c.action == "set_lr" and c.id not in tried)
        tried.append(order.id)
        step = 83 + 200 * turn
        seen = facts(steps=200 + 200 * turn, events=told(order.id, "applied", step))
        found = policy.verify(control, None, seen, clock.unix_ns())[0]
        assert found.status is IncidentStatus.DIAGNOSED
        undo = next(c for c in control.commands(JOB) if c.action == "undo" and c.parameters["of"] == order.id)
        assert undo.state == "pending"
        clock.advance(600 * S)
    found = react(control, found, facts(steps=500))
    assert found.status is IncidentStatus.DIAGNOSED
    assert len([c for c in control.commands(JOB) if c.action == "set_lr"]) == 2
    assert "breaker" in control.decisions("i1")[-1].says
    assert Book.load(control, JOB).failed == {SIGN: 2}


def test_an_order_that_failed_on_one_rank_is_taken_back_on_the_others(control: ControlStore) -> None:
    react(control, incident(), facts())
    order = control.commands(JOB)[0].id
    said = [*told(order, "applied", 83, range(3)), *told(order, "failed", 83, range(3, 4), detail="no optimizer")]
    changed = policy.verify(control, None, facts(steps=90, events=said), control.clock.unix_ns())
    assert control.command(order).state == "refused"  # type: ignore[union-attr]
    assert changed[0].status is IncidentStatus.DIAGNOSED
    assert any(c.action == "undo" and c.parameters == {"of": order} for c in control.commands(JOB))


def test_an_order_is_not_applied_before_every_rank_said_so(control: ControlStore) -> None:
    react(control, incident(), facts())
    order = control.commands(JOB)[0].id
    dispatch.track(control, JOB, 4, told(order, "applied", 83, range(3)))
    assert control.command(order).state == "sent"  # type: ignore[union-attr]
    dispatch.track(control, JOB, 4, told(order, "applied", 83))
    assert control.command(order).state == "applied"  # type: ignore[union-attr]


def test_a_forged_order_that_was_refused_stands_in_the_audit_trail_once(control: ControlStore) -> None:
    said = told("forged-1", "refused", 9, range(1), detail="signature does not match")
    for _ in range(3):
        dispatch.track(control, JOB, 4, said)
    lines = [a for a in control.audit_log() if a.subject == "forged-1"]
    assert [(a.action, a.detail["detail"]) for a in lines] == [("command.refused", "signature does not match")]


def test_the_stop_switch_stops_every_job(control: ControlStore) -> None:
    policy.stop(control, "anna")
    react(control, incident(), facts())
    assert not control.commands(JOB)
    policy.stop(control, "anna", on=False)
    react(control, incident(), facts())
    assert len(control.commands(JOB)) == 1


def test_the_catalog_wins_over_a_default_of_the_same_name(control: ControlStore) -> None:
    shipped = next(p for p in policy.defaults() if p.name == "lr-back-to-plan")
    control.put_policy("lr-back-to-plan", {**policy.body_of(shipped), "mode": "suggest"})
    react(control, incident(), facts())
    assert not control.commands(JOB)
    assert control.decisions("i1")[0].chose == "suggest"


def test_a_catalog_entry_that_cannot_be_read_is_told_and_left_out(control: ControlStore) -> None:
    control.put_policy("broken", {"mode": "always"})
    assert "broken" not in {p.name for p in policy.policies(control)}
    policy.policies(control)
    assert len([a for a in control.audit_log() if a.action == "policy.unreadable"]) == 1


def test_replay_says_what_a_file_would_have_done(control: ControlStore, tmp_path: Path) -> None:
    for number in range(3):
        control.save_incident(JOB, 0, replace(incident(), id=f"i{number}"))
        control.clock.advance(100 * S)  # type: ignore[attr-defined]
    file = tmp_path / "mine.yaml"
    file.write_text(
        "- {name: halve, causes: [lr_misconfigured], mode: auto, action: scale_lr, parameters: {factor: 0.5}}"
    )
    rows = policy.replay(file, None, control)
    assert [r["choice"] for r in rows] == ["act", "act", "hold"]
    assert "breaker" in rows[2]["why"]
    assert not control.commands(JOB)


def test_culprit_orders_name_the_rank() -> None:
    found = incident(CauseCategory.DATA_STALL, subject=Subject(rank=3))
    assert choose(found, facts()).orders[0].ranks == (3,)
