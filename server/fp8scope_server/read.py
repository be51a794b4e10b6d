"""The JSON read API: runs, their series and layers, exact values, heat maps.

Answers are strict JSON by the rules of documents.py, encoded by msgspec: FastAPI's own encoder would turn
counts into floats and refuses NaN. The response models make the OpenAPI schema.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.documents import (
    CellDocument,
    EventDocument,
    FramesDocument,
    HeatmapDocument,
    LayerDocument,
    RunDocument,
    SeriesDocument,
    StepsDocument,
    WorstDocument,
)
from fp8scope_protocol.metrics import parse_metric
from fp8scope_server.catalogue import Selection, read_catalogue
from fp8scope_server.frames import Window, read_cell, read_matrices
from fp8scope_server.heatmap import HeatmapQuery, read_heatmap
from fp8scope_server.models import Run
from fp8scope_server.picture import MAX_EDGE
from fp8scope_server.precision import read_history
from fp8scope_server.problems import Refused
from fp8scope_server.runs import read_events, read_layers, read_run, read_runs, unknown_run
from fp8scope_server.steps import read_steps
from fp8scope_server.view import read_view
from fp8scope_server.worst import read_worst

MAX_STEP = 2**53
MAX_JSON_CELLS = 2**20
"""Most values of one FramesDocument."""

router = APIRouter(prefix="/api/v1")

_PNG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/png": {}}, "description": "8-bit palette PNG of width x height pixels"},
    304: {"description": "as the If-None-Match header says, the picture is the same"},
}


async def _session(request: Request) -> AsyncIterator[AsyncSession]:
    async with request.app.state.database.session() as session:
        yield session


Session = Annotated[AsyncSession, Depends(_session, scope="function")]


async def _known_run(session: Session, run: str) -> str:
    if await session.scalar(select(Run.id).where(Run.id == run)) is None:
        raise await unknown_run(session, run)
    return run


def _selection(
    role: Annotated[str | None, Query(max_length=64)] = None,
    orientation: Annotated[str | None, Query(max_length=64)] = None,
    format: Annotated[str | None, Query(max_length=64)] = None,
    module: Annotated[str | None, Query(max_length=256)] = None,
) -> Selection:
    return Selection(role=role, orientation=orientation, format=format, module=module)


def _window(
    first: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
    last: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
) -> Window:
    return Window(first=first, last=last)


KnownRun = Annotated[str, Depends(_known_run)]
MetricKey = Annotated[str, Query(max_length=64)]
AttemptNumber = Annotated[int | None, Query(ge=1, le=MAX_STEP)]
Selected = Annotated[Selection, Depends(_selection)]
Windowed = Annotated[Window, Depends(_window)]


def _heatmap_query(
    metric: MetricKey, selection: Selected, window: Windowed, attempt: AttemptNumber = None,
    width: Annotated[int, Query(ge=1, le=MAX_EDGE)] = 1000,
    height: Annotated[int, Query(ge=1, le=MAX_EDGE)] = 500,
    theme: Annotated[str, Query(max_length=16)] = "dark",
) -> HeatmapQuery:
    return HeatmapQuery(metric=metric, selection=selection, window=window, attempt=attempt, width=width,
                        height=height, theme=theme)


HeatmapAsked = Annotated[HeatmapQuery, Depends(_heatmap_query)]


@router.get("/runs", response_model=list[RunDocument])
async def runs(session: Session, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    """The newest runs, newest first."""
    return _json(await read_runs(session, limit=limit))


@router.get("/runs/{run}", response_model=RunDocument)
async def run(session: Session, run: str) -> Response:
    """One run."""
    return _json(await read_run(session, run))


@router.get("/runs/{run}/series", response_model=list[SeriesDocument])
async def series(session: Session, run: KnownRun, selection: Selected) -> Response:
    """What is measured, from input to output."""
    catalogue = await read_catalogue(session, run)
    return _json([catalogue.document(index) for index in catalogue.select(selection)])


@router.get("/runs/{run}/layers", response_model=list[LayerDocument])
async def layers(session: Session, run: KnownRun) -> Response:
    """What every layer runs in."""
    return _json(await read_layers(session, run))


@router.get("/runs/{run}/frames", response_model=FramesDocument)
async def frames(
    session: Session, run: KnownRun, metric: MetricKey, selection: Selected, window: Windowed,
    attempt: AttemptNumber = None,
) -> Response:
    """Exact values of one metric over steps."""
    key = parse_metric(metric).key
    catalogue = await read_catalogue(session, run)
    view = await read_view(session, run, attempt)
    chosen = catalogue.select(selection)
    found = await read_matrices(session, run, [key], catalogue=catalogue, view=view, chosen=chosen,
                                window=window, max_cells=MAX_JSON_CELLS)
    return _json(FramesDocument(
        metric=key, steps=found[key].steps.tolist(), series=[catalogue.document(index) for index in chosen],
        values=found[key].numbers()))


@router.get("/runs/{run}/cell", response_model=CellDocument)
async def cell(
    session: Session, run: KnownRun, series: Annotated[int, Query(ge=0, le=2**31)],
    step: Annotated[int, Query(ge=0, le=MAX_STEP)], attempt: AttemptNumber = None,
) -> Response:
    """Every metric of one series at the newest sampled step that is not after `step`."""
    catalogue = await read_catalogue(session, run)
    document = catalogue.document(series)
    view = await read_view(session, run, attempt)
    found = await read_cell(session, run, catalogue=catalogue, view=view, index=series, step=step)
    if found is None:
        raise Refused(404, f"series {series} ({document.name}) was not sampled at or before step {step}")
    history = await read_history(session, run, view)
    return _json(CellDocument(
        step=found.step, series=document, precision=history.at(found.attempt, document.module, found.step),
        metrics=found.metrics, histogram=found.histogram))


@router.get("/runs/{run}/steps", response_model=StepsDocument)
async def steps(
    session: Session, run: KnownRun, window: Windowed, attempt: AttemptNumber = None,
    points: Annotated[int, Query(ge=1, le=20_000)] = 2000,
) -> Response:
    """Loss and the other sentinels; with more steps than `points`, each point is the worst of several."""
    view = await read_view(session, run, attempt)
    return _json(await read_steps(session, run, view=view, window=window, points=points))


@router.get("/runs/{run}/worst", response_model=list[WorstDocument])
async def worst(
    session: Session, run: KnownRun, metric: MetricKey, selection: Selected,
    n: Annotated[int, Query(ge=1, le=1000)] = 10,
) -> Response:
    """The worst series in the newest samples, worst first; NaN is the worst of all."""
    return _json(await read_worst(session, run, parse_metric(metric), selection, n))


@router.get("/runs/{run}/events", response_model=list[EventDocument])
async def events(
    session: Session, run: KnownRun, after: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    """Events in their order: the oldest ones after id `after`, or the newest ones without it."""
    return _json(await read_events(session, run, after=after, limit=limit))


@router.get("/runs/{run}/heatmap", response_model=HeatmapDocument)
async def heatmap(session: Session, run: KnownRun, query: HeatmapAsked) -> Response:
    """What the picture of the same address with `.png` shows where."""
    return _json((await read_heatmap(session, run, query)).document())


@router.get("/runs/{run}/heatmap.png", response_class=Response, responses=_PNG)
async def heatmap_png(session: Session, run: KnownRun, query: HeatmapAsked, request: Request) -> Response:
    """The heat map, one band per series from input to output; 304 while the run has not changed."""
    tag = await _tag(session, request, run)
    headers = {"etag": tag, "cache-control": "private, no-cache"}
    if tag in [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    drawn = await read_heatmap(session, run, query)
    return Response(await asyncio.to_thread(drawn.png), media_type="image/png", headers=headers)


async def _tag(session: AsyncSession, request: Request, run: str) -> str:
    """Changes with each commit to the run: by this collector's count, and by time across restarts."""
    seen = await session.scalar(select(Run.last_seen_at).where(Run.id == run))
    version = request.app.state.changes.version(run)
    return f'"{version}-{seen.timestamp() if seen else 0:.6f}"'


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
