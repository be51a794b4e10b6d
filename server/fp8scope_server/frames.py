"""Exact values out of stored frames: one metric over steps, one cell, the newest values.

Frames of several producers and layouts are stitched by series, never by column. Values keep their bits:
counts are uint64, everything else float32, and what was not measured is said so, not shown as 0.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Row, and_, func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.documents import Number, to_number
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.wire import MISSING, is_missing
from fp8scope_server.catalogue import Catalogue, Ints
from fp8scope_server.models import Attempt, Frame, Producer
from fp8scope_server.view import View

MAX_CELLS = 2**25
"""Most values read for one answer: 128 MB of float32."""

_DTYPES: dict[str, np.dtype[Any]] = {"u8": np.dtype("<u8"), "f4": np.dtype("<f4")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """One metric of chosen series: `values` [steps, series] is float32 or uint64."""

    steps: Ints
    attempts: tuple[str, ...]
    """The attempt that supplied each step."""
    values: npt.NDArray[Any]
    missing: npt.NDArray[np.bool_]

    def numbers(self) -> list[list[Number]]:
        """`values` by the rule of documents.py: counts as integers, NaN and Inf as strings."""
        rows: list[list[Number]] = self.values.tolist()
        odd = self.missing | ~np.isfinite(self.values)
        for i, j in np.argwhere(odd):
            rows[i][j] = to_number(float(self.values[i, j]), missing=bool(self.missing[i, j]))
        return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Steps from `first` to `last`, both included; None is open."""

    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if self.first is not None and self.last is not None and self.first > self.last:
            raise Invalid("first, last", (self.first, self.last), "needs first <= last")


