"""What producers say became of a command, and what that makes of the command and the precision map."""

from collections.abc import Sequence

import msgspec
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.commands import FINAL_STATES, CommandReport
from fp8scope_server.events import Origin, listed, record
from fp8scope_server.judge import STALE_CADENCES, undo
from fp8scope_server.models import CommandRow, PrecisionRow
from fp8scope_server.text import cleaned


async def take_reports(session: AsyncSession, origin: Origin, reports: Sequence[CommandReport]) -> None:
    """Keep each report once; a command is applied when every producer that owns a layer of it says so."""
    for report in reports:
        row = await session.get(CommandRow, (origin.run_id, report.id), with_for_update=True)
        if row is None or row.attempt_id != origin.attempt_id or origin.producer in row.reports:
            continue
        row.reports = {**row.reports, origin.producer: msgspec.to_builtins(report)}
        if report.state == "applied":
            await _switch(session, origin, row, report)
        await _settle(session, origin, row, report)


async def expire(session: AsyncSession, origin: Origin) -> int:
    """End commands that the job is long past and never answered; the highest id that waits for it still."""
    rows = (await session.scalars(
        select(CommandRow)
        .where(CommandRow.attempt_id == origin.attempt_id, CommandRow.state.not_in(FINAL_STATES))
        .order_by(CommandRow.id).with_for_update())).all()
    waiting = 0
    for row in rows:
        if row.expires_step is None or origin.step <= row.expires_step + STALE_CADENCES * origin.every:
            waiting = row.id
            continue
        row.state, row.answer = "expired", f"no answer by step {origin.step}"
        await _failed(session, origin, row)
    return waiting


async def _switch(session: AsyncSession, origin: Origin, row: CommandRow, report: CommandReport) -> None:
    """The origin's layers of the command run in something else now; say what really changed."""
    precision = report.precision or row.action["precision"]
    layers = (await session.scalars(
        select(PrecisionRow)
        .where(PrecisionRow.run_id == origin.run_id, PrecisionRow.producer == origin.producer,
               PrecisionRow.module.in_(row.action["modules"]))
        .order_by(PrecisionRow.module))).all()
    for layer in layers:
        if layer.running == precision:
            text = f"command {row.id} changed nothing: it ran in {precision} already"
            record(session, origin, "command", layer.module, text)
            continue
        record(session, origin, "switch", layer.module, step=report.step,
               text=f"{layer.running} -> {precision} (command {row.id} of {row.issued_by})")
        layer.running, layer.since_step, layer.reason = precision, report.step, f"command {row.id}"


async def _settle(session: AsyncSession, origin: Origin, row: CommandRow, report: CommandReport) -> None:
    """The command's state from the reports so far."""
    if report.state != "applied":
        row.state, row.answer = report.state, cleaned(report.reason)
        await _failed(session, origin, row)
        return
    owners = set(await session.scalars(
        select(PrecisionRow.producer)
        .where(PrecisionRow.run_id == origin.run_id, PrecisionRow.module.in_(row.action["modules"]))))
    said = [row.reports[producer] for producer in sorted(row.reports)]
    if owners <= set(row.reports) and all(one["state"] == "applied" for one in said):
        row.state, row.answer = "applied", ""
        row.applied_step = max(one["step"] for one in said)
        row.steps_by_rank = [step for one in said for step in one["steps_by_rank"]]


async def _failed(session: AsyncSession, origin: Origin, row: CommandRow) -> None:
    modules = row.action["modules"]
    record(session, origin, "command", listed(modules),
           f"command {row.id} ({row.action['precision']}) {row.state}: {row.answer}")
    await session.execute(
        update(PrecisionRow).values(requested=None)
        .where(PrecisionRow.run_id == origin.run_id, PrecisionRow.module.in_(modules)))
    kind, _, rule = row.issued_by.partition(":")
    if kind == "rule":
        await undo(session, origin, rule, row.action)
