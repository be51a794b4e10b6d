"""The job's own numbers over steps: loss, gradient norm, and the other sentinels."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.documents import Number, StepsDocument, from_number, to_number
from fp8scope_protocol.metrics import SENTINELS
from fp8scope_server.frames import Window
from fp8scope_server.models import Step
from fp8scope_server.view import View

MAX_ROWS = 100_000
"""Most stored rows read for one answer; of a longer window the newest are taken."""


@dataclass(kw_only=True, slots=True)
class Line:
    """One step, or several put together."""

    step: int
    skipped: bool = False
    values: dict[str, list[float]] = field(default_factory=dict)
    """What was said of each sentinel, oldest first: by each producer, or at each step."""


async def read_steps(
    session: AsyncSession, run: str, *, view: View, window: Window, points: int
) -> StepsDocument:
    """At most `points` points. Where more steps were stored, each point is the worst of several."""
    statement = (
        select(Step.step, Step.skipped, Step.sentinels)
        .where(Step.run_id == run, view.covers(Step.attempt_id, Step.step))
        .order_by(Step.step.desc()).limit(MAX_ROWS)
    )
    if window.first is not None:
        statement = statement.where(Step.step >= window.first)
    if window.last is not None:
        statement = statement.where(Step.step <= window.last)
    lines: dict[int, Line] = {}
    for row in reversed((await session.execute(statement)).all()):
        line = lines.setdefault(row.step, Line(step=row.step))
        line.skipped |= row.skipped
        for key, number in row.sentinels.items():
            if number is not None:
                line.values.setdefault(key, []).append(from_number(number))
    merged = [_reduced([line], over_steps=False) for line in lines.values()]
    return to_document(thinned(merged, points))


def thinned(lines: Sequence[Line], points: int) -> Sequence[Line]:
    """At most `points` lines, each the worst of its share of `lines`, at the last step of that share."""
    count = len(lines)
    if count <= points:
        return lines
    return [_reduced(lines[i * count // points:(i + 1) * count // points], over_steps=True)
            for i in range(points)]


def to_document(lines: Sequence[Line]) -> StepsDocument:
    """Columns of lines that hold one value a sentinel."""
    present = {key for line in lines for key in line.values}
    keys = [key for key in SENTINELS if key in present] + sorted(present - SENTINELS.keys())
    columns: dict[str, list[Number]] = {
        key: [to_number(line.values[key][0]) if key in line.values else None for line in lines]
        for key in keys
    }
    return StepsDocument(
        steps=[line.step for line in lines], skipped=[line.skipped for line in lines], columns=columns)


def _reduced(lines: Sequence[Line], *, over_steps: bool) -> Line:
    values: dict[str, list[float]] = {}
    for line in lines:
        for key, found in line.values.items():
            values.setdefault(key, []).extend(found)
    return Line(step=lines[-1].step, skipped=any(line.skipped for line in lines),
                values={key: [_one_of(key, found, over_steps)] for key, found in values.items()})


def _one_of(key: str, found: Sequence[float], over_steps: bool) -> float:
    """Several values of a sentinel as one: the worst over steps, its own merge over producers."""
    metric = SENTINELS.get(key)
    nan = next((value for value in found if value != value), None)
    if nan is not None:
        return nan
    if metric is None:
        return found[-1]
    if over_steps:
        return {"high": max(found), "low": min(found), "neither": found[-1]}[metric.worse]
    if metric.merge == "weighted":
        return sum(found) / len(found)
    return {"sum": sum(found), "max": max(found), "min": min(found)}[metric.merge]
