"""The frame around the pages: header, stores, dialog. Both pages are always there; one is hidden."""

from typing import Any

from dash import dcc, html

from fp8scope_dashboard import run_page, runs_page
from fp8scope_dashboard.markup import aria
from fp8scope_dashboard.scene import catalogue

PULSE_MS = 10_000

_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="dark light">
<title>{%title%}</title>
<link rel="icon" href="/assets/icon.svg" type="image/svg+xml">
<script src="/assets/theme.js?VERSION"></script>
<link rel="stylesheet" href="/assets/style.css?VERSION">
{%css%}
</head>
<body>
<a class="skip" href="#content">Skip to content</a>
{%app_entry%}
<footer>
{%config%}
<script src="/assets/hover.js?VERSION"></script>
<script src="/assets/scope.js?VERSION"></script>
<script src="/assets/shell.js?VERSION"></script>
{%scripts%}
{%renderer%}
</footer>
</body>
</html>"""


def index_page(version: str) -> str:
    """The HTML around the app. It names our own assets: Dash's index leaves them out of its first answer
    when that is to a deep link. `version` changes with them, so that no browser keeps old ones."""
    return _INDEX.replace("VERSION", version)


def layout() -> Any:
    """The whole page. Components are found by these ids; none is made from a name of a run."""
    return html.Div(className="app", children=[
        dcc.Location(id="url", refresh="callback-nav"),
        *_stores(),
        dcc.Interval(id="pulse", interval=PULSE_MS),
        _header(),
        html.Div(id="banner", className="banner", role="alert", hidden=True),
        html.Main(id="content", tabIndex="-1", children=[
            runs_page.layout(),
            run_page.layout(),
            html.Section(id="lost-page", hidden=True, className="empty", children=[
                html.H1("There is no such page"),
                html.P(dcc.Link("All runs", href="/")),
            ]),
        ]),
        run_page.dialog(),
    ])


def _stores() -> list[Any]:
    return [
        dcc.Store(id="place"),  # {page, run, query}: the address, taken apart
        dcc.Store(id="live"),  # {run, version, last_step, problem}: pushed by the websocket
        dcc.Store(id="ask-runs"),  # {n, key, ...}: one request of the runs page
        dcc.Store(id="ask-run"),
        dcc.Store(id="done-runs"),  # {n, problem}: which request was answered
        dcc.Store(id="done-run"),
        dcc.Store(id="nudge"),  # something was sent to the collector: ask again
        dcc.Store(id="shown"),  # the view as it is shown
        dcc.Store(id="scene"),
        dcc.Store(id="pick"),  # {layer, at}: a layer chosen on the map or in a table
        dcc.Store(id="zoom"),  # {first, last, at}, or {at} for no zoom
        dcc.Store(id="theme"),
        dcc.Store(id="wish"),  # {run, layer, precision}: what the dialog asks about
        dcc.Store(id="drawn"),
        dcc.Store(id="catalogue", data=catalogue()),
    ]


def _header() -> Any:
    return html.Header(className="top", children=[
        dcc.Link(href="/", className="brand", children=[
            html.Img(src="/assets/icon.svg", alt="", width=26, height=26), html.Span("fp8scope"),
        ]),
        html.Nav(className="crumbs", **aria(label="Where you are"), children=[
            dcc.Link("Runs", href="/"), html.Span(id="crumb", className="crumb"),
        ]),
        html.Span(id="live-badge", className="live", role="status", children="connecting"),
        html.Button(id="theme-button", className="quiet", type="button", children="◐ Theme",
                    title="Switch between dark and light"),
    ])
