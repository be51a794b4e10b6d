"""What a probe could not deliver, by reason: told with every batch, and once more when no batch follows."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.bounds import check_whole
from fp8scope_server.body import described, written
from fp8scope_server.events import Origin, record
from fp8scope_server.models import Producer, Run
from fp8scope_server.problems import Refused
from fp8scope_server.text import checked

router = APIRouter(prefix="/api/v1")


@router.put("/runs/{run}/lost", status_code=204, openapi_extra=described(dict[str, int]))
async def put_lost(
    run: str, lost: Annotated[dict[str, int], written(dict[str, int])], request: Request,
    attempt: Annotated[str, Query()], producer: Annotated[str, Query()],
) -> Response:
    """Batches that a producer lost so far in an attempt, by reason; counts never shrink."""
    check_losses(lost)
    state = request.app.state
    async with state.database.session() as session:
        row = await session.get(Producer, (attempt, producer), with_for_update=True)
        if row is None:
            raise Refused(409, f"attempt {attempt[:64]!r} of producer {producer[:64]!r} of run {run[:80]} is "
                               "unknown; say hello first", missing="attempt")
        found = await session.get_one(Run, row.run_id)
        origin = Origin(run_id=row.run_id, attempt_id=attempt, producer=producer, step=max(row.last_step, 0),
                        every=found.every, remote_control=found.remote_control)
        account_losses(session, origin, row, lost)
    state.changes.notify(found.id)
    return Response(status_code=204)


def account_losses(session: AsyncSession, origin: Origin, producer: Producer, lost: dict[str, int]) -> None:
    """Tell of what is more than the producer, which is locked, had lost before."""
    for reason, count in lost.items():
        if (more := count - producer.lost.get(reason, 0)) > 0:
            record(session, origin, "lost", producer.producer, f"the probe lost {more} batches: {reason}")
    producer.lost = {reason: max(lost.get(reason, 0), producer.lost.get(reason, 0))
                     for reason in {**producer.lost, **lost}}


def check_losses(lost: dict[str, int]) -> None:
    """`Invalid` where a reason or a count cannot be kept."""
    for reason, count in lost.items():
        checked("lost", reason, limit=64)
        check_whole(f"lost {reason}", count)
