"""The few building blocks that every page is made of. Plain HTML: no component library beside Dash's own."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dash import dcc, html
from plotly.io.json import to_json_plotly

from lanterne.dashboard import theme
from lanterne.dashboard.client import ApiError
from lanterne.dashboard.words import clock, day_and_clock, plain

Node = Any

STATES: Mapping[str, tuple[str, str]] = {
    "running": ("good", "▶"),
    "finished": ("calm", "✓"),
    "failed": ("bad", "✕"),
    "hung": ("bad", "■"),
    "silent": ("warn", "…"),
}
SEVERITIES: Mapping[str, str] = {"P0": "bad", "P1": "warn", "P2": "info"}
STATUSES: Mapping[str, tuple[str, str]] = {
    "open": ("bad", "●"),
    "diagnosed": ("warn", "◉"),
    "acting": ("info", "▶"),
    "verifying": ("info", "◔"),
    "resolved": ("good", "✓"),
    "dismissed": ("calm", "–"),
}


def aria(**found: str) -> dict[str, Any]:
    """Accessibility attributes: ``aria(label="x")`` is ``aria-label="x"``."""
    return {f"aria-{name}": value for name, value in found.items()}


def ago(moment: Any, *, since: bool = False) -> Node:
    """A moment whose age the browser counts, so that a second passing changes nothing on the server's side.

    ``since`` shows ``5 min`` instead of ``5 min ago``.
    """
    kind = "ago since" if since else "ago"
    return html.Time(clock(moment), dateTime=str(moment or ""), title=day_and_clock(moment), className=kind)


def digest(body: Node) -> int:
    """A number that changes with what is shown: the live regions send only what differs."""
    return zlib.crc32(to_json_plotly(body).encode())


def chip(text: str, tone: str = "calm", sign: str = "") -> Node:
    """A small label; a sign stands beside the colour, so that colour is never the only carrier."""
    inner: Node = [html.Span(sign, className="sign", **aria(hidden="true")), text] if sign else text
    return html.Span(inner, className=f"chip tone-{tone}")


def state_chip(state: str) -> Node:
    """A job's or rank's state."""
    tone, sign = STATES.get(state, ("calm", "·"))
    return chip(state or "unknown", tone, sign)


def status_chip(status: str) -> Node:
    """An incident's place in its life."""
    tone, sign = STATUSES.get(status, ("calm", "·"))
    return chip(status or "unknown", tone, sign)


def severity_chip(severity: str) -> Node:
    """P0, P1 or P2."""
    return chip(severity or "–", SEVERITIES.get(severity, "calm"))


def tile(label: str, value: Node, note: Node = "", tone: str = "") -> Node:
    """One number that matters, its name above and its ground below."""
    return html.Div(
        [html.Dt(label), html.Dd(value, className="value"), html.Dd(note, className="note")],
        className=f"tile {tone and 'edge-' + tone}".strip(),
    )


def tiles(found: Sequence[Node]) -> Node:
    """A row of tiles."""
    return html.Dl(list(found), className="tiles")


def panel(title: str, body: Node, *, tools: Node = None, note: Node = "", key: str = "", className: str = "") -> Node:  # noqa: N803
    """A titled section. ``key`` becomes its anchor."""
    head = [html.H2(title), html.Span(note, className="note"), html.Div(tools, className="tools")]
    attributes: dict[str, Any] = {"id": key} if key else {}
    return html.Section(
        [html.Header(head), html.Div(body, className="body")], className=f"panel {className}", **attributes
    )


def graph(key: Any, figure: Mapping[str, Any] | None, says: str, height: int | None = None) -> Node:
    """A plot with the one configuration and an accessible name. ``figure`` None waits for its callback."""
    empty = {
        "data": [],
        "layout": theme.layout(height=height or 200, xaxis={"visible": False}, yaxis={"visible": False}),
    }
    style = {"minHeight": f"{height}px"} if height else {}
    config: Any = dict(theme.CONFIG)
    plot = dcc.Graph(id=key, figure=figure or empty, config=config, style=style, className="plot")
    return html.Div(plot, role="figure", **aria(label=says))


