"""Contents of the run page's panels, from the collector's documents.

Names come from training jobs: they are shown as text, put into `data-layer` attributes that scope.js
reads, and never into component ids or markup.
"""

from collections.abc import Sequence
from typing import Any

from dash import dcc, html

from fp8scope_dashboard.markup import aria, data
from fp8scope_dashboard.runs_page import health_chip
from fp8scope_dashboard.view import View
from fp8scope_dashboard.wording import EVENT_GLYPHS, ago, count, event_look, in_bf16, number, precision
from fp8scope_protocol.commands import Command
from fp8scope_protocol.documents import (
    EventDocument,
    LayerDocument,
    RunDocument,
    SeriesDocument,
    WorstDocument,
)

COMMANDS_SHOWN = 8
STATE_WORDS = {"queued": "waiting for the job to ask", "delivered": "the job has it", "applied": "applied",
               "rejected": "rejected", "expired": "expired"}


def strip(run: RunDocument) -> list[Any]:
    """The run at a glance."""
    lost = sum(run.lost.values())
    return [
        html.Div(className="tile name", children=[html.H1(run.name), health_chip(run)]),
        _tile("Step", "–" if run.last_step is None else count(run.last_step)),
        _tile("Loss", number(run.loss)),
        _tile("Layers in BF16", f"{run.layers_in_bf16} / {run.layers}", "bf16" if run.layers_in_bf16 else ""),
        _tile("Alerts firing", str(run.firing), "bad" if run.firing else ""),
        _tile("Lost batches", count(lost), "warn" if lost else ""),
        _tile("Sampled", f"every {run.every}" if run.every > 1 else "every step"),
        _tile("Attempt", str(len(run.attempts)) if run.attempts else "–"),
        _tile("Last seen", ago(run.last_seen_at)),
    ]


def _tile(label: str, value: str, state: str = "") -> Any:
    return html.Div(className="tile", children=[
        html.Span(label, className="tile-label"), html.Span(value, className=f"tile-value {state}"),
    ])


def layer_info(layer: LayerDocument | None, view: View) -> list[Any]:
    """The chosen layer's precision."""
    if layer is None:
        words = "No layer is chosen." if not view.layer else f"This run has no layer called {view.layer}."
        return [html.P(words, className="muted")]
    since = "since the start" if layer.since_step is None else f"since step {count(layer.since_step)}"
    return [
        html.P(className="precision-line",
               children=[_precision_chip(layer), html.Span(since, className="muted")]),
        *([html.P(layer.reason, className="muted small")] if layer.reason else []),
    ]


def switch_note(run: RunDocument, layer: LayerDocument | None) -> str:
    """Why the buttons cannot be used, or ""."""
    if not run.remote_control:
        return ("This run does not take commands: it was started without remote_control=True in "
                "fp8scope.attach().")
    if layer is None:
        return "Choose a layer first: on the map, in the table of worst tensors or in the box above."
    if not layer.switchable:
        return f"This layer cannot be switched: {layer.reason or 'the probe found no FP8 module in it'}."
    return ""


def layers(documents: Sequence[LayerDocument], view: View) -> Any:
    """Every layer's precision; those in BF16 first."""
    if not documents:
        return html.P("The probe has named no layers.", className="muted")
    ordered = sorted(documents, key=lambda layer: not in_bf16(layer))
    return html.Ul(className="layers", children=[html.Li(_layer_row(layer, view)) for layer in ordered])


def _layer_row(layer: LayerDocument, view: View) -> Any:
    chosen = layer.name == view.layer
    return html.Button(
        type="button", className="layer-row" + (" chosen" if chosen else ""),
        title=layer.reason or layer.name, **data(layer=layer.name), **aria(pressed=str(chosen).lower()),
        children=[html.Span(layer.name, className="ellipsis"), _precision_chip(layer, short=True)])


def _precision_chip(layer: LayerDocument, *, short: bool = False) -> Any:
    words = precision(layer.running)
    return html.Span(words.partition(",")[0] if short else words, title=words,
                     className="chip " + ("bf16" if in_bf16(layer) else "fp8"))


