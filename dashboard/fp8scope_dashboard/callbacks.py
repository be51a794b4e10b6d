"""Server callbacks: answer what a page asks. All are async: a blocking one would stop every page.

A page asks through its `ask-*` store (assets/shell.js) and gets `done-*` back with the same number. A
failing collector is an answer too: the old content stays, `problem` goes to the banner.
"""

import asyncio
from typing import Any

import msgspec
from dash import Dash, Input, Output, State, no_update

from fp8scope_dashboard import panels, runs_page
from fp8scope_dashboard.client import Collector, CollectorError, Refused
from fp8scope_dashboard.probe_panel import probe
from fp8scope_dashboard.scene import CURVE_POINTS, picture_query, scene_of
from fp8scope_dashboard.view import Choices, View, fit, parse_view
from fp8scope_protocol.commands import FINAL_STATES, Command, SetPrecision
from fp8scope_protocol.documents import LayerDocument, RunDocument, SeriesDocument
from fp8scope_protocol.metrics import METRICS

WORST_SHOWN = 10
EVENTS_SHOWN = 200
REASON_LIMIT = 200
NOT_FOUND = 404

Answer = dict[str, Any]

RUN_OUTPUTS = {
    "crumb": Output("crumb", "children"), "empty": Output("run-empty", "children"),
    "body_hidden": Output("run-body", "hidden"), "strip": Output("strip", "children"),
    "definition": Output("definition", "children"),
    "scene": Output("scene", "data"), "shown": Output("shown", "data"),
    "summary": Output("summary", "children"),
    "layer_info": Output("layer-info", "children"), "layer_note": Output("layer-note", "children"),
    "to_bf16_off": Output("to-bf16", "disabled"), "to_fp8_off": Output("to-fp8", "disabled"),
    "commands": Output("commands", "children"), "layers": Output("layers", "children"),
    "events": Output("events", "children"), "worst": Output("worst", "children"),
    "probe": Output("probe", "children"),
    "worst_note": Output("worst-note", "children"), "done": Output("done-run", "data"),
}
UNCHANGED: Answer = dict.fromkeys(RUN_OUTPUTS, no_update)


def add_callbacks(app: Dash, collector: Collector) -> None:
    """Register everything that the pages ask of this server."""

    @app.callback(
        Output("runs-table", "children"), Output("runs-count", "children"), Output("done-runs", "data"),
        Input("ask-runs", "data"), prevent_initial_call=True)
    async def list_runs(ask: dict[str, Any]) -> tuple[Any, Any, Any]:
        try:
            runs = await collector.runs()
        except CollectorError as error:
            return no_update, no_update, {"n": ask["n"], "problem": str(error)}
        active = sum(run.active for run in runs)
        words = f"{len(runs)} in all, {active} active" if runs else ""
        return runs_page.table(runs), words, {"n": ask["n"], "problem": ""}

    @app.callback(output=RUN_OUTPUTS, inputs=[Input("ask-run", "data")], prevent_initial_call=True)
    async def show_run(ask: dict[str, Any]) -> Answer:
        run, view = str(ask["run"]), parse_view(str(ask["query"]))
        problem = ""
        try:
            answer = await answer_run(collector, run, view, str(ask["theme"]))
        except CollectorError as error:
            if isinstance(error, Refused) and error.status == NOT_FOUND:
                answer = _nothing(f"Run {run} cannot be shown", str(error)) | {"crumb": run}
            else:
                answer, problem = UNCHANGED, str(error)
        return answer | {"done": {"n": ask["n"], "run": run, "problem": problem}}

    @app.callback(
        Output("confirm-problem", "children"), Output("nudge", "data"),
        Input("confirm-yes", "n_clicks"), State("wish", "data"), State("reason", "value"),
        prevent_initial_call=True)
    async def send_command(clicks: int, wish: dict[str, str], reason: str | None) -> tuple[Any, Any]:
        try:
            action = msgspec.convert(
                {"modules": [wish["layer"]], "precision": wish["precision"]}, type=SetPrecision)
            command = await collector.send(wish["run"], action, (reason or "").strip()[:REASON_LIMIT])
        except (CollectorError, msgspec.ValidationError) as error:
            return f"Not sent: {error}", no_update
        return "", {"command": command.id, "clicks": clicks}