def table(head: Sequence[Node], rows: Iterable[Sequence[Node]], *, numeric: Iterable[int] = (), says: str = "") -> Node:
    """A table; ``numeric`` columns are right-aligned, ``says`` is its caption for screen readers and its file's name.

    The browser's own script saves what it shows as CSV.
    """
    right = set(numeric)
    kinds = ["num" if i in right else "" for i in range(len(head))]
    top = html.Thead(html.Tr([html.Th(h, className=k, scope="col") for h, k in zip(head, kinds, strict=True)]))
    body = [html.Tr([html.Td(c, className=k) for c, k in zip(row, kinds, strict=True)]) for row in rows]
    caption = [html.Caption(says, className="unseen")] if says else []
    region = html.Div(
        html.Table([*caption, top, html.Tbody(body)]),
        className="scroll",
        tabIndex=0,
        role="region",
        **aria(label=says),
    )
    save = html.Button("CSV", type="button", className="button save", title=f"save as CSV: {says or 'this table'}")
    return html.Div([region, save], className="tabled")


def control(key: str, default: str, options: Sequence[tuple[str, str]], value: str, says: str) -> Node:
    """A row of choices whose value lives in the URL under ``key``; the default leaves no trace there.

    Plain buttons that the browser's own script answers: a choice changes the address and asks the server nothing else.
    """
    buttons = []
    for v, text in options:
        marks: dict[str, Any] = {"data-key": key, "data-default": default, "data-value": v}
        pressed = aria(pressed="true" if v == value else "false")
        buttons.append(html.Button(text, type="button", className="segment", **marks, **pressed))
    return html.Div(buttons, className="segments", role="group", **aria(label=says))


def field(key: str, value: Any, says: str, *, kind: Any = "text", default: str = "", **more: Any) -> Node:
    """A text, number or range input whose value lives in the URL under ``key``."""
    entry = dcc.Input(
        id={"type": "control", "key": key, "default": default}, value=value, type=kind, debounce=0.25, **more
    )
    return html.Label([html.Span(says, className="label"), entry], className="control field")


def button(text: str, key: Any, *, tone: str = "", **more: Any) -> Node:
    """A push button."""
    return html.Button(text, id=key, type="button", n_clicks=0, className=f"button {tone}".strip(), **more)


def empty(title: str, body: Node) -> Node:
    """An empty state that says what to do."""
    return html.Div(
        [html.Div(className="lamp", **aria(hidden="true")), html.H2(title), html.Div(body)], className="empty"
    )


def attach_help(base: str) -> Node:
    """How to attach a job, with this server's address filled in."""
    endpoint = base or "http://127.0.0.1:4318"
    return html.Div(
        [
            html.P("Nothing to change in the code: start the job through Lanterne."),
            html.Pre(
                html.Code(f"LANTERNE_ENDPOINT={endpoint} \\\n  lanterne run -- torchrun --nproc-per-node 4 train.py")
            ),
            html.P("Or two lines in the training loop, which also give the loss and every phase:"),
            html.Pre(
                html.Code(
                    "import lanterne\n"
                    "session = lanterne.attach(model, optimizer)\n"
                    "for batch in session.steps(loader):\n"
                    "    ...\n"
                    "    session.log(loss=loss)"
                )
            ),
            html.P(["No job at hand? ", html.Code("lanterne demo"), " runs one with a real fault in it."]),
        ],
        className="attach",
    )


def failure(error: ApiError) -> Node:
    """What the API refused, in words, with the way out."""
    if error.status in {401, 403}:
        return empty(
            "Sign in to see this",
            [
                html.P(error.detail or "This server asks for a token with scope read."),
                html.P(dcc.Link("Enter a token in the settings", href="/settings", className="button primary")),
            ],
        )
    if error.status == 404:
        return empty(
            "Nothing here by this name", [html.P(error.detail or error.title), html.P(dcc.Link("All jobs", href="/"))]
        )
    return html.Div(
        [
            html.Strong(error.title or "The request failed"),
            html.Span(f" {error.detail}"),
            html.Span(" It is asked again by itself."),
        ],
        className="alert tone-bad",
        role="alert",
    )


def crumbs(*parts: tuple[str, str]) -> Node:
    """The way from the fleet to here; the last part is this page."""
    found: list[Node] = []
    for text, href in parts[:-1]:
        found += [dcc.Link(text, href=href), html.Span("/", className="slash", **aria(hidden="true"))]
    found.append(html.Span(parts[-1][0], **aria(current="page")))
    return html.Nav(found, className="crumbs", **aria(label="breadcrumb"))


def facts(pairs: Mapping[str, Node]) -> Node:
    """Names and values in two columns."""
    rows = [html.Div([html.Dt(plain(k)), html.Dd(v)]) for k, v in pairs.items()]
    return html.Dl(rows, className="facts")