def worst(documents: Sequence[WorstDocument]) -> Any:
    """The worst series of the metric in the newest samples."""
    if not documents:
        return html.P("Nothing was measured for this choice.", className="muted")
    ranks = any(one.rank is not None for one in documents)
    numbers = ("Step", "Value", "Limit", *(["Worst rank"] if ranks else []))
    head = html.Tr([html.Th("Tensor", scope="col"), html.Th("Orientation", scope="col"),
                    *(html.Th(name, scope="col", className="number") for name in numbers)])
    return html.Table(className="list compact", children=[
        html.Thead(head), html.Tbody([_worst_row(one, ranks=ranks) for one in documents]),
    ])


def _worst_row(one: WorstDocument, *, ranks: bool) -> Any:
    over = isinstance(one.value, str) or (
        one.limit is not None and one.value is not None and one.value > one.limit)
    return html.Tr([
        html.Th(_series_name(one.series), scope="row"),
        html.Td(one.series.orientation, className="muted"),
        html.Td(count(one.step), className="number muted"),
        html.Td([html.Span("▲ ", className="bad-text", title="over the limit") if over else "",
                 number(one.value)], className="number"),
        html.Td("–" if one.limit is None else number(one.limit), className="number muted"),
        *([html.Td("–" if one.rank is None else str(one.rank), className="number muted")] if ranks else []),
    ])


def _series_name(series: SeriesDocument) -> Any:
    if not series.module:
        return html.Span(series.name, className="ellipsis")
    return html.Button(series.name, type="button", className="link ellipsis", title=f"Choose {series.module}",
                       **data(layer=series.module))


def events(documents: Sequence[EventDocument]) -> Any:
    """Newest first."""
    if not documents:
        return html.P("Nothing has happened yet: no alert, no switch, no command.", className="muted")
    ordered = sorted(documents, key=lambda one: one.id, reverse=True)
    return html.Ol(className="events", children=[_event(one) for one in ordered])


def _event(one: EventDocument) -> Any:
    look = event_look(one.kind)
    return html.Li(className=f"event look-{look}", children=[
        html.Span(EVENT_GLYPHS[look], className="glyph", **aria(hidden="true")),
        html.Span(count(one.step), className="event-step", title=f"step {one.step}"),
        html.Span(className="event-text", children=[
            html.B(one.kind.replace("_", " ")),
            html.Span(f" {one.name}", className="event-name") if one.name else "",
            f": {one.text}",
        ]),
        html.Span(ago(one.at), className="muted", title=one.at),
    ])


def commands(documents: Sequence[Command]) -> Any:
    """The newest commands and what became of them."""
    if not documents:
        return html.P("No command has been given.", className="muted")
    newest = sorted(documents, key=lambda command: command.id, reverse=True)[:COMMANDS_SHOWN]
    return html.Ul(className="commands", **aria(live="polite"), children=[_command(one) for one in newest])


def _command(command: Command) -> Any:
    names = command.action.modules
    what = names[0] if len(names) == 1 else f"{len(names)} layers"
    target = "BF16" if command.action.precision in ("bf16", "shadow") else "FP8"
    return html.Li(className="command", title=", ".join(names), children=[
        html.Div(className="command-head", children=[
            html.Span(f"#{command.id}", className="muted"),
            html.Span(f"To {target}", className=f"chip {target.lower()}"),
            html.Span(command.state, className=f"state {command.state}"),
        ]),
        html.P(what, className="command-name"),
        html.P(command_words(command), className="muted small"),
    ])


def command_words(command: Command) -> str:
    """One line: what became of it, who asked and why."""
    state = STATE_WORDS.get(command.state, command.state)
    if command.state == "applied":
        ranks = len(command.steps_by_rank)
        state += f" at step {command.applied_step}" + (f" on all {ranks} ranks" if ranks > 1 else "")
        if len(set(command.steps_by_rank)) > 1:
            state = "applied at different steps: " + ", ".join(map(str, command.steps_by_rank))
    elif command.answer:
        state += ": " + command.answer
    by = command.issued_by.replace("rule:", "rule ", 1)
    words = f"{state} · by {by} at step {command.issued_step}"
    return f"{words} · {command.reason}" if command.reason else words


def nothing(title: str, text: str) -> list[Any]:
    """An empty state."""
    return [html.H2(title), html.P(text), html.P(dcc.Link("All runs", href="/"))]
