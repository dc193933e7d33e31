"""The plots behind an incident's evidence, around its onset: each sentence leads to the series that it speaks of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from lanterne.dashboard import parts, words
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.figures import curves, heat
from lanterne.dashboard.pages.job import HEIGHT, POINTS, WIDTH

Incident = Mapping[str, Any]

MARGIN_STEPS = 60
PLOTS: Mapping[str, Sequence[str]] = {
    "data_stall": ("heat:data_wait_ms", "heat:lateness_ms"),
    "slow_compute": ("heat:lateness_ms", "heat:busy_ms"),
    "rank_hung": ("heat:lateness_ms", "step_ms"),
    "bad_batch": ("training.loss", "training.grad_norm"),
    "lr_misconfigured": ("training.lr", "training.loss"),
    "nonfinite_values": ("training.loss", "training.grad_norm"),
    "fp16_overflow": ("training.loss_scale", "training.grad_norm"),
    "loss_scale_collapse": ("training.loss_scale", "training.loss"),
    "gradient_explosion": ("training.grad_norm", "training.loss"),
    "gradient_vanishing": ("training.grad_norm", "training.loss"),
    "training_instability": ("training.loss", "training.loss_spikeness"),
    "memory_leak": ("process.memory.usage", "hw.gpu.memory.usage"),
    "out_of_memory": ("hw.gpu.memory.usage", "process.memory.usage"),
    "gc_pause": ("heat:lateness_ms", "step_ms"),
    "slow_link": ("heat:wait_ms", "step_ms"),
    "checkpoint_stall": ("step_ms", "heat:lateness_ms"),
    "replica_divergence": ("training.loss", "training.grad_norm"),
}
PLOTS_MAX = 4
REFS: Mapping[str, str] = {"grad_nonfinite": "training.grad_norm", "tokens": "training.tokens", "step_ms": "step_ms"}
"""What an evidence's source is called among the plots, where it is not its own name."""
PER_RANK = {"process.memory.usage", "hw.gpu.memory.usage"}


def first_cause(incident: Incident) -> Mapping[str, Any]:
    """The top cause, or an empty one."""
    causes = incident.get("causes") or ()
    return causes[0] if causes else {}


def plot_of(ref: str) -> str | None:
    """The plot that shows an evidence's source, as :func:`plot` takes it; None for what is no series."""
    if ref in REFS:
        return REFS[ref]
    if ref in heat.TITLES:
        return f"heat:{ref}"
    if ref.endswith("_ms") or ref in curves.LABELS:
        return ref
    return f"training.{ref}" if f"training.{ref}" in curves.LABELS else None


def plots(incident: Incident) -> list[str]:
    """The plots behind the sentences of the verdict, in their order, then those usual for its cause."""
    cause = first_cause(incident)
    named = [plot_of(str(one.get("ref") or "")) for one in cause.get("evidence") or ()]
    usual = PLOTS.get(str(cause.get("category")), ("heat:lateness_ms", "training.loss"))
    return list(dict.fromkeys([*filter(None, named), *usual]))[:PLOTS_MAX]


def anchor(name: str) -> str:
    """The id of a plot's place on the page."""
    return "proof-" + name.replace(":", "-").replace(".", "-")


def window(incident: Incident) -> dict[str, int]:
    """Steps around the onset: enough before it to see what was normal."""
    start = first_cause(incident).get("since_step")
    start = incident.get("opened_step") if start is None else start
    if not isinstance(start, int):
        return {}
    end = incident.get("opened_step")
    last = max(start, end) if isinstance(end, int) else start
    return {"from_step": max(0, start - MARGIN_STEPS), "to_step": last + MARGIN_STEPS}


async def plot(api: Api, incident: Incident, name: str) -> dict[str, Any]:
    """One plot around the onset: ``heat:METRIC``, ``step_ms`` or a metric's name."""
    job = incident.get("job")
    cause = first_cause(incident)
    since = cause.get("since_step")
    marks = [] if since is None else [{"step": since, "says": words.plain(str(cause.get("category", "")))}]
    try:
        if name.startswith("heat:"):
            metric = name.removeprefix("heat:")
            answer = await api.get(
                "jobs", job, "heatmap", metric=metric, width=WIDTH, height=HEIGHT, **window(incident)
            )
            return heat.heatmap(answer, marks)
        aggregate = "none" if name in PER_RANK else "max" if name == "step_ms" else "median"
        answer = await api.get(
            "jobs", job, "metrics", name=name, points=POINTS, reduce="minmax", aggregate=aggregate, **window(incident)
        )
        return curves.curve({**answer, "series": list(answer.get("series") or ())[:16]}, marks=marks)
    except ApiError as error:
        return heat.nothing(error.detail or error.title)


def _plot_title(name: str) -> str:
    return heat.TITLES.get(name.removeprefix("heat:"), "") if name.startswith("heat:") else curves.label(name)


async def proof(api: Api, incident: Incident) -> parts.Node:
    """The plots behind the evidence, around the onset."""
    wanted = plots(incident)
    figures = await asyncio.gather(*(plot(api, incident, n) for n in wanted))
    cells = [
        html.Div(
            [
                html.H3(_plot_title(n)),
                parts.graph({"type": "proof", "name": n}, f, f"{_plot_title(n)} around the onset", 200),
            ],
            className="cell",
            id=anchor(n),
        )
        for n, f in zip(wanted, figures, strict=True)
    ]
    return parts.panel("The proof, around the onset", html.Div(cells, className="grid"))
