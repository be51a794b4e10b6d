"""One heat map of a run: series x steps of one metric, as a picture and as what explains it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.documents import HeatmapDocument, ScaleDocument, SeriesDocument
from fp8scope_protocol.metrics import METRICS, Metric, parse_metric
from fp8scope_protocol.series import Series
from fp8scope_server.catalogue import Selection, read_catalogue
from fp8scope_server.frames import Matrix, Window, as_float64, read_matrices
from fp8scope_server.palette import BF16, INF, MISSING, NAN, SATURATED, legend, stops
from fp8scope_server.picture import Canvas, draw, encode_png
from fp8scope_server.precision import read_history
from fp8scope_server.scale import Floats, Scale, excess, indices, scale_of
from fp8scope_server.view import View, read_view

Cells = npt.NDArray[np.uint8]

_SATURATION = METRICS["saturation_ratio"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatmapQuery:
    """What to draw, and on how many pixels."""

    metric: str
    selection: Selection = field(default_factory=Selection)
    window: Window = field(default_factory=Window)
    attempt: int | None = None
    width: int = 1000
    height: int = 500
    theme: str = "dark"

    def __post_init__(self) -> None:
        parse_metric(self.metric)
        legend(self.theme)
        Canvas(width=self.width, height=self.height, first=0, last=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heatmap:
    """Palette indices `cells` [steps, series], and what is needed to draw and to explain them."""

    query: HeatmapQuery
    steps: npt.NDArray[np.int64]
    rows: list[SeriesDocument]
    cells: Cells
    scale: Scale
    hold: int
    summary: str

    @property
    def canvas(self) -> Canvas:
        """The window asked for, or from the first sampled step to where the last one ends."""
        first, last = self.query.window.first, self.query.window.last
        sampled = len(self.steps) > 0
        if first is None:
            first = int(self.steps[0]) if sampled else last or 0
        if last is None:
            last = max(first, int(self.steps[-1]) + self.hold - 1 if sampled else 0)
        return Canvas(width=self.query.width, height=self.query.height, first=first, last=last)

    def png(self) -> bytes:
        """The picture."""
        pixels = draw(self.cells, self.steps, self.canvas, hold=self.hold)
        return encode_png(pixels, self.query.theme)

    def document(self) -> HeatmapDocument:
        """What the picture shows where."""
        query, scale, canvas, sampled = self.query, self.scale, self.canvas, len(self.steps) > 0
        return HeatmapDocument(
            metric=query.metric,
            first=canvas.first if sampled else None,
            last=canvas.last if sampled else None,
            columns=len(self.steps),
            width=query.width,
            height=query.height,
            rows=self.rows,
            scale=ScaleDocument(low=scale.low, high=scale.high, log=scale.log, unit=scale.unit,
                                colours=stops(query.theme)),
            legend=legend(query.theme),
            summary=self.summary,
        )


async def read_heatmap(session: AsyncSession, run: str, query: HeatmapQuery) -> Heatmap:
    """The heat map of a run; empty where nothing was measured."""
    catalogue = await read_catalogue(session, run)
    view = await read_view(session, run, query.attempt)
    chosen = catalogue.select(query.selection)
    series = [catalogue.series[index] for index in chosen]
    keys, marks = _keys(query.metric, series)
    matrices = await read_matrices(session, run, keys, catalogue=catalogue, view=view, chosen=chosen,
                                   window=query.window, marks=marks)
    shown = matrices[query.metric]
    bf16 = (await read_history(session, run, view)).bf16_marks(series, shown.steps, shown.attempts)
    metric = METRICS[query.metric]
    values = await asyncio.to_thread(lambda: excess(metric, as_float64(shown.values), series))
    scale = scale_of(metric, values[~shown.missing])
    cells = await asyncio.to_thread(paint, metric, values, scale, series, matrices, bf16)
    return Heatmap(
        query=query, steps=shown.steps, rows=[catalogue.document(index) for index in chosen], cells=cells,
        scale=scale, hold=_hold(view, shown.steps),
        summary=summarize(query, shown, values, series, cells))


def _keys(metric: str, series: Sequence[Series]) -> tuple[list[str], list[str]]:
    """The metrics that a picture of `metric` needs whole, and the counts that mark its cells."""
    limited = metric != _SATURATION.key and any(_SATURATION.limit_of(one) for one in series)
    marks = [] if metric in ("nan_count", "inf_count") else ["nan_count", "inf_count"]
    return [metric, _SATURATION.key] if limited else [metric], marks


def paint(
    metric: Metric, values: Floats, scale: Scale, series: Sequence[Series], matrices: dict[str, Matrix],
    bf16: npt.NDArray[np.bool_],
) -> Cells:
    """Palette indices [steps, series] of `values` (by `excess`), with the marks of other metrics on them.

    One cell shows, in this order: NaN or Inf (of the metric or in the tensor itself), BF16, saturation
    over its limit, the value. So BF16 hides a value, never a NaN.
    """
    cells = indices(metric, values, matrices[metric.key].missing, scale)
    finite = cells < INF
    if metric != _SATURATION and _SATURATION.key in matrices:
        limits = np.array([limit.value if (limit := _SATURATION.limit_of(one)) else np.inf for one in series])
        cells[finite & (as_float64(matrices[_SATURATION.key].values) > limits)] = SATURATED
    cells[finite & bf16] = BF16
    if "nan_count" in matrices and "inf_count" in matrices:
        cells[matrices["inf_count"].values > 0] = INF
        cells[matrices["nan_count"].values > 0] = NAN
    return cells


def summarize(
    query: HeatmapQuery, shown: Matrix, values: Floats, series: Sequence[Series], cells: Cells
) -> str:
    """The picture in words. `values` (by `excess`) say which cell is the worst."""
    if not cells.size:
        return f"{query.metric}: nothing was measured for {query.selection} in this window."
    parts = [f"{query.metric} of {len(series)} series ({query.selection}) at {len(shown.steps)} sampled "
             f"steps from {shown.steps[0]} to {shown.steps[-1]}"]
    ranked = np.where(shown.missing | ~np.isfinite(values), -np.inf, values)
    i, j = divmod(int(np.argmax(ranked)), len(series))
    if np.isfinite(ranked[i, j]):
        end = "highest" if METRICS[query.metric].worse == "neither" else "worst"
        one = series[j]
        parts.append(f"{end} {shown.values[i, j]:.4g} in {one.name} ({one.role}) at step {shown.steps[i]}")
    names = {"NaN": NAN, "Inf": INF, "saturated": SATURATED, "in BF16": BF16, "not measured": MISSING}
    marked = [f"{count} {name}" for name, index in names.items() if (count := int((cells == index).sum()))]
    parts.append(f"of {cells.size} cells " + ", ".join(marked) if marked else "no cell out of the ordinary")
    return "; ".join(parts) + "."


def _hold(view: View, steps: npt.NDArray[np.int64]) -> int:
    """Steps that a sample stands for: the cadence, or the usual distance where the probe throttles."""
    usual = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    return max(view.every, usual)
