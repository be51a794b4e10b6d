"""Commands: given by a person or a rule, fetched by the probe, kept with what became of them."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.commands import FINAL_STATES, Command, SetPrecision
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_server.body import described, written
from fp8scope_server.events import Origin, listed, record
from fp8scope_server.models import Attempt, CommandRow, PrecisionRow, Producer, Run
from fp8scope_server.problems import Refused
from fp8scope_server.runs import unknown_run
from fp8scope_server.text import cleaned

router = APIRouter(prefix="/api/v1")

REASON_LIMIT = 2000
"""Characters of the reason for a command."""


@dataclass(frozen=True, kw_only=True)
class NewCommand:
    """What a person asks of a run."""

    action: SetPrecision
    reason: str = ""

    def __post_init__(self) -> None:
        if len(self.reason) > REASON_LIMIT:
            raise Invalid("reason", self.reason[:80], f"must be at most {REASON_LIMIT} characters, it has "
                                                      f"{len(self.reason)}")


@router.get("/runs/{run}/commands")
async def get_commands(
    run: str, request: Request, attempt: Annotated[str | None, Query()] = None
) -> list[Command]:
    """All commands of a run; with `attempt`, those that this attempt has still to answer.

    The second form is the probe's: `run` is then the name it knows, and what is given to it counts as
    delivered.
    """
    async with request.app.state.database.session() as session:
        if attempt is None:
            await find_run(session, run)
            rows = await session.scalars(
                select(CommandRow).where(CommandRow.run_id == run).order_by(CommandRow.id))
            return [to_command(row) for row in rows]
        found = await session.get(Attempt, attempt)
        if found is None:
            raise Refused(409, f"attempt {attempt[:64]!r} is unknown; say hello first", missing="attempt")
        commands, news = await deliver(session, found)
    if news:
        request.app.state.changes.notify(found.run_id)
    return commands


@router.post("/runs/{run}/commands", status_code=201, openapi_extra=described(NewCommand))
async def post_command(
    run: str, new: Annotated[NewCommand, written(NewCommand)], request: Request
) -> Command:
    """Ask a running job to change a precision."""
    async with request.app.state.database.session() as session:
        origin = await _newest(session, run)
        if not origin.remote_control:
            raise Refused(409, f"run {run} does not take commands; its probe must be attached with "
                               "remote_control=True")
        reason = cleaned(new.reason, limit=REASON_LIMIT)
        row = await issue(session, origin, new.action, issued_by="user", reason=reason)
        why = f": {row.reason}" if row.reason else ""
        record(session, origin, "command", listed(new.action.modules),
               f"command {row.id} asks for {new.action.precision}{why}")
    request.app.state.changes.notify(run)
    return to_command(row)


async def find_run(session: AsyncSession, run_id: str, *, lock: bool = False) -> Run:
    """The run called `run_id`, or 404 with near misses."""
    run = await session.get(Run, run_id, with_for_update={"key_share": True} if lock else None)
    if run is None:
        raise await unknown_run(session, run_id)
    return run


async def read_switchable(session: AsyncSession, run: str) -> frozenset[str]:
    """The layers of a run that can be switched; where there is none, 422 that says why and what to do."""
    rows = list(await session.scalars(select(PrecisionRow).where(PrecisionRow.run_id == run)
                                      .order_by(PrecisionRow.module)))
    if not rows:
        raise Refused(422, f"modules: run {run} has told of no layers yet; a rule or a command can name some "
                           f"once its probe has, see /api/v1/runs/{run}/layers", near=[])
    if found := frozenset(row.module for row in rows if row.switchable):
        return found
    first = next((row for row in rows if row.reason), None)
    why = f", as {first.module}: {first.reason}" if first else ""
    raise Refused(422, f"modules: none of the {len(rows)} layers of run {run} can be switched{why}; only "
                       "FP8 layers with a set_precision can, as those of fp8scope train; in a plain "
                       "layer, around which a what-if is measured, nothing can be switched", near=[])


async def issue(
    session: AsyncSession, origin: Origin, action: SetPrecision, *, issued_by: str, reason: str,
    expires_step: int | None = None,
) -> CommandRow:
    """Add a command for the origin's attempt. The run's row must be locked, since ids grow by one."""
    switchable = await read_switchable(session, origin.run_id)
    for module in action.modules:
        if module not in switchable:
            raise UnknownName("modules", module, switchable)
    newest = await session.scalar(
        select(func.max(CommandRow.id)).where(CommandRow.run_id == origin.run_id)) or 0
    row = CommandRow(
        run_id=origin.run_id, id=newest + 1, attempt_id=origin.attempt_id, action=msgspec.to_builtins(action),
        issued_by=issued_by, reason=reason, state="queued", issued_step=origin.step,
        expires_step=expires_step, steps_by_rank=[], answer="", reports={})
    session.add(row)
    await session.execute(
        update(PrecisionRow).values(requested=action.precision)
        .where(PrecisionRow.run_id == origin.run_id, PrecisionRow.module.in_(action.modules)))
    await session.flush()
    return row


async def deliver(session: AsyncSession, attempt: Attempt) -> tuple[list[Command], bool]:
    """Commands this attempt has still to answer, now delivered, and whether one is new to it."""
    rows = list(await session.scalars(
        select(CommandRow).where(CommandRow.attempt_id == attempt.id, CommandRow.state.not_in(FINAL_STATES))
        .order_by(CommandRow.id).with_for_update()))
    news = [row for row in rows if row.state == "queued"]
    for row in news:
        row.state = "delivered"
    return [to_command(row) for row in rows], bool(news)


async def waiting(session: AsyncSession, attempt_id: str) -> int:
    """Highest id of the commands that the attempt has still to answer; 0 when there is none."""
    return await session.scalar(
        select(func.max(CommandRow.id))
        .where(CommandRow.attempt_id == attempt_id, CommandRow.state.not_in(FINAL_STATES))) or 0


def to_command(row: CommandRow) -> Command:
    """The row as the protocol has it."""
    names = ("id", "issued_by", "reason", "state", "issued_step", "expires_step", "applied_step", "answer")
    fields: dict[str, Any] = {name: getattr(row, name) for name in names}
    return Command(**fields, action=msgspec.convert(row.action, SetPrecision),
                   steps_by_rank=tuple(row.steps_by_rank))


async def _newest(session: AsyncSession, run_id: str) -> Origin:
    """The newest attempt of a run, which is locked, at the newest step it sent."""
    run = await find_run(session, run_id, lock=True)
    attempt = await session.scalar(
        select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.number.desc()).limit(1))
    if attempt is None:
        raise Refused(409, f"run {run_id} has no attempt")
    step = await session.scalar(
        select(func.max(Producer.last_step)).where(Producer.attempt_id == attempt.id)) or 0
    return Origin(run_id=run.id, attempt_id=attempt.id, producer="", step=max(step, 0), every=run.every,
                  remote_control=run.remote_control)
