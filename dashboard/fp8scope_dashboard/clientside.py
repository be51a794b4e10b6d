"""Which of the page's own functions (assets/shell.js, assets/scope.js) runs on which change."""

from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State


def add_clientside(app: Dash) -> None:
    """Register the functions of assets/shell.js and assets/scope.js."""

    def run(name: str, *arguments: Any) -> None:
        app.clientside_callback(ClientsideFunction("fp8scope", name), *arguments)  # type: ignore[no-untyped-call]

    run("route", Output("place", "data"), Output("runs-page", "hidden"), Output("run-page", "hidden"),
        Output("lost-page", "hidden"), Input("url", "pathname"), Input("url", "search"))
    run("askNow", Input("place", "data"), Input("nudge", "data"), Input("theme", "data"))
    run("askNext", Input("live", "data"), Input("done-runs", "data"), Input("done-run", "data"),
        Input("pulse", "n_intervals"))
    run("controls", Input("shown", "data"))
    run("badge", Output("live-badge", "children"), Output("live-badge", "className"),
        Output("banner", "children"), Output("banner", "hidden"), Input("live", "data"),
        Input("done-runs", "data"), Input("done-run", "data"), Input("place", "data"),
        Input("pulse", "n_intervals"))
    run("theme", Output("theme", "data"), Input("theme-button", "n_clicks"))
    run("navigate", Input("metric", "value"), Input("role", "value"), Input("orientation", "value"),
        Input("format", "value"), Input("window", "value"), Input("layer", "value"), Input("pick", "data"),
        Input("zoom", "data"), Input("unzoom", "n_clicks"), State("shown", "data"))
    run("draw", Output("drawn", "data"), Input("scene", "data"), State("catalogue", "data"))
    run("wish", Output("wish", "data"), Output("confirm-title", "children"),
        Output("confirm-text", "children"), Output("reason", "value"), Input("to-bf16", "n_clicks"),
        Input("to-fp8", "n_clicks"), State("shown", "data"), State("place", "data"))
    run("close", Input("confirm-no", "n_clicks"), Input("nudge", "data"))
