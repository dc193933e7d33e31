"""``lanterne policy test``: what would a policy file have done to the incidents of a store? Nothing is touched."""

from __future__ import annotations

from collections import Counter
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

VERBS = {
    "act": "act", "propose": "propose it to a person", "suggest": "suggest it", "observe": "only note it",
    "hold": "hold back", "none": "do nothing",
}  # fmt: skip


def replay(file: Path, store: Any, control: ControlStore, *, ceiling: str = "auto") -> list[dict[str, Any]]:
    """One row an incident, oldest first: ``{incident, job, step, category, rank, policy, choice, why, orders, series,
    was}``. ``series`` says whether its events were at hand; ``was`` is what was decided in earnest (None: nothing).

    Each is judged by what was known when it was decided about. Budgets, cool-downs and the breaker run along, as if
    the policy had been in force. ``store`` is the event
    store, or None when only the incidents are at hand; conditions over series are then not met.
    Raises UsageError or UnreadableInput when the file cannot be used.
    """
    rows = replay_rules(read(file), control.incidents(limit=100_000), store, ceiling=ceiling)
    for row in rows:
        decided = control.decisions(row["incident"])[-1:]
        row["was"] = {"policy": decided[0].policy or "-", "choice": decided[0].chose} if decided else None
    return rows


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
                "step": record.incident.opened_step,
                "category": str(record.incident.causes[0].category),
                "rank": record.incident.causes[0].subject.rank,
                "policy": chosen.policy or "-",
                "choice": chosen.chose,
                "why": chosen.why,
                "orders": to_json(chosen.orders),
                "series": bool(len(facts.steps)),
            }
        )
    return rows


def told(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as lines for people, with a count at the end."""
    lines = []
    for row in rows:
        where = "" if row["rank"] is None else f" of rank {row['rank']}"
        lines.append(f"{row['job']}  step {row['step']}: {row['category']}{where} ({row['incident']})")
        lines.append(f"  {row['policy']} would {VERBS[row['choice']]}: {row['why']}")
        for order in row["orders"]:
            values = ", ".join(
                f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in order["parameters"].items()
            )
            ranks = "all ranks" if order["ranks"] == "all" else f"rank {', '.join(map(str, order['ranks']))}"
            lines.append(f"    {order['action']}({values}) on {ranks}")
        if row.get("was"):
            lines.append(f"  decided in earnest: {row['was']['policy']}: {row['was']['choice']}")
        if not row["series"]:
            lines.append("  its events are not at hand: conditions over series are not met")
    counts = Counter(row["choice"] for row in rows)
    found = ", ".join(f"{n} {choice}" for choice, n in sorted(counts.items()))
    return [*lines, f"{len(rows)} incidents with a cause: {found}" if rows else "no incident with a cause is stored"]


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
