"""What the probe itself does: its share of the job's time, how often it measures, its clock, its losses."""

from collections.abc import Sequence
from typing import Any

from dash import html

from fp8scope_dashboard.wording import clock, count, percent
from fp8scope_protocol.documents import EventDocument, Number, RunDocument

CHANGES_SHOWN = 3


def probe(run: RunDocument, overhead: Sequence[Number], events: Sequence[EventDocument]) -> Any:
    """Facts as a list; `overhead` are the values of the steps shown, in their order."""
    known = [value for value in overhead if isinstance(value, float | int)]
    ahead = run.attempts[-1].clock_ahead_s if run.attempts else None
    words, odd = clock(ahead)
    wanted = f"a measurement every {run.every} steps" if run.every > 1 else "a measurement every step"
    rows = [
        ("Overhead", f"{percent(known[-1])}, at most {percent(max(known))} in these steps" if known
         else "not known yet", ""),
        ("Asked for", wanted, ""),
        ("Cadence", _changes(events), ""),
        ("Clock", words, "warn-text" if odd else ""),
        ("Lost batches", ", ".join(f"{reason}: {count(n)}" for reason, n in sorted(run.lost.items()) if n)
         or "none", "warn-text" if sum(run.lost.values()) else ""),
    ]
    return html.Dl(className="facts", children=[
        part for name, value, state in rows for part in (html.Dt(name), html.Dd(value, className=state))])


def _changes(events: Sequence[EventDocument]) -> Any:
    changes = sorted((one for one in events if one.kind == "cadence"), key=lambda one: one.id, reverse=True)
    if not changes:
        return "as asked for"
    return html.Ul([html.Li(f"step {count(one.step)}: {one.text}") for one in changes[:CHANGES_SHOWN]])
