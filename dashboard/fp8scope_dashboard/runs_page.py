"""The list of runs."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from dash import dcc, html

from fp8scope_dashboard.wording import ago, count, health, number
from fp8scope_protocol.documents import RunDocument

COLUMNS = ("Run", "Health", "Step", "Loss", "In BF16", "Lost batches", "Sampled", "Last seen")

ATTACH = """import fp8scope

scope = fp8scope.attach(model, optimizer, run="my-run")"""


def layout() -> Any:
    return html.Section(id="runs-page", hidden=True, className="runs", children=[
        html.Div(className="title-row", children=[
            html.H1("Runs"), html.Span(id="runs-count", className="muted"),
        ]),
        html.Div(id="runs-table", children=html.P("Loading…", className="muted")),
    ])


def href(run: str) -> str:
    return "/runs/" + quote(run, safe="")


def table(runs: Sequence[RunDocument]) -> Any:
    """Runs, the one seen last first; how to begin when there is none."""
    if not runs:
        return html.Div(className="empty", children=[
            html.H2("No run has reported yet"),
            html.P("Attach the probe to a training job and it appears here within seconds:"),
            html.Pre(ATTACH),
            html.P(["To look around first: ", html.Code("fp8scope demo")]),
        ])
    ordered = sorted(runs, key=lambda run: run.last_seen_at, reverse=True)
    head = [html.Th(name, scope="col", className="" if i < 2 else "number") for i, name in enumerate(COLUMNS)]
    return html.Div(className="panel flush scroll-x", children=html.Table(className="list", children=[
        html.Thead(html.Tr(head)), html.Tbody([_row(run) for run in ordered]),
    ]))


def health_chip(run: RunDocument) -> Any:
    state, words = health(run)
    return html.Span(words, className=f"chip {state}")


def _row(run: RunDocument) -> Any:
    lost = sum(run.lost.values())
    lost_class = "number warn-text" if lost else "number"
    reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(run.lost.items()))
    return html.Tr([
        html.Th(dcc.Link(run.name, href=href(run.id), className="row-link", title=run.id), scope="row"),
        html.Td(health_chip(run)),
        html.Td("–" if run.last_step is None else count(run.last_step), className="number"),
        html.Td(number(run.loss), className="number"),
        html.Td(className="number", children=[
            html.B(str(run.layers_in_bf16), className="bf16-text" if run.layers_in_bf16 else ""),
            html.Span(f" / {run.layers}", className="muted"),
        ]),
        html.Td(count(lost), className=lost_class, title=reasons or "none lost"),
        html.Td(f"every {run.every}" if run.every > 1 else "every step", className="number muted"),
        html.Td(ago(run.last_seen_at), className="number muted", title=run.last_seen_at),
    ])
