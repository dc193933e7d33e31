"""Callbacks of the plots: drawing, zooming, picking a cell, an edge's ground, CSV."""

from __future__ import annotations

import json
from typing import Any

from dash import ALL, MATCH, ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update

from lanterne.dashboard import export, words
from lanterne.dashboard.callbacks import browser, now, route, triggered
from lanterne.dashboard.client import Api, ApiError
from lanterne.dashboard.figures import bars, heat
from lanterne.dashboard.pages import incident, job, ranks
from lanterne.dashboard.view import job_url, parse

Marks = list[dict[str, Any]] | None


def register(app: Dash, api: Api) -> None:
    """Hang the plots' callbacks on the app."""
    _register_drawing(app, api)
    _register_times(app, api)
    _register_zoom(app)
    _register_picking(app, api)
    _register_csv(app, api)
    _register_trace(app, api)


def _job_of(pathname: str | None) -> str | None:
    at = route(pathname)
    return at[1] if len(at) >= 2 and at[0] == "jobs" else None


def _register_drawing(app: Dash, api: Api) -> None:
    @app.callback(
        Output("heat", "figure"),
        Input("heat-view", "data"),
        Input("job-mark", "data"),
        State("job-events", "data"),
        State("url", "search"),
        State("url", "pathname"),
    )
    async def draw_heat(_view: Any, _mark: Any, marks: Marks, search: str | None, pathname: str | None) -> Any:
        name = _job_of(pathname)
        if name is None:
            return no_update
        try:
            return await job.heat_figure(api, name, parse(search), marks or ())
        except ApiError as error:
            return heat.nothing(error.detail or error.title)

    @app.callback(
        Output({"type": "curve", "name": MATCH}, "figure"),
        Input({"type": "curve-view", "name": MATCH}, "data"),
        Input("job-mark", "data"),
        State("job-events", "data"),
        State("url", "search"),
        State("url", "pathname"),
        State({"type": "curve", "name": MATCH}, "id"),
    )
    async def draw_curve(
        _view: Any, _mark: Any, marks: Marks, search: str | None, pathname: str | None, key: dict[str, str]
    ) -> Any:
        name = _job_of(pathname)
        if name is None:
            return no_update
        try:
            return await job.curve_figure(api, name, key["name"], parse(search), marks or ())
        except ApiError as error:
            return heat.nothing(error.detail or error.title)


def _register_times(app: Dash, api: Api) -> None:
    @app.callback(Output("time", "figure"), Input("job-mark", "data"), State("url", "pathname"))
    async def draw_time(_mark: str | None, pathname: str | None) -> Any:
        name = _job_of(pathname)
        if name is None:
            return no_update
        try:
            return bars.goodput(await api.get("jobs", name, "sla"))
        except ApiError as error:
            return heat.nothing(error.detail or error.title, 120)

    @app.callback(
        Output("phases", "figure"),
        Input("job-mark", "data"),
        Input("span-view", "data"),
        State("url", "search"),
        State("url", "pathname"),
    )
    async def draw_phases(mark: str | None, _view: Any, search: str | None, pathname: str | None) -> Any:
        name = _job_of(pathname)
        if name is None:
            return no_update
        try:
            return await job.phases_figure(api, name, parse(search), mark)
        except ApiError as error:
            return heat.nothing(error.detail or error.title)

    @app.callback(Output("ranks-live", "children"), Input("job-mark", "data"), State("url", "pathname"))
    async def draw_ranks(_mark: str | None, pathname: str | None) -> Any:
        name = _job_of(pathname)
        if name is None:
            return no_update
        try:
            return await ranks.first(api, name, now())
        except ApiError as error:
            return html.P(error.detail or error.title, className="dim")


def _register_zoom(app: Dash) -> None:
    browser(
        app,
        ClientsideFunction(namespace="lanterne", function_name="views"),
        Input("url", "search"),
        State({"type": "curve-view", "name": ALL}, "id"),
    )
    browser(
        app,
        ClientsideFunction(namespace="lanterne", function_name="zoom"),
        Output("url", "search", allow_duplicate=True),
        Input("heat", "relayoutData"),
        Input({"type": "curve", "name": ALL}, "relayoutData"),
        Input("reset-zoom", "n_clicks"),
        State("url", "search"),
        prevent_initial_call=True,
    )


def _register_picking(app: Dash, api: Api) -> None:
    @app.callback(
        Output("picked", "children"),
        Input("heat", "clickData"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    async def pick(click: dict[str, Any] | None, pathname: str | None, search: str | None) -> Any:
        """A click selects and does not navigate: the double click that resets a zoom sends two clicks."""
        name = _job_of(pathname)
        if not click or name is None:
            return no_update
        point = click["points"][0]
        rank, step, found = round(point["y"]), round(point["x"]), point.get("z")
        try:
            rank, step, found = await job.worst_in_cell(api, name, parse(search), rank, step) or (rank, step, found)
        except ApiError:
            pass  # the cell as it was drawn, then
        value = words.milliseconds(found)
        return [
            html.Strong(f"rank {rank}, step {step:,}: {value}"),
            " · ",
            dcc.Link("open the step", href=job_url(name, "steps", step)),
            " · ",
            dcc.Link("open the rank", href=job_url(name, "ranks", rank)),
        ]

    @app.callback(Output("edge-says", "children"), Input("graph", "tapEdgeData"), prevent_initial_call=True)
    async def edge(found: dict[str, Any] | None) -> Any:
        return incident.edge_sentence(found) if found else no_update


def _register_trace(app: Dash, api: Api) -> None:
    @app.callback(
        Output("download", "data", allow_duplicate=True),
        Input("trace", "n_clicks"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    async def trace(clicks: int, pathname: str | None) -> Any:
        """The step as a Chrome trace, a file for Perfetto."""
        at = route(pathname)
        if not clicks or len(at) != 4 or at[2] != "steps":
            return no_update
        try:
            found = await api.get("jobs", at[1], "timeline", step=at[3])
        except ApiError:
            return no_update
        return {
            "content": json.dumps(found),
            "filename": f"{at[1]}-step-{at[3]}.trace.json",
            "type": "application/json",
        }


def _register_csv(app: Dash, api: Api) -> None:
    @app.callback(
        Output("download", "data"),
        Input({"type": "csv", "of": ALL}, "n_clicks"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    async def csv(_clicks: list[int], pathname: str | None, search: str | None) -> Any:
        pressed, name = triggered(), _job_of(pathname)
        if pressed is None or name is None:
            return no_update
        view, of = parse(search), str(pressed["of"])
        try:
            if of == "heat":
                text = export.heat_csv(await job.heat_answer(api, name, view))
                of = view.heat
            else:
                text = export.curve_csv(await job.curve_answer(api, name, of, view, view.smooth))
        except ApiError:
            return no_update
        return {"content": text, "filename": f"{name}-{of}.csv", "type": "text/csv"}
