"""An incident as a file that can be mailed: Markdown, and CSV of what a plot shows. Pure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lanterne.dashboard import words
from lanterne.dashboard.figures import heat


def _line(text: Any) -> str:
    """One line of Markdown with nothing in it that Markdown or HTML would act on."""
    flat = " ".join(str(text).split())
    return "".join("\\" + c if c in "\\`*_[]<>|#" else c for c in flat)


def _cause(number: int, cause: Mapping[str, Any]) -> list[str]:
    found = [
        "",
        f"## {number}. {_line(words.plain(str(cause.get('category'))))}: {_line(words.subject(cause.get('subject')))}",
        "",
        f"Confidence {words.percent(cause.get('confidence'), 0)}, since step {words.number(cause.get('since_step'))}.",
    ]
    evidence = cause.get("evidence") or ()
    if evidence:
        found += ["", "| evidence | value | baseline | from |", "| --- | ---: | ---: | --- |"]
    for one in evidence:
        unit = str(one.get("unit") or "")
        cells = [
            one.get("says"),
            words.with_unit(one.get("value"), unit),
            words.with_unit(one.get("baseline"), unit),
            one.get("ref"),
        ]
        found.append("| " + " | ".join(_line(c or "") for c in cells) + " |")
    needs = cause.get("needs") or ()
    found += ["", "What would settle it:", *(f"- {_line(n)}" for n in needs)] if needs else []
    remedy = cause.get("remedy") or {}
    if remedy.get("says"):
        found += ["", f"Remedy ({_line(remedy.get('action'))}): {_line(remedy['says'])}"]
    return found


def markdown(incident: Mapping[str, Any]) -> str:
    """The incident as Markdown: verdict, ledger, causes with evidence, symptoms, orders."""
    ledger = incident.get("ledger") or {}
    lines = [
        f"# {_line(words.headline(incident))}",
        "",
        f"Job {_line(incident.get('job'))}, incident {_line(incident.get('id'))}, "
        f"{_line(incident.get('severity'))}, {_line(incident.get('status'))}.",
        "",
        "| moment | UTC |",
        "| --- | --- |",
        *(f"| {name} | {words.day_and_clock(at)} |" for name, at in ledger.items()),
    ]
    for number, cause in enumerate(incident.get("causes") or (), start=1):
        lines += _cause(number, cause)
    symptoms = incident.get("symptoms") or ()
    if symptoms:
        lines += ["", "## Who suffers", ""]
        lines += [
            f"- {_line(words.subject(s.get('subject')))}: {_line(s.get('says') or s.get('kind'))}" for s in symptoms
        ]
    commands = incident.get("commands") or ()
    if commands:
        lines += ["", "## Orders", ""]
        lines += [
            f"- {_line(c.get('action'))} {_line(c.get('parameters') or '')}: {_line(c.get('state'))}" for c in commands
        ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> Any:
    """A cell that a spreadsheet will not run as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t"} else value


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV (RFC 4180)."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(head)
    writer.writerows([_cell("" if v is None else v) for v in row] for row in rows)
    return out.getvalue()


def curve_csv(answer: Mapping[str, Any]) -> str:
    """A curve's points, one a line: series, step, time, value."""
    rows = [
        [one.get("rank"), one.get("label"), step, time, value]
        for one in answer.get("series") or ()
        for step, time, value in zip(one["step"], one["time"], one["value"], strict=True)
    ]
    return table(["rank", "label", "step", "time", str(answer.get("name"))], rows)


def heat_csv(answer: Mapping[str, Any]) -> str:
    """A heat map's cells: one row a rank, one column a step."""
    cells = heat.matrix(answer).astype(float).round(4).tolist()
    rows = [
        [rank, *(None if math.isnan(v) else v for v in row)]
        for rank, row in zip(answer.get("ranks") or (), cells, strict=True)
    ]
    return table(["rank", *(str(s) for s in answer.get("steps") or ())], rows)
