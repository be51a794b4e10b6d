"""Layouts and batches: what arrives from probes, checked and stored.

A batch is stored in one transaction: its ledger row, its frames, its step, and everything that follows
from it (events, reports, decisions). The answer is sent after the commit, so an acknowledged batch is a
stored one; the ledger's key makes the same batch sent again a no-op.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from fp8scope_protocol.bundle import decode_body
from fp8scope_protocol.commands import PRECISIONS
from fp8scope_protocol.documents import to_number
from fp8scope_protocol.errors import BrokenMessage, Invalid, UnknownName
from fp8scope_protocol.metrics import HISTOGRAM_BINS, METRICS, SENTINELS
from fp8scope_protocol.wire import Batch, BatchHeader, IngestReply
from fp8scope_server.commands import waiting
from fp8scope_server.events import Origin, record
from fp8scope_server.judge import judge
from fp8scope_server.layouts import KnownLayout, Layouts, parse_layout, store_layout
from fp8scope_server.losses import account_losses, check_losses
from fp8scope_server.models import Attempt, BatchRow, Producer, Run, Step
from fp8scope_server.problems import Refused
from fp8scope_server.reports import expire, take_reports
from fp8scope_server.runs import read_firing
from fp8scope_server.text import checked

router = APIRouter(prefix="/api/v1")

HISTOGRAM = "exponent_histogram"
_LARGE = 64 * 1024
"""Bodies over this are decoded in a thread: a few milliseconds that other requests need not wait."""
_LARGEST_STEP = 2**53

_COPY = ('COPY frames (run_id, metric, step, attempt_id, producer, seq, layout_id, type, rows, "values") '
         "FROM STDIN (FORMAT BINARY)")
_COPY_TYPES = ("text", "text", "int8", "text", "text", "int8", "text", "text", "int8", "bytea")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The run and attempt that a message names."""

    run_id: str
    attempt_number: int
    newest: bool
    """Whether it is the newest attempt of the run."""


@router.put("/runs/{run}/layouts/{layout}")
async def put_layout(
    run: str, layout: str, request: Request, attempt: Annotated[str | None, Query()] = None
) -> dict[str, str | int]:
    """Store a layout (body: its canonical bytes) for the run of `attempt`, else the newest called `run`."""
    state = request.app.state
    async with state.intake.body(request) as body:
        parsed = await asyncio.to_thread(parse_layout, body, layout)
        async with state.intake.writing, state.database.session() as session:
            named = Run.name == run if attempt is None else Attempt.id == attempt
            found = await session.scalar(
                select(Run.id).join(Attempt).where(named).order_by(Run.created_at.desc(), Run.id).limit(1))
            if found is None:
                raise _unknown_attempt(f"of run {run[:80]}" if attempt is None else attempt[:64])
            await store_layout(session, found, parsed)
    return {"run": found, "layout": layout, "series": len(parsed.series)}


@router.post("/runs/{run}/batches")
async def post_batch(run: str, request: Request) -> Response:
    """Store a batch, or all or none of several (body: bundle.join_batches); the last one's IngestReply."""
    state = request.app.state
    async with state.intake.body(request) as body:
        batches = await asyncio.to_thread(decode_body, body) if len(body) > _LARGE else decode_body(body)
        async with state.intake.writing, state.database.session() as session:
            replies = [await store_batch(session, state.layouts, batch) for batch in batches]
    if not all(reply.duplicate for reply in replies):
        state.changes.notify(replies[-1].run)
    return Response(msgspec.json.encode(replies[-1]), media_type="application/json")


async def store_batch(session: AsyncSession, layouts: Layouts, batch: Batch) -> IngestReply:
    """Store `batch` and what follows from it; `Refused` 409 when its attempt or layout is unknown."""
    header = batch.header
    _check(header)
    source = await _find_source(session, header)
    known = None
    if header.layout is not None:
        known = await layouts.find(session, source.run_id, header.layout)
        if known is None:
            raise Refused(409, f"layout {header.layout} is unknown; send it first", missing="layout")
        _check_planes(header, known)
    new = await _enter(session, source, batch)
    if new:
        await _copy_frames(session, source, batch)
        commands = await _follow_up(session, source, batch, known)
    else:
        commands = await waiting(session, header.attempt)
    firing = await read_firing(session, [source.run_id])
    return IngestReply(acked_seq=header.seq, run=source.run_id, duplicate=not new, commands=commands,
                       alert=firing[source.run_id] > 0)


async def _find_source(session: AsyncSession, header: BatchHeader) -> Source:
    other = aliased(Attempt)
    newest = select(func.max(other.number)).where(other.run_id == Attempt.run_id).scalar_subquery()
    found = (await session.execute(
        select(Attempt.run_id, Attempt.number, newest.label("newest"))
        .join(Producer, Producer.attempt_id == Attempt.id)
        .where(Attempt.id == header.attempt, Producer.producer == header.producer))).one_or_none()
    if found is None:
        raise _unknown_attempt(f"{header.attempt} of producer {header.producer}")
    return Source(run_id=found.run_id, attempt_number=found.number, newest=found.number == found.newest)


def _unknown_attempt(which: str) -> Refused:
    return Refused(409, f"attempt {which} is unknown; say hello first", missing="attempt")


