"""A report for people: the verdict first, then its proof. Machines get ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lanterne.nouns import LEDGER


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "ms" and abs(value) < 1e-3:  # a millionth of a second is below every clock's error
        value = 0.0
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def _subject(subject: dict[str, Any]) -> str:
    named = [f"{k} {v}" for k, v in subject.items() if v is not None]
    return ", ".join(named) or "the whole job"


def _cause(console: Console, number: int, cause: dict[str, Any]) -> None:
    since = cause.get("since_step")
    head = Text(f"{number}. {cause['category']} — {_subject(cause['subject'])}", style="bold")
    if since is not None:
        head.append(f", since step {since}")
    head.append(f"   confidence {cause['confidence']:.2f}", style="dim")
    console.print(head)
    cost = {k: v for k, v in (cause.get("cost") or {}).items() if v is not None}
    if cost.get("slowdown"):
        line = f"   cost: {cost['slowdown']:.2f}x step time"
        if cost.get("gpu_hours") is not None:
            line += f", {cost['gpu_hours']:.3g} GPU-hours so far"
        console.print(Text(line))
    for item in cause.get("evidence", []):
        text = f"   • {item['says']}"
        if item.get("baseline") is not None and item.get("value") is not None:
            text += f"  [{_number(item['value'], item['unit'])} against {_number(item['baseline'], item['unit'])}]"
        console.print(Text(text))
    for need in cause.get("needs") or []:
        console.print(Text(f"   ? would settle it: {need}", style="yellow"))
    remedy = cause.get("remedy") or {}
    if remedy.get("says"):
        console.print(Text(f"   → {remedy['says']} ({remedy['action']})", style="green"))


def _ledger(console: Console, ledger: dict[str, str]) -> None:
    """The stamps of an incident in their order, each with the time since the first."""
    if not ledger:
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 3))
    stamps = sorted((datetime.fromisoformat(at), LEDGER.index(name), name) for name, at in ledger.items())
    first = stamps[0][0]
    for at, _, name in stamps:
        since = f"+{(at - first).total_seconds():.1f} s" if at > first else ""
        table.add_row(Text(name, style="dim"), Text(f"{at:%Y-%m-%d %H:%M:%S}"), Text(since))
    console.print(table)


NOTES_MAX = 20


def ranges(numbers: Sequence[int]) -> str:
    """Ascending ranks, runs drawn together: ``0, 4-7``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    shown = ["-".join(map(str, run)) for run in runs[:NOTES_MAX]]
    return ", ".join(shown) + (", …" if len(runs) > NOTES_MAX else "")


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print a report (the JSON form of :class:`lanterne.nouns.Report`) to ``console``."""
    healthy = report.get("healthy", False)
    answer = Text(report.get("verdict", "no verdict"), style="bold")
    first = next((c for i in report.get("incidents", []) for c in i.get("causes", [])), None)
    if first and (first.get("remedy") or {}).get("says"):
        answer.append(f"\n→ {first['remedy']['says']}", style="green")
    console.print(Panel(answer, border_style="green" if healthy else "red"))
    for incident in report.get("incidents", []):
        console.print(
            Text(f"{incident['severity']} {incident['kind']} · {incident['status']} · {incident['id']}", style="cyan")
        )
        for number, cause in enumerate(incident.get("causes", []), 1):
            _cause(console, number, cause)
        symptoms = incident.get("symptoms", [])
        for symptom in symptoms[:8]:
            console.print(Text(f"   symptom: {symptom['says']}", style="dim"))
        if len(symptoms) > 8:
            console.print(Text(f"   … and {len(symptoms) - 8} more symptoms (see --json)", style="dim"))
        _ledger(console, incident.get("ledger") or {})
    for breaker in report.get("breakers") or []:
        why = f": {breaker['why']}" if breaker["why"] else ""
        console.print(Text(f"breaker of group {breaker['group']}: {breaker['state']}{why}", style="yellow"))
    for rule in report.get("rules") or []:
        console.print(Text(f"rule {rule['rule']} is broken: {rule['says']}", style="yellow"))
    quality = report.get("quality") or {}
    line = f"{report.get('ranks_seen', 0)} of {report.get('ranks_expected', 0)} ranks seen"
    if quality.get("missing_ranks"):
        line += f"; missing {ranges(quality['missing_ranks'])}"
    if quality.get("dropped_events"):
        line += f"; {quality['dropped_events']} events dropped"
    if quality.get("clock_error_ns") is not None:
        line += f"; clocks within ±{quality['clock_error_ns'] / 1000:.0f} µs"
    console.print(Text(line, style="dim"))
    notes = quality.get("notes") or []
    for note in notes[:NOTES_MAX]:
        console.print(Text(f"note: {note}", style="dim"))
    if len(notes) > NOTES_MAX:
        console.print(Text(f"… and {len(notes) - NOTES_MAX} more notes (see --json)", style="dim"))


def print_sla(body: dict[str, Any], console: Console) -> None:
    """Print the SLA answer of the API: objectives, then where the time went."""
    table = Table("objective", "level", "target", "value", "burn rate", "met")
    for row in body.get("objectives", []):
        value, burn = row.get("value"), row.get("burn_rate")
        table.add_row(
            str(row.get("name")), str(row.get("level") or ""), str(row.get("target")),
            "not measured" if value is None else f"{value:.4g}", "" if burn is None else f"{burn:.2f}",
            {True: "yes", False: "NO", None: "?"}[row.get("met")],
        )  # fmt: skip
    console.print(table)
    if body.get("jobs") is not None:
        console.print(f"{body['jobs']} jobs, {body.get('gpu_hours') or 0.0:,.1f} GPU-hours")
    goodput = body.get("goodput") or {}
    if goodput.get("productive_s") is not None:
        console.print(f"productive {goodput['productive_s']:,.0f} s")
    for cause, seconds in sorted((goodput.get("badput") or {}).items(), key=lambda kv: -kv[1]):
        console.print(f"lost to {cause}: {seconds:,.0f} s")
    for name, says in (("mtbf_s", "between failures"), ("mttr_s", "to recover")):
        if body.get(name) is not None:
            console.print(f"mean time {says}: {body[name]:,.1f} s")
    for alert in body.get("alerts") or []:
        console.print(f"{alert['action']}: the budget of {alert['objective']} burns at {alert['burn_rate']:.1f}x")
    for note in body.get("notes") or []:
        console.print(f"note: {note}", style="dim")
