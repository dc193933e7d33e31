"""``lanterne policy test``: what would a policy file have done to the incidents of a store? Nothing is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from lanterne.backend.policy.decide import History, decide
from lanterne.backend.policy.model import Policy, read
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.records import IncidentRecord
from lanterne.causal.facts import Facts
from lanterne.errors import StoreUnavailable
from lanterne.nouns import to_json
from lanterne.settings import ServerSettings


def replay(file: Path, store: Any, control: ControlStore, *, ceiling: str = "auto") -> list[dict[str, Any]]:
    """One row an incident, oldest first: ``{incident, job, category, policy, choice, why, orders}``.

    Each is judged by what was known when it was decided about. Budgets, cool-downs and the breaker run along, as if
    the policy had been in force. ``store`` is the event
    store, or None when only the incidents are at hand; conditions over series are then not met.
    Raises UsageError or UnreadableInput when the file cannot be used.
    """
    return replay_rules(read(file), control.incidents(limit=100_000), store, ceiling=ceiling)


def replay_rules(
    rules: Sequence[Policy], records: Iterable[IncidentRecord], store: Any = None, *, ceiling: str = "auto"
) -> list[dict[str, Any]]:
    """:func:`replay` of policies at hand over incidents at hand, which are taken in the order they opened."""
    rows: list[dict[str, Any]] = []
    histories: dict[str, History] = {}
    for record in sorted(records, key=lambda r: (r.opened_ns, r.incident.id)):
        if not record.incident.causes:
            continue
        facts = _as_of(_facts(store, record.job, record.attempt, record.incident.opened_step), record.incident.ledger)
        history = histories.setdefault(record.job, History(used={}, tries={}))
        chosen = decide(rules, record.job, record.attempt, record.incident, facts, history, ceiling, record.opened_ns)
        if chosen.chose in {"act", "propose"}:
            histories[record.job] = History(
                used={**history.used, chosen.policy: (*history.used.get(chosen.policy, ()), record.opened_ns)},
                tries={**history.tries, chosen.signature: history.tries.get(chosen.signature, 0) + 1},
            )
        rows.append(
            {
                "incident": record.incident.id,
                "job": record.job,
                "category": str(record.incident.causes[0].category),
                "policy": chosen.policy or "-",
                "choice": chosen.chose,
                "why": chosen.why,
                "orders": to_json(chosen.orders),
            }
        )
    return rows


def _facts(store: Any, job: str, attempt: int, opened: int | None) -> Facts:
    if store is None:
        return Facts(job=job, attempt=attempt)
    from lanterne.backend.align.facts import build_facts

    return build_facts(store, job, attempt, first_step=None if opened is None else max(0, opened - 100))


def _as_of(facts: Facts, ledger: Mapping[str, str]) -> Facts:
    """What was known when the incident was decided about (or at its last stamp before): no remedy's effect in it."""
    stamp = next((ledger[name] for name in ("decided", "diagnosed", "detected") if ledger.get(name)), "")
    if not stamp:
        return facts
    at = int(datetime.fromisoformat(stamp).timestamp() * 1e9)
    rows = int(np.searchsorted(facts.step_start_ns, at, side="right")) if len(facts.step_start_ns) else len(facts.steps)
    return replace(
        facts,
        steps=facts.steps[:rows],
        step_start_ns=facts.step_start_ns[:rows],
        series={name: values[:rows] for name, values in facts.series.items()},
        events=[event for event in facts.events if event.job_ns <= at],
        now_ns=at,
    )


def replay_file(file: Path, settings: ServerSettings) -> list[dict[str, Any]]:
    """:func:`replay` over the stores of ``settings``, which no server may hold open meanwhile."""
    from lanterne.backend.store.events import EventStore

    control = ControlStore.open(settings)
    store: EventStore | None = None
    try:
        try:
            store = EventStore.open(settings)
        except StoreUnavailable:
            store = None  # a running server holds it: the incidents alone are judged
        return replay(file, store, control)
    finally:
        if store is not None:
            store.close()
        control.close()