async def answer_run(collector: Collector, run: str, view: View, theme: str) -> Answer:
    """Everything on a run page. Raises `CollectorError`."""
    document, series, layers, events, commands = await asyncio.gather(
        collector.run(run), collector.series(run), collector.layers(run),
        collector.events(run, {"limit": EVENTS_SHOWN}), collector.commands(run))
    depth = {one.module: one.depth for one in reversed(series)}
    layers.sort(key=lambda layer: depth.get(layer.name, len(depth)))
    view, choices = fit(view, series)
    always = {
        "crumb": document.name, "strip": panels.strip(document),
        "commands": panels.commands(commands), "events": panels.events(events),
        **_layer_part(document, layers, commands, view), "shown": _shown(view, choices, layers),
    }
    if not series:
        return UNCHANGED | _nothing(
            "Nothing is measured yet",
            "The run is known, its first sampled step has not arrived. This page fills itself.") | always
    steps = view.steps(document.last_step)
    query = picture_query(view, steps, theme, _rows(view, series))
    picture, curve, worst = await asyncio.gather(
        collector.heatmap(run, query), collector.steps(run, {**steps, "points": CURVE_POINTS}),
        collector.worst(run, {"metric": view.metric, "role": view.role, "n": WORST_SHOWN}))
    metric = METRICS[view.metric]
    return always | {
        "empty": [], "body_hidden": False, "definition": f"{metric.definition} [{metric.unit}]",
        "scene": scene_of(run, view, query, picture, curve, events, layers),
        "summary": picture.summary, "worst": panels.worst(worst),
        "probe": probe(document, curve.columns.get("overhead_ratio", []), events),
        "worst_note": f"{view.metric} of {view.role}s, newest samples".replace("_", " "),
    }


def _rows(view: View, series: list[SeriesDocument]) -> int:
    return sum(one.role == view.role and one.orientation == view.orientation and one.format == view.format
               for one in series)


def _nothing(title: str, text: str) -> Answer:
    """An empty state in place of the page's body."""
    return UNCHANGED | {"empty": panels.nothing(title, text), "body_hidden": True, "strip": [], "scene": None}


def _layer_part(
    run: RunDocument, layers: list[LayerDocument], commands: list[Command], view: View
) -> Answer:
    chosen = next((layer for layer in layers if layer.name == view.layer), None)
    note = panels.switch_note(run, chosen)
    # While a command is under way either may be wanted next.
    pending = any(view.layer in one.action.modules and one.state not in FINAL_STATES for one in commands)
    running = None if chosen is None or pending else chosen.running
    return {
        "layer_info": panels.layer_info(chosen, view), "layer_note": note,
        "to_bf16_off": bool(note) or running in ("bf16", "shadow"),
        "to_fp8_off": bool(note) or running == "fp8", "layers": panels.layers(layers, view),
    }


def _shown(view: View, choices: Choices, layers: list[LayerDocument]) -> dict[str, Any]:
    """The view as it is shown, and what the controls offer. The page sets its controls by it.

    They are no outputs of the callback: Dash would hold a person's change back until a running answer is
    there, and then overwrite it.
    """
    return {
        "metric": view.metric, "role": view.role, "orientation": view.orientation, "format": view.format,
        "window": "" if view.zoomed else view.window, "layer": view.layer,
        "options": {
            "role": _options(choices.roles), "orientation": _options(choices.orientations),
            "format": _options(choices.formats),
            "layer": [{"label": layer.name, "value": layer.name} for layer in layers],
        },
    }


def _options(names: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"label": name.replace("_", " "), "value": name} for name in names]