def as_float64(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """For pictures and rankings; a signalling NaN becomes a quiet one without a warning."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


async def read_matrices(
    session: AsyncSession, run: str, metrics: Sequence[str], *, catalogue: Catalogue, view: View,
    chosen: Sequence[int], window: Window, max_cells: int = MAX_CELLS, marks: Sequence[str] = (),
) -> dict[str, Matrix]:
    """Metrics of the series with the `chosen` indices; all matrices have the same steps.

    Of the count metrics `marks`, only what is not zero is read: their zeros read as missing.
    """
    wanted = set(chosen)
    layouts = [key for key, columns in catalogue.columns.items() if not wanted.isdisjoint(columns.tolist())]
    widest = max((len(catalogue.columns[key]) for key in layouts), default=1)
    limit = max(1, min(MAX_CELLS // widest, max_cells // max(1, len(chosen))))
    statement = (
        select(Frame.metric, Frame.step, Frame.attempt_id, Frame.producer, Frame.seq, Frame.layout_id,
               Frame.type, Frame.values)
        .where(Frame.run_id == run, Frame.rows == 1, Frame.layout_id.in_(layouts),
               view.covers(Frame.attempt_id, Frame.step),
               or_(Frame.metric.in_(metrics),
                   and_(Frame.metric.in_(marks), func.btrim(Frame.values, b"\0") != b"")))
        .order_by(Frame.step)
        .limit(limit + 1)
    )
    if window.first is not None:
        statement = statement.where(Frame.step >= window.first)
    if window.last is not None:
        statement = statement.where(Frame.step <= window.last)
    rows: list[Row[Any]] = list(await session.execute(statement)) if layouts else []
    if len(rows) > limit:
        raise Invalid("first, last", (window.first, window.last),
                      f"the window holds more than {max_cells:,} values; narrow it, or select fewer series")
    attempts = {row.step: row.attempt_id for row in rows}
    return {
        metric: await asyncio.to_thread(
            _stitch, metric, [row for row in rows if row.metric == metric], attempts, catalogue, chosen)
        for metric in (*metrics, *marks)
    }


def _stitch(
    metric: str, rows: Sequence[Row[Any]], attempts: dict[int, str], catalogue: Catalogue,
    chosen: Sequence[int],
) -> Matrix:
    """The rows of one metric as a matrix; where a producer repeated a step, its highest seq wins."""
    shape = (len(attempts), len(chosen))
    counts = METRICS[metric].kind == "count"
    values = np.zeros(shape, dtype="<u8") if counts else np.full(shape, MISSING, dtype="<f4")
    missing = np.ones(shape, dtype=np.bool_)
    target = np.full(len(catalogue.series), -1, dtype=np.int64)
    target[list(chosen)] = np.arange(len(chosen))
    line_of = {step: i for i, step in enumerate(attempts)}
    ordered = sorted(rows, key=lambda row: (row.producer, row.seq))
    for (layout, kind), group in groupby(ordered, key=lambda row: (row.layout_id, row.type)):
        block = list(group)
        columns = target[catalogue.columns[layout]]
        source = np.flatnonzero(columns >= 0)
        numbers = np.frombuffer(b"".join(row.values for row in block), dtype=_DTYPES[kind])
        numbers = numbers.reshape(len(block), len(columns))[:, source]
        lines = np.array([line_of[row.step] for row in block])
        cells = np.ix_(lines, columns[source])
        values[cells] = numbers
        missing[cells] = is_missing(numbers)
    steps = np.array(list(attempts), dtype=np.int64)
    return Matrix(steps=steps, attempts=tuple(attempts.values()), values=values, missing=missing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Every metric of one series at one sampled step."""

    step: int
    attempt: str
    metrics: dict[str, Number]
    histogram: list[int]
    """Counts of the exponent histogram; empty where it was not measured."""


async def read_cell(
    session: AsyncSession, run: str, *, catalogue: Catalogue, view: View, index: int, step: int
) -> Cell | None:
    """The cell at `step`, or at the newest sampled step before it; None where there is none."""
    layouts = [key for key, columns in catalogue.columns.items() if index in columns]
    here = (Frame.run_id == run, Frame.layout_id.in_(layouts), view.covers(Frame.attempt_id, Frame.step))
    newest = select(Frame.step).where(*here, Frame.step <= step).order_by(Frame.step.desc()).limit(1)
    found = await session.scalar(newest)
    if found is None:
        return None
    frames = select(Frame).where(*here, Frame.step == found).order_by(Frame.seq)
    metrics: dict[str, Number] = {}
    histogram: list[int] = []
    attempt = ""
    for frame in await session.scalars(frames):
        column = int(np.flatnonzero(catalogue.columns[frame.layout_id] == index)[0])
        plane = np.frombuffer(frame.values, dtype=_DTYPES[frame.type]).reshape(frame.rows, -1)[:, column]
        attempt = frame.attempt_id
        if frame.metric in METRICS:
            metrics[frame.metric] = _number(plane)
        elif frame.metric == "exponent_histogram":
            histogram = [int(count) for count in plane] if plane.any() else []
    ordered = {key: metrics[key] for key in METRICS if key in metrics}
    return Cell(step=found, attempt=attempt, metrics=ordered, histogram=histogram)


def _number(plane: npt.NDArray[Any]) -> Number:
    if plane.dtype == np.dtype("<u8"):
        return int(plane[0])
    return to_number(float(plane[0]), missing=bool(is_missing(plane)[0]))


async def read_newest(
    session: AsyncSession, run: str, metric: str, *, catalogue: Catalogue
) -> dict[int, tuple[int, float]]:
    """Series index -> (step, value) of the newest attempt that has samples; what is missing is left out."""
    newest = (
        select(Frame.step, Frame.layout_id, Frame.type, Frame.values)
        .where(Frame.run_id == run, Frame.metric == metric, Frame.attempt_id == Producer.attempt_id,
               Frame.producer == Producer.producer)
        .order_by(Frame.seq.desc()).limit(1).lateral()
    )
    statement = (select(Attempt.number, newest).select_from(Producer)
                 .join(Attempt, Attempt.id == Producer.attempt_id).join(newest, true())
                 .where(Producer.run_id == run))
    rows = (await session.execute(statement)).all()
    latest = max((row.number for row in rows), default=0)
    found: dict[int, tuple[int, float]] = {}
    for row in rows:
        if row.number != latest:
            continue
        values = np.frombuffer(row.values, dtype=_DTYPES[row.type])
        exact = as_float64(values)
        for column in np.flatnonzero(~is_missing(values)):
            found[int(catalogue.columns[row.layout_id][column])] = (row.step, float(exact[column]))
    return found
