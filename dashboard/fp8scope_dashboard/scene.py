"""The scene: everything that scope.js draws on a run page, as one JSON value.

Loss, heat map and events share one axis of steps, from `first` to `last`, both included. The picture's
address names its steps, so that the picture and this description of it cannot disagree.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from fp8scope_dashboard.client import Query, path_of
from fp8scope_dashboard.view import View
from fp8scope_dashboard.wording import EVENT_GLYPHS, event_look, in_bf16
from fp8scope_protocol.documents import (
    EventDocument,
    HeatmapDocument,
    LayerDocument,
    StepsDocument,
)
from fp8scope_protocol.metrics import METRICS, SENTINELS

PICTURE_WIDTH = 1200
CURVE_POINTS = 1200
"""Most points of the loss curve; with more steps the collector keeps the worst of several."""

Scene = dict[str, Any]


def picture_query(view: View, steps: Query, theme: str, rows: int) -> Query:
    """What to ask the collector for: the picture and its description take the same."""
    height = min(4096, max(1, rows) * max(1, 480 // max(1, rows)))
    return {**view.selection(), **steps, "width": PICTURE_WIDTH, "height": height, "theme": theme}


def scene_of(
    run: str, view: View, query: Query, picture: HeatmapDocument, steps: StepsDocument,
    events: Sequence[EventDocument], layers: Sequence[LayerDocument],
) -> Scene:
    """The scene of one view of one run."""
    first, last = _range(picture, steps)
    base = "/collector/" + path_of(run)
    address = f"{base}/heatmap.png?" + urlencode({**query, "first": first, "last": last})
    running = {layer.name: layer for layer in layers}
    return {
        "picture": address if picture.first is not None and picture.rows else None,
        "cell": f"{base}/cell",
        "first": first,
        "last": last,
        "rows": [
            {"index": row.index, "name": row.name, "module": row.module,
             "bf16": row.module in running and in_bf16(running[row.module])}
            for row in picture.rows
        ],
        "scale": {"low": picture.scale.low, "high": picture.scale.high, "log": picture.scale.log,
                  "unit": picture.scale.unit, "colours": picture.scale.colours},
        "legend": picture.legend,
        "summary": picture.summary,
        "metric": view.metric,
        "layer": view.layer,
        "loss": {"steps": steps.steps, "values": steps.columns.get("loss", [])},
        "overhead": {"steps": steps.steps, "values": steps.columns.get("overhead_ratio", [])},
        "events": [{"step": one.step, "kind": one.kind, "name": one.name, "text": one.text,
                    "look": event_look(one.kind), "glyph": EVENT_GLYPHS[event_look(one.kind)]}
                   for one in events],
    }


def catalogue() -> dict[str, dict[str, str]]:
    """Unit and definition of every metric, for tooltips."""
    return {key: {"unit": metric.unit, "definition": metric.definition, "kind": metric.kind}
            for key, metric in (METRICS | {k: v for k, v in SENTINELS.items() if k not in METRICS}).items()}


def _range(picture: HeatmapDocument, steps: StepsDocument) -> tuple[int, int]:
    if picture.first is not None and picture.last is not None:
        return picture.first, picture.last
    return (steps.steps[0], steps.steps[-1]) if steps.steps else (0, 0)
