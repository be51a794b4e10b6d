"""Hello: a producer opens an attempt of a run."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from sqlalchemy import delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.commands import FINAL_STATES
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.wire import Hello, check_run, decode_hello
from fp8scope_server.models import Attempt, CommandRow, PrecisionRow, Producer, Run
from fp8scope_server.text import checked, cleaned

router = APIRouter(prefix="/api/v1")

_HELLO_LOCK = 0x66703868  # hellos take turns: they are rare, and number attempts and name runs


@router.post("/runs/{run}/attempts")
async def post_attempt(run: str, request: Request) -> dict[str, str | int]:
    """Open an attempt (body: an encoded Hello); saying hello again changes nothing."""
    state = request.app.state
    async with state.intake.body(request) as body:
        hello = _check(decode_hello(body))
        if hello.run != run:
            raise Invalid("run", hello.run[:80], f"must be the run of the address, {run[:80]!r}")
        async with state.intake.writing, state.database.session() as session:
            attempt = await open_attempt(session, hello)
    state.changes.notify(attempt.run_id)
    return {"run": attempt.run_id, "attempt": attempt.number}


async def open_attempt(session: AsyncSession, hello: Hello) -> Attempt:
    """The attempt that `hello` opens or belongs to, with its producer and its precision map."""
    await session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _HELLO_LOCK})
    attempt = await session.get(Attempt, hello.attempt)
    if attempt is None:
        attempt = await _new_attempt(session, hello, await _run_for(session, hello))
    producer = {"attempt_id": attempt.id, "producer": hello.producer, "run_id": attempt.run_id, "lost": {}}
    added = await session.scalar(
        insert(Producer).values(producer).on_conflict_do_nothing().returning(Producer.producer))
    if added is None:
        return attempt
    if attempt.hello["producer"] != hello.producer:  # one hello describes the attempt as a whole
        said: dict[str, Any] = msgspec.to_builtins(hello)
        joint = {key: [*attempt.hello[key], *said[key]] for key in ("precision", "unobserved")}
        attempt.hello = attempt.hello | joint
    newest = await session.scalar(select(func.max(Attempt.number)).where(Attempt.run_id == attempt.run_id))
    if attempt.number == newest:
        await _store_precision(session, attempt.run_id, hello)
    return attempt


async def _run_for(session: AsyncSession, hello: Hello) -> Run:
    """The newest run of that name for a resumed job, else a new one."""
    if hello.resume:
        newest = select(Run).where(Run.name == hello.run).order_by(Run.created_at.desc(), Run.id).limit(1)
        if run := await session.scalar(newest):
            run.every, run.remote_control = hello.every, hello.remote_control
            run.facts = run.facts | hello.facts
            return run
    run = Run(id=await _free_id(session, hello.run), name=hello.run, every=hello.every,
              remote_control=hello.remote_control, facts=hello.facts)
    session.add(run)
    await session.flush()
    return run


async def _free_id(session: AsyncSession, name: str) -> str:
    taken = set(await session.scalars(select(Run.id).where(Run.id.startswith(name, autoescape=True))))
    candidates = (name if n == 1 else f"{name}-{n}" for n in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)


async def _new_attempt(session: AsyncSession, hello: Hello, run: Run) -> Attempt:
    """Add an attempt to `run`. What was asked of earlier attempts, or known of their layers, is over."""
    earlier = await session.scalar(select(func.count()).where(Attempt.run_id == run.id)) or 0
    attempt = Attempt(id=hello.attempt, run_id=run.id, number=earlier + 1, hello=msgspec.to_builtins(hello))
    session.add(attempt)
    await session.flush()
    await session.execute(delete(PrecisionRow).where(PrecisionRow.run_id == run.id))
    await session.execute(
        update(CommandRow).where(CommandRow.run_id == run.id, CommandRow.state.not_in(FINAL_STATES))
        .values(state="expired", answer=f"the run went on as attempt {attempt.number}"))
    return attempt


async def _store_precision(session: AsyncSession, run_id: str, hello: Hello) -> None:
    if not hello.precision:
        return
    rows = [{"run_id": run_id, "module": one.name, "producer": hello.producer, "running": one.precision,
             "switchable": one.switchable, "reason": one.reason} for one in hello.precision]
    statement = insert(PrecisionRow)
    new = {name: statement.excluded[name] for name in ("producer", "running", "switchable", "reason")}
    await session.execute(
        statement.on_conflict_do_update(index_elements=["run_id", "module"], set_=new), rows)


def _check(hello: Hello) -> Hello:
    """`hello` with its prose cleaned; `Invalid` where a name or a number cannot be used."""
    check_run(hello.run)
    checked("attempt", hello.attempt, limit=64)
    checked("producer", hello.producer, limit=64)
    for name in ("every", "world_size"):
        if not 0 < getattr(hello, name) < 2**31:
            raise Invalid(name, getattr(hello, name), "must be 1 or more")
    for one in hello.precision:
        checked("precision.name", one.name)
        checked(f"precision of {one.name}", one.precision, limit=32)
    layers = {one.name: msgspec.structs.replace(one, reason=cleaned(one.reason)) for one in hello.precision}
    return msgspec.structs.replace(
        hello,
        host=cleaned(hello.host),
        precision=tuple(layers.values()),
        unobserved=tuple(msgspec.structs.replace(one, name=cleaned(one.name), reason=cleaned(one.reason))
                         for one in hello.unobserved),
        facts={cleaned(key): cleaned(value) for key, value in hello.facts.items()},
    )
