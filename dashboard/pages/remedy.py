"""What to do about an incident: the advice, the orders under way, and the buttons of a person in charge."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from lanterne import orders
from lanterne.dashboard import parts, words
from lanterne.errors import CommandRefused

TONES: Mapping[str, tuple[str, str]] = {
    "proposed": ("warn", "?"),
    "pending": ("info", "…"),
    "sent": ("info", "→"),
    "committed": ("info", "◔"),
    "applied": ("good", "✓"),
    "refused": ("bad", "✕"),
    "expired": ("calm", "–"),
    "cancelled": ("calm", "–"),
    "undone": ("calm", "↶"),
}


def sentence(action: str, parameters: Mapping[str, Any]) -> str:
    """An order in words: ``scale_lr: multiply the learning rate and its schedule (factor 0.5)``."""
    known = orders.ACTIONS.get(action)
    given = ", ".join(f"{words.plain(k)} {v}" for k, v in parameters.items())
    says = known.says if known else "not an action of this version"
    return f"{says}{f' ({given})' if given else ''}"


def _effects(results: Sequence[Mapping[str, Any]]) -> parts.Node:
    told = [r for r in results if r.get("before") is not None or r.get("after") is not None]
    if not told:
        return html.P(
            f"{len({r.get('rank') for r in results})} ranks answered" if results else "no rank has answered yet",
            className="note",
        )
    same: dict[tuple[str, str, str], list[int]] = {}
    for one in told:
        key = (str(one.get("step")), str(one.get("before")), str(one.get("after")))
        same.setdefault(key, []).append(int(one.get("rank") or 0))
    rows = [
        [f"{len(set(ranks))} rank{'s' if len(set(ranks)) > 1 else ''}", step, before, after]
        for (step, before, after), ranks in same.items()
    ]
    return parts.table(["By", "At step", "Before", "After"], rows[:16], numeric=(1,), says="Effects of the order")


def _confirm(summary: str, says: str, button: parts.Node) -> parts.Node:
    """Two steps on purpose: open, read what will happen, then press."""
    return html.Details(
        [html.Summary(summary, className="button"), html.Div([html.P(says), button], className="confirm")]
    )


def _buttons(command: Mapping[str, Any]) -> list[parts.Node]:
    key, state, action = str(command.get("id")), str(command.get("state")), str(command.get("action"))
    known = orders.ACTIONS.get(action)
    found: list[parts.Node] = []
    if state == "proposed":
        says = (
            f"Will {sentence(action, command.get('parameters') or {})}. All ranks vote first; "
            "it is applied at one step boundary on all of them, or on none."
        )
        found.append(
            _confirm(
                "Approve…",
                says,
                parts.button("Approve now", {"type": "order", "do": "approve", "id": key}, tone="primary"),
            )
        )
    if state in {"proposed", "pending"}:
        found.append(parts.button("Cancel", {"type": "order", "do": "cancel", "id": key}))
    if state == "applied" and known and known.undoable:
        found.append(
            _confirm(
                "Undo…",
                "Takes back what this order changed, on every rank.",
                parts.button("Undo now", {"type": "order", "do": "undo", "id": key}, tone="primary"),
            )
        )
    return found


def order(command: Mapping[str, Any]) -> parts.Node:
    """One order: what, why, state, effects, and what can be done with it now."""
    state = str(command.get("state") or "")
    tone, sign = TONES.get(state, ("calm", "·"))
    reason = str(command.get("reason") or "")
    return html.Article(
        [
            html.Div(
                [html.Strong(words.plain(str(command.get("action")))), parts.chip(state, tone, sign)],
                className="title-row",
            ),
            html.P(sentence(str(command.get("action")), command.get("parameters") or {})),
            html.P(reason, className="dim") if reason else "",
            _effects(command.get("results") or []),
            html.Div(_buttons(command), className="tools"),
        ],
        className="order",
    )


def _decision(decision: Mapping[str, Any] | None) -> parts.Node:
    if not decision:
        return html.P("No policy has decided yet.", className="dim")
    chose = str(decision.get("chose") or decision.get("action") or "hold")
    policy = str(decision.get("policy") or "")
    says = str(decision.get("says") or decision.get("why") or decision.get("reason") or "")
    return html.P([html.Strong(f"Policy {policy or 'of the house'}: {words.plain(chose)}. "), says])


def panel(incident: Mapping[str, Any]) -> parts.Node:
    """Advice, decision, orders; an action that nobody ordered yet can be ordered from here."""
    causes = incident.get("causes") or [{}]
    remedy = (causes[0] if causes else {}).get("remedy") or {}
    action = str(remedy.get("action") or "none")
    commands = list(incident.get("commands") or [])
    known = orders.ACTIONS.get(action)
    body: list[parts.Node] = [html.P(str(remedy.get("says") or "No remedy is known."), className="remedy")]
    if known and not any(c.get("action") == action for c in commands):
        parameters = dict(remedy.get("parameters") or {})
        body.append(_dry_run(action, parameters))
        if _complete(action, parameters):
            rank = ((causes[0] if causes else {}).get("subject") or {}).get("rank")
            ranks = [rank] if known.subset and rank is not None else "all"
            body_of = {"action": action, "parameters": parameters, "ranks": ranks}
            key = {"type": "issue", "order": json.dumps(body_of, sort_keys=True)}
            where = "on all ranks of this job" if ranks == "all" else f"on rank {rank} only"
            says = f"Will {sentence(action, parameters)}, {where}."
            body.append(_confirm(f"Order {words.plain(action)}…", says, parts.button("Order now", key, tone="primary")))
    body += [_decision(incident.get("decision")), *(order(c) for c in commands)]
    return parts.panel("What to do", body)


def _complete(action: str, parameters: Mapping[str, Any]) -> bool:
    try:
        orders.check_parameters(action, parameters)
    except CommandRefused:
        return False
    return True


def _dry_run(action: str, parameters: Mapping[str, Any]) -> parts.Node:
    """What the order would be, checked against its bounds, with nothing sent."""
    known = orders.ACTIONS[action]
    try:
        orders.check_parameters(action, parameters)
        bounds = "within the bounds of this action"
    except CommandRefused as error:
        bounds = str(error)
    rows = {
        "action": words.plain(action),
        "does": sentence(action, parameters),
        "where": "on every rank, at one step boundary"
        if known.where == "trainer"
        else "by the launcher, around the job",
        "changes what is learned": "yes" if known.numerics else "no",
        "can be undone": "yes" if known.undoable else "no",
        "check": bounds,
    }
    return html.Details([html.Summary("Dry run: what would be sent"), parts.facts(rows)])
