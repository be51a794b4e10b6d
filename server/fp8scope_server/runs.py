"""Runs as documents: the list, one run, its layers and its events."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.documents import AttemptDocument, EventDocument, LayerDocument, Number, RunDocument
from fp8scope_protocol.errors import UnknownName
from fp8scope_server.models import Attempt, BatchRow, Event, PrecisionRow, Producer, RuleRow, Run, Step
from fp8scope_server.precision import IN_BF16
from fp8scope_server.problems import Refused

ACTIVE = timedelta(minutes=1)
"""A run is active while something arrived within this time."""

_LOSS_LOOKBACK = 64
"""Newest steps among which the newest loss is looked for."""


async def read_runs(session: AsyncSession, *, limit: int) -> list[RunDocument]:
    """The newest runs, newest first."""
    ids = await session.scalars(select(Run.id).order_by(Run.created_at.desc(), Run.id.desc()).limit(limit))
    return await _documents(session, ids.all())


async def read_run(session: AsyncSession, run: str) -> RunDocument:
    """One run, or 404 naming near misses."""
    documents = await _documents(session, [run])
    if not documents:
        raise await unknown_run(session, run)
    return documents[0]


async def unknown_run(session: AsyncSession, run: str) -> Refused:
    """The refusal for a run that does not exist."""
    newest = select(Run.id).order_by(Run.created_at.desc()).limit(1000)
    known = (await session.scalars(newest)).all()
    if not known:
        return Refused(404, f"run = {run[:256]!r}: this collector has no run yet; one begins when a probe "
                            "attaches and reaches it", near=[])
    error = UnknownName("run", run[:256], known)
    return Refused(404, str(error), near=error.near)


async def read_last_step(session: AsyncSession, run: str) -> int | None:
    """The newest step of the newest attempt that has one."""
    newest = _newest((await _attempts(session, [run]))[run])
    return newest.last_step if newest else None


async def read_layers(session: AsyncSession, run: str) -> list[LayerDocument]:
    """What every layer of the newest attempt runs in, by name."""
    rows = await session.scalars(
        select(PrecisionRow).where(PrecisionRow.run_id == run).order_by(PrecisionRow.module))
    return [LayerDocument(name=row.module, running=row.running, switchable=row.switchable, reason=row.reason,
                          since_step=row.since_step) for row in rows]


async def read_events(
    session: AsyncSession, run: str, *, after: int | None, limit: int
) -> list[EventDocument]:
    """Events in their order: the oldest ones after id `after`, or the newest ones without it."""
    statement = (select(Event, Attempt.number).join(Attempt, Attempt.id == Event.attempt_id)
                 .where(Event.run_id == run).limit(limit))
    if after is None:
        statement = statement.order_by(Event.id.desc())
    else:
        statement = statement.where(Event.id > after).order_by(Event.id)
    rows = sorted((await session.execute(statement)).all(), key=lambda row: row.Event.id)
    return [EventDocument(id=event.id, step=event.step, at=event.at.isoformat(), kind=event.kind,
                          name=event.name, text=event.text, attempt=number) for event, number in rows]


async def read_firing(session: AsyncSession, runs: Sequence[str]) -> Mapping[str, int]:
    """Per run, the layers that a rule holds out of FP8 in the newest attempt."""
    attempts = await session.execute(
        select(Attempt.run_id, Attempt.id).where(Attempt.run_id.in_(runs)).order_by(Attempt.number))
    newest = {row.run_id: row.id for row in attempts}
    rows = await session.execute(select(RuleRow.run_id, RuleRow.state).where(RuleRow.run_id.in_(runs)))
    firing: Counter[str] = Counter()
    for run, states in rows:
        for state in states.values():
            if state["attempt"] == newest[run]:
                firing[run] += sum(one["status"] != "fp8" for one in state["layers"].values())
    return firing


async def _documents(session: AsyncSession, ids: Sequence[str]) -> list[RunDocument]:
    """The documents of those of `ids` that exist, in their order."""
    active = (Run.last_seen_at > func.now() - ACTIVE).label("active")
    rows = {run.id: (run, live) for run, live in await session.execute(
        select(Run, active).where(Run.id.in_(ids)))}
    attempts = await _attempts(session, ids)
    stored = await _stored(session, ids)
    lost = await read_lost(session, ids)
    layers = await read_layer_counts(session, ids)
    firing = await read_firing(session, ids)
    documents = []
    for run, live in (rows[run_id] for run_id in ids if run_id in rows):
        newest = _newest(attempts[run.id])
        batches, samples = stored[run.id]
        documents.append(RunDocument(
            id=run.id, name=run.name, created_at=run.created_at.isoformat(),
            last_seen_at=run.last_seen_at.isoformat(), active=live,
            last_step=newest.last_step if newest else None,
            loss=await _loss(session, run.id, newest.id) if newest else None,
            layers=layers[run.id][0], layers_in_bf16=layers[run.id][1], samples=samples, batches=batches,
            lost=lost[run.id], firing=firing[run.id], every=run.every, remote_control=run.remote_control,
            attempts=attempts[run.id], facts={key: str(value) for key, value in run.facts.items()}))
    return documents


def _newest(attempts: Sequence[AttemptDocument]) -> AttemptDocument | None:
    """The newest attempt that has a step."""
    return next((one for one in reversed(attempts) if one.last_step is not None), None)


async def _stored(session: AsyncSession, runs: Sequence[str]) -> Mapping[str, tuple[int, int]]:
    """Per run, its batches and the values in them."""
    rows = await session.execute(
        select(BatchRow.run_id, func.count(), func.sum(BatchRow.samples))
        .where(BatchRow.run_id.in_(runs)).group_by(BatchRow.run_id))
    return defaultdict(lambda: (0, 0), {run: (batches, int(samples)) for run, batches, samples in rows})


async def _attempts(session: AsyncSession, runs: Sequence[str]) -> dict[str, list[AttemptDocument]]:
    """Attempts of each run, oldest first."""
    first = (select(func.min(Step.step)).where(Step.run_id == Attempt.run_id, Step.attempt_id == Attempt.id)
             .correlate(Attempt).scalar_subquery().label("first"))
    statement = (
        select(Attempt.run_id, Attempt.id, Attempt.number, Attempt.started_at, first,
               func.count(Producer.producer).label("producers"), func.max(Producer.last_step).label("last"),
               func.min(Producer.clock_ahead_s).label("behind"),
               func.max(Producer.clock_ahead_s).label("ahead"))
        .outerjoin(Producer, Producer.attempt_id == Attempt.id)
        .where(Attempt.run_id.in_(runs)).group_by(Attempt.id).order_by(Attempt.number)
    )
    found: dict[str, list[AttemptDocument]] = defaultdict(list)
    for row in await session.execute(statement):
        last = None if row.last is None or row.last < 0 else row.last
        found[row.run_id].append(AttemptDocument(
            id=row.id, number=row.number, started_at=row.started_at.isoformat(), producers=row.producers,
            first_step=row.first, last_step=last,
            clock_ahead_s=max((row.behind, row.ahead), key=abs) if row.ahead is not None else None))
    return found


async def read_lost(session: AsyncSession, runs: Sequence[str]) -> Mapping[str, dict[str, int]]:
    """Per run, the batches its probes lost over all attempts, by reason."""
    lost: dict[str, Counter[str]] = defaultdict(Counter)
    for row in await session.execute(
            select(Producer.run_id, Producer.lost).where(Producer.run_id.in_(runs))):
        lost[row.run_id].update(row.lost)
    return defaultdict(dict, {run: dict(counts) for run, counts in lost.items()})


async def read_layer_counts(session: AsyncSession, runs: Sequence[str]) -> Mapping[str, tuple[int, int]]:
    """Per run, its layers and how many of them run in BF16."""
    bf16 = func.count().filter(PrecisionRow.running.in_(IN_BF16)).label("bf16")
    rows = await session.execute(
        select(PrecisionRow.run_id, func.count().label("layers"), bf16)
        .where(PrecisionRow.run_id.in_(runs)).group_by(PrecisionRow.run_id))
    return defaultdict(lambda: (0, 0), {row.run_id: (row.layers, row.bf16) for row in rows})


async def _loss(session: AsyncSession, run: str, attempt: str) -> Number:
    """The newest loss of an attempt, of whichever producer knows it."""
    rows = await session.scalars(
        select(Step.sentinels).where(Step.run_id == run, Step.attempt_id == attempt)
        .order_by(Step.step.desc()).limit(_LOSS_LOOKBACK))
    return next((sentinels["loss"] for sentinels in rows if sentinels.get("loss") is not None), None)