async def _enter(session: AsyncSession, source: Source, batch: Batch) -> bool:
    """Write the ledger row; False if it is there. Waits for a transaction that is writing the same one."""
    header = batch.header
    row = {
        "attempt_id": header.attempt, "producer": header.producer, "seq": header.seq, "run_id": source.run_id,
        "step": header.step, "frames": len(header.planes),
        "samples": sum(plane.rows for plane in header.planes) * header.columns,
    }
    statement = insert(BatchRow).values(row).on_conflict_do_nothing().returning(BatchRow.seq)
    return await session.scalar(statement) is not None


async def _copy_frames(session: AsyncSession, source: Source, batch: Batch) -> None:
    header = batch.header
    if not header.planes:
        return
    connection = (await (await session.connection()).get_raw_connection()).driver_connection
    assert connection is not None
    async with connection.cursor() as cursor, cursor.copy(_COPY) as copy:
        copy.set_types(_COPY_TYPES)
        for plane in header.planes:
            await copy.write_row((
                source.run_id, plane.key, header.step, header.attempt, header.producer, header.seq,
                header.layout, plane.type, plane.rows, batch.arrays[plane.key].tobytes()))


async def _follow_up(session: AsyncSession, source: Source, batch: Batch, known: KnownLayout | None) -> int:
    """What a new batch changes beside its frames, in an order of locks that all batches share.

    Returns the highest id of the commands that wait for the attempt.
    """
    header = batch.header
    run = (await session.execute(
        update(Run).where(Run.id == source.run_id).values(last_seen_at=func.now())
        .returning(Run.every, Run.remote_control))).one()
    origin = Origin(run_id=source.run_id, attempt_id=header.attempt, producer=header.producer,
                    step=header.step, every=run.every, remote_control=run.remote_control)
    await _store_step(session, origin, header)
    await _account(session, origin, source, header)
    for event in header.events:
        step = min(max(event.step, 0), _LARGEST_STEP)
        record(session, origin, event.kind, event.name, event.text, step=step)
    await take_reports(session, origin, header.reports)
    if known is not None and source.newest:
        await judge(session, origin, known, batch.arrays)
    return await expire(session, origin)


async def _store_step(session: AsyncSession, origin: Origin, header: BatchHeader) -> None:
    """One row per step and producer; a step that is sent again adds to it or replaces what it had."""
    sentinels = {key: to_number(value) for key, value in header.sentinels.items()}
    statement = insert(Step).values(
        run_id=origin.run_id, step=header.step, attempt_id=header.attempt, producer=header.producer,
        skipped=header.skipped, sentinels=sentinels)
    new = statement.excluded
    await session.execute(statement.on_conflict_do_update(
        index_elements=["run_id", "step", "attempt_id", "producer"],
        set_={"skipped": new.skipped, "sentinels": Step.sentinels.op("||")(new.sentinels)}))


async def _account(session: AsyncSession, origin: Origin, source: Source, header: BatchHeader) -> None:
    """Keep the producer's position; tell of an attempt's begin, of gaps and of what the probe lost."""
    producer = await session.get_one(Producer, (header.attempt, header.producer), with_for_update=True)
    if producer.last_seq < 0 and source.attempt_number > 1:
        text = f"attempt {source.attempt_number} begins at step {header.step}"
        record(session, origin, "attempt", header.producer, text)
    missed = header.seq - producer.last_seq - 1
    if missed > 0:
        text = f"batches {producer.last_seq + 1} to {header.seq - 1} ({missed}) did not come before this one"
        record(session, origin, "gap", header.producer, text)
    account_losses(session, origin, producer, header.lost)
    producer.last_seq = max(producer.last_seq, header.seq)
    producer.last_step = max(producer.last_step, header.step)
    if header.sent_ns:
        ahead = (header.sent_ns - time.time_ns()) / 1e9
        known = producer.clock_ahead_s
        producer.clock_ahead_s = ahead if known is None else max(known, ahead)


def _check(header: BatchHeader) -> None:
    """Refuse what the tables cannot hold or the vocabulary does not know."""
    checked("attempt", header.attempt, limit=64)
    checked("producer", header.producer, limit=64)
    for name in ("seq", "step"):
        if getattr(header, name) > _LARGEST_STEP:
            raise Invalid(name, getattr(header, name), "must be at most 2^53")
    if header.layout is not None:
        checked("layout", header.layout, limit=32)
    for key in header.sentinels:
        if key not in SENTINELS:
            raise UnknownName("sentinel", key, SENTINELS)
    check_losses(header.lost)
    for report in header.reports:
        if not 0 < report.id <= _LARGEST_STEP or not 0 <= report.step <= _LARGEST_STEP:
            raise Invalid("report", (report.id, report.step), "must name a command and a step")
        if report.precision and report.precision not in PRECISIONS:
            raise UnknownName("precision", report.precision, PRECISIONS)


def _check_planes(header: BatchHeader, known: KnownLayout) -> None:
    size = len(known.layout.series)
    if header.columns != size:
        raise BrokenMessage(f"{header.columns} columns, but layout {header.layout} has {size} series")
    for plane in header.planes:
        if plane.key == HISTOGRAM:
            type_, rows = "u8", HISTOGRAM_BINS
        elif plane.key in METRICS:
            type_, rows = "u8" if METRICS[plane.key].kind == "count" else "f4", 1
        else:
            raise UnknownName("plane", plane.key, METRICS)
        if (plane.type, plane.rows) != (type_, rows):
            got = f"{plane.type} x {plane.rows}"
            raise BrokenMessage(f"plane {plane.key} is {got}, must be {type_} x {rows}")
