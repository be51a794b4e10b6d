"""The job's own numbers over steps: loss, gradient norm, and the other sentinels."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import DOUBLE_PRECISION
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.documents import Number, StepsDocument, to_number
from fp8scope_protocol.metrics import SENTINELS, Metric
from fp8scope_server.frames import Window
from fp8scope_server.models import Step
from fp8scope_server.view import View

MAX_ROWS = 100_000
"""Most stored rows read for one answer; of a longer window the newest are taken."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


async def read_steps(
    session: AsyncSession, run: str, *, view: View, window: Window, points: int
) -> StepsDocument:
    """At most `points` points. Where more steps were stored, each point is the worst of several."""
    rows = (
        select(Step.step, Step.skipped, Step.sentinels)
        .where(Step.run_id == run, view.covers(Step.attempt_id, Step.step))
        .order_by(Step.step.desc()).limit(MAX_ROWS)
    )
    if window.first is not None:
        rows = rows.where(Step.step >= window.first)
    if window.last is not None:
        rows = rows.where(Step.step <= window.last)
    found = rows.subquery()
    # One row of arrays: 30,000 rows of JSON took 0.9 s. PostgreSQL reads "NaN" and "Infinity" as float8.
    sentinels = [found.c.sentinels[key].astext.cast(DOUBLE_PRECISION) for key in SENTINELS]
    arrays = (await session.execute(
        select(*map(func.array_agg, (found.c.step, found.c.skipped, *sentinels))))).one()
    steps, skipped, *columns = (array or [] for array in arrays)
    said = dict(zip(SENTINELS, columns, strict=True))
    return await asyncio.to_thread(lambda: join(steps, skipped, said).thinned(points).document())


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Sentinels over ascending steps: `values[key]` is [steps], valid where `present[key]`."""

    steps: Ints
    skipped: Bools
    values: dict[str, Floats]
    present: dict[str, Bools]

    def thinned(self, points: int) -> "Lines":
        """At most `points` steps, each the last of its share, with the worst values of its share."""
        count = len(self.steps)
        if count <= points:
            return self
        starts = np.arange(points) * count // points
        return Lines(
            steps=self.steps[np.append(starts[1:], count) - 1],
            skipped=np.logical_or.reduceat(self.skipped, starts),
            values={key: _worst(SENTINELS[key], values, self.present[key], starts)
                    for key, values in self.values.items()},
            present={key: np.logical_or.reduceat(present, starts) for key, present in self.present.items()})

    def document(self) -> StepsDocument:
        """For JSON, with the sentinels in catalogue order."""
        columns: dict[str, list[Number]] = {
            key: [to_number(value, missing=not there) for value, there in zip(
                self.values[key].tolist(), self.present[key].tolist(), strict=True)]
            for key in SENTINELS if key in self.values}
        return StepsDocument(steps=self.steps.tolist(), skipped=self.skipped.tolist(), columns=columns)


def join(
    steps: Sequence[int], skipped: Sequence[bool], columns: Mapping[str, Sequence[float | None]]
) -> Lines:
    """One line per step. Several producers may say something of the same step, in any order."""
    order = np.argsort(np.array(steps, dtype=np.int64), kind="stable")
    found, starts = np.unique(np.array(steps, dtype=np.int64)[order], return_index=True)
    values: dict[str, Floats] = {}
    present: dict[str, Bools] = {}
    for key, column in columns.items():
        there = np.array([number is not None for number in column], dtype=np.bool_)[order]
        if there.any():
            said = np.array(column, dtype=np.float64)[order]
            values[key] = _merged(SENTINELS[key], said, there, starts)
            present[key] = np.logical_or.reduceat(there, starts)
    skips = np.array(skipped, dtype=np.bool_)[order]
    return Lines(steps=found, skipped=np.logical_or.reduceat(skips, starts) if len(found) else skips,
                 values=values, present=present)


def _merged(metric: Metric, values: Floats, present: Bools, starts: Ints) -> Floats:
    """What several producers said of a step, as one value; NaN if one of them said so."""
    result: Floats
    if metric.merge == "max":
        result = np.maximum.reduceat(np.where(present, values, -np.inf), starts)
    elif metric.merge == "min":
        result = np.minimum.reduceat(np.where(present, values, np.inf), starts)
    else:
        with np.errstate(invalid="ignore", over="ignore"):  # Inf - Inf is NaN, as it should
            result = np.add.reduceat(np.where(present, values, 0.0), starts)
        if metric.merge == "weighted":
            result = result / np.maximum(np.add.reduceat(present.astype(np.int64), starts), 1)
    return result


def _worst(metric: Metric, values: Floats, present: Bools, starts: Ints) -> Floats:
    """The worst value of each share, NaN above all; the last one where neither end is bad."""
    result: Floats
    if metric.worse == "high":
        result = np.maximum.reduceat(np.where(present, values, -np.inf), starts)
    elif metric.worse == "low":
        result = np.minimum.reduceat(np.where(present, values, np.inf), starts)
    else:
        # Later lines rank higher, and any line that is not finite ranks above all that are.
        rank = np.arange(len(values)) + np.where(np.isfinite(values), 0, len(values))
        result = values[np.maximum.reduceat(np.where(present, rank, 0), starts) % len(values)]
    return result
