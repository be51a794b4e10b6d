"""The run page's frame: what is where. Its contents come from panels.py and scope.js."""

from typing import Any

from dash import dcc, html

from fp8scope_dashboard.markup import aria
from fp8scope_dashboard.view import WINDOWS
from fp8scope_protocol.metrics import METRICS

WINDOW_WORDS = {"all": "All steps", "1000": "Last 1000", "100": "Last 100"}


def layout() -> Any:
    return html.Section(id="run-page", hidden=True, className="run", children=[
        html.Div(id="run-empty", className="empty"),
        html.Div(id="strip", className="strip"),
        html.Div(id="run-body", hidden=True, children=[
            _controls(),
            html.Div(className="columns", children=[
                html.Div(className="main-column", children=[_scope(), _events(), _worst()]),
                html.Div(className="side-column", children=[_layer(), _commands(), _layers(), _probe()]),
            ]),
        ]),
    ])


def _controls() -> Any:
    return html.Div(className="controls", role="group", **aria(label="What to show"), children=[
        _field("Metric", "metric", dcc.Dropdown(
            id="metric", options=[{"label": key.replace("_", " "), "value": key} for key in METRICS],
            clearable=False, className="wide")),
        _field("Tensor", "role", dcc.Dropdown(id="role", clearable=False, searchable=False)),
        _segments("Orientation", "orientation"),
        _segments("Format", "format"),
        _segments("Steps", "window", [{"label": WINDOW_WORDS[key], "value": key} for key in WINDOWS]),
        html.Button("Reset zoom", id="unzoom", className="quiet", type="button", hidden=True),
        html.P(id="definition", className="definition"),
    ])


def _field(label: str, control: str, child: Any) -> Any:
    return html.Div(className="field", children=[html.Label(label, htmlFor=control), child])


def _segments(label: str, control: str, options: list[Any] | None = None) -> Any:
    return html.Div(id=f"{control}-field", className="field", role="group", **aria(label=label), children=[
        html.Span(label, className="label"),
        dcc.RadioItems(id=control, options=options or [], className="segments", inline=True),
    ])


def _scope() -> Any:
    return html.Div(className="panel", children=[
        html.Div(id="scope", className="scope"),
        html.P(id="summary", className="summary"),
        html.P(className="hint", children=[
            "Point at a cell for its values, click it to choose its layer, drag to zoom. Keyboard: ",
            html.Kbd("←"), html.Kbd("↑"), html.Kbd("↓"), html.Kbd("→"), " move, ", html.Kbd("Enter"),
            " chooses, ", html.Kbd("Esc"), " leaves.",
        ]),
    ])


def _panel(title: str, identity: str, **properties: Any) -> Any:
    return html.Section(className="panel", children=[html.H2(title), html.Div(id=identity, **properties)])


def _events() -> Any:
    return _panel("Events", "events", className="scroll-y")


def _worst() -> Any:
    return html.Section(className="panel", children=[
        html.H2("Worst tensors"), html.P(id="worst-note", className="muted small"), html.Div(id="worst"),
    ])


def _commands() -> Any:
    return _panel("Commands", "commands")


def _layers() -> Any:
    return _panel("Precision of the layers", "layers", className="scroll-y tall")


def _probe() -> Any:
    return _panel("The probe itself", "probe")


def _layer() -> Any:
    return html.Section(className="panel layer-panel", children=[
        html.H2("Layer"),
        html.Label("Layer", htmlFor="layer", className="hidden-text"),
        dcc.Dropdown(id="layer", options=[], placeholder="Choose a layer …", clearable=True),
        html.Div(id="layer-info"),
        html.Div(className="buttons", children=[
            html.Button("To BF16", id="to-bf16", className="action bf16", type="button", disabled=True),
            html.Button("To FP8", id="to-fp8", className="action fp8", type="button", disabled=True),
        ]),
        html.P(id="layer-note", className="note"),
    ])


def dialog() -> Any:
    """Asked before every command. A native <dialog>: it keeps the focus and closes on Escape."""
    return html.Dialog(id="confirm", className="dialog", **aria(labelledby="confirm-title"), children=[
        html.H2(id="confirm-title"),
        html.P(id="confirm-text"),
        html.Label("Reason, kept with the command", htmlFor="reason"),
        dcc.Input(id="reason", type="text", maxLength=200, debounce=False, placeholder="optional",
                  autoComplete="off", value=""),
        html.P(id="confirm-problem", className="problem", role="alert"),
        html.Div(className="buttons", children=[
            html.Button("Cancel", id="confirm-no", className="quiet", type="button"),
            html.Button("Send", id="confirm-yes", className="action", type="button"),
        ]),
    ])
