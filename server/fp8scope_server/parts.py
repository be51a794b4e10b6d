"""Batches that are too large for one request: kept in parts until all are there, then stored as one step.

A part is a stretch of the batch's bytes. It is stored before it is acknowledged, like everything else, and
goes when the batch is stored, or when its producer begins with another batch or another division.
"""

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import ColumnElement, delete, func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.errors import BrokenMessage, Invalid, TooLarge
from fp8scope_protocol.wire import MAX_STEP_BYTES, Batch, decode_batch
from fp8scope_server.ingest import store_batch
from fp8scope_server.models import Part, Producer
from fp8scope_server.problems import Refused

router = APIRouter(prefix="/api/v1")

MOST_PARTS = 2**14


@router.put("/runs/{run}/parts")
async def put_part(
    run: str, request: Request, attempt: Annotated[str, Query()], producer: Annotated[str, Query()],
    seq: Annotated[int, Query(ge=0, le=2**53)], index: Annotated[int, Query(ge=0)],
    count: Annotated[int, Query(ge=1, le=MOST_PARTS)],
) -> Response:
    """Store part `index` of `count` of a batch; 202, or with the last one the answer to the whole batch."""
    if index >= count:
        raise Invalid("index", index, f"must be under count = {count}")
    key = (attempt, producer, seq)
    state = request.app.state
    async with (state.intake.body(request) as body, state.intake.writing,
                state.database.session() as session):
        await _keep(session, run, key, index, count, body)
        batch = await _joined(session, key, count)
        if batch is None:
            return Response(status_code=202)
        reply = await store_batch(session, state.layouts, batch)
        await session.execute(delete(Part).where(*_of(key)))
    if not reply.duplicate:
        state.changes.notify(reply.run)
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def _keep(session: AsyncSession, run: str, key: tuple[str, str, int], index: int, count: int,
                body: bytes) -> None:
    attempt, producer, seq = key
    if await session.get(Producer, (attempt, producer)) is None:
        raise Refused(409, f"attempt {attempt[:64]!r} of producer {producer[:64]!r} of run {run[:80]} is "
                           "unknown; say hello first", missing="attempt")
    await session.execute(delete(Part).where(
        Part.attempt_id == attempt, Part.producer == producer, or_(Part.seq != seq, Part.count != count)))
    row = {"attempt_id": attempt, "producer": producer, "seq": seq, "index": index, "count": count,
           "body": body}
    await session.execute(insert(Part).values(row).on_conflict_do_nothing())


async def _joined(session: AsyncSession, key: tuple[str, str, int], count: int) -> Batch | None:
    """The whole batch once all parts are there."""
    found, size = (await session.execute(
        select(func.count(), func.sum(func.octet_length(Part.body))).where(*_of(key)))).one()
    if size > MAX_STEP_BYTES:
        raise Refused(422, f"a batch of {size} bytes; at most {MAX_STEP_BYTES} are accepted in parts")
    if found < count:
        return None
    parts = await session.scalars(select(Part.body).where(*_of(key)).order_by(Part.index))
    try:
        batch = await asyncio.to_thread(decode_batch, b"".join(parts), most_bytes=MAX_STEP_BYTES,
                                        most_inflated=MAX_STEP_BYTES)
    except TooLarge as error:  # a 413 would ask for smaller parts
        raise Refused(422, str(error)) from None
    if (batch.header.attempt, batch.header.producer, batch.header.seq) != key:
        raise BrokenMessage("the parts make a batch of another producer, attempt or seq")
    return batch


def _of(key: tuple[str, str, int]) -> tuple[ColumnElement[bool], ...]:
    attempt, producer, seq = key
    return Part.attempt_id == attempt, Part.producer == producer, Part.seq == seq
