"""Rules applied to what just arrived, in the transaction that stores it.

A run's rules are locked while they are judged, so two producers cannot decide on the same state. What is
judged is the newest attempt's new steps: a replay, an older attempt or a sample more than STALE_CADENCES
old changes nothing. A rule keeps one state per producer, since each brings its own layers; its budget
counts within a producer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.commands import Precision, SetPrecision
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.rules import Condition, Decision, LayerState, Rule, RuleState, Status, evaluate
from fp8scope_protocol.series import matching_names
from fp8scope_protocol.wire import is_missing
from fp8scope_server.commands import issue
from fp8scope_server.events import Origin, listed, record
from fp8scope_server.layouts import KnownLayout, Side
from fp8scope_server.models import Event, PrecisionRow, Producer, RuleRow

STALE_CADENCES = 10
"""Samples older than this many cadences cause nothing, and a rule's command expires after as many."""

Arrays = Mapping[str, npt.NDArray[np.generic]]


async def judge(session: AsyncSession, origin: Origin, known: KnownLayout, arrays: Arrays) -> None:
    """Let every rule of the run judge one sampled step of its newest attempt."""
    rows = await lock_rules(session, origin.run_id)
    if not rows or await _is_stale(session, origin):
        return
    modules = list(await session.scalars(
        select(PrecisionRow.module)
        .where(PrecisionRow.run_id == origin.run_id, PrecisionRow.producer == origin.producer,
               PrecisionRow.switchable)
        .order_by(PrecisionRow.module)))
    for row in rows:
        rule = msgspec.convert(row.body, Rule)
        conditions = rule.enter.conditions + (rule.leave.conditions if rule.leave else ())
        samples = {module: sample(conditions, known.columns.get(module, {}), arrays)
                   for module in matching_names(rule.modules, modules)}
        if not samples:
            continue
        after, decisions = evaluate(rule, state_of(row, origin.producer), attempt=origin.attempt_id,
                                    step=origin.step, samples=samples)
        keep_state(row, origin.producer, after)
        await _act(session, origin, rule, decisions, after, held_by_others(rows, row, origin))


async def lock_rules(session: AsyncSession, run_id: str) -> Sequence[RuleRow]:
    """The run's rules, by name, locked until the transaction ends."""
    return (await session.scalars(
        select(RuleRow).where(RuleRow.run_id == run_id).order_by(RuleRow.name).with_for_update())).all()


def state_of(row: RuleRow, producer: str) -> RuleState:
    """What a rule remembers of one producer's layers."""
    return msgspec.convert(row.state.get(producer, {}), RuleState)


def keep_state(row: RuleRow, producer: str, state: RuleState) -> None:
    """Write a state back into its (locked) row."""
    row.state = {**row.state, producer: msgspec.to_builtins(state)}


def held_by_others(rows: Sequence[RuleRow], row: RuleRow, origin: Origin) -> dict[str, str]:
    """Layers that other automatic rules hold in BF16, each with the name of one such rule."""
    held: dict[str, str] = {}
    for other in rows:
        state = state_of(other, origin.producer)
        if other is not row and other.body["mode"] == "auto" and state.attempt == origin.attempt_id:
            held |= {name: other.name for name, layer in state.layers.items() if layer.status != "fp8"}
    return held


def sample(conditions: Sequence[Condition], columns: Mapping[Side, tuple[int, ...]],
           arrays: Arrays) -> dict[tuple[str, str, str], float]:
    """The numbers of one layer that `conditions` ask for; the worst where several series speak for it."""
    found = {}
    for one in conditions:
        chosen = columns.get((one.role, one.orientation))
        if not chosen or one.metric not in arrays:
            continue
        values = arrays[one.metric][0, list(chosen)]
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
            values = values[~is_missing(values)].astype(np.float64)
        if values.size:
            worst = values.min() if METRICS[one.metric].worse == "low" else values.max()
            found[one.metric, one.role, one.orientation] = float(worst)  # min and max give NaN for any NaN
    return found


async def _is_stale(session: AsyncSession, origin: Origin) -> bool:
    newest = await session.scalar(
        select(func.max(Producer.last_step)).where(Producer.attempt_id == origin.attempt_id))
    return newest is not None and origin.step < newest - STALE_CADENCES * origin.every


async def _act(session: AsyncSession, origin: Origin, rule: Rule, decisions: Sequence[Decision],
               state: RuleState, held: Mapping[str, str]) -> None:
    """Record what a rule decided, and ask the job for it where the rule and the run allow that."""
    wishes: dict[Precision, list[str]] = {}
    for one in decisions:
        if one.precision is None:
            await _alert_only(session, origin, rule, one, state.layers[one.module])
            continue
        if one.precision == "bf16":
            record(session, origin, "alert", one.module, f"{rule.name}: {one.why}")
        if one.precision == "fp8" and one.module in held:
            record(session, origin, "decision", one.module,
                   f"{rule.name} would take it back to fp8, but {held[one.module]} holds it in bf16")
            continue
        wishes.setdefault(one.precision, []).append(one.module)
    why = {one.module: one.why for one in decisions}
    for precision, modules in wishes.items():
        await _ask(session, origin, rule, precision, modules, why[modules[0]])


async def _ask(session: AsyncSession, origin: Origin, rule: Rule, precision: Precision,
               modules: list[str], why: str) -> None:
    if rule.mode == "dry-run":
        text = f"dry-run of {rule.name}: {listed(modules)} would go to {precision}: {why}"
    elif not origin.remote_control:
        text = f"{rule.name} cannot send {listed(modules)} to {precision}, the run takes no commands: {why}"
    else:
        row = await issue(
            session, origin, SetPrecision(modules=tuple(modules), precision=precision),
            issued_by=f"rule:{rule.name}", reason=why,
            expires_step=origin.step + STALE_CADENCES * origin.every)
        text = f"{rule.name} sends {listed(modules)} to {precision} (command {row.id}): {why}"
    record(session, origin, "decision", listed(modules), text)


async def _alert_only(session: AsyncSession, origin: Origin, rule: Rule, decision: Decision,
                      layer: LayerState) -> None:
    """An alert without a wish: the layer is stuck, or the budget spent. The second recurs at every sample
    until something changes, so it is said once per cool-down."""
    if layer.status == "stuck":
        record(session, origin, "stuck", decision.module, f"{rule.name}: {decision.why}")
        return
    said = await session.scalar(
        select(func.max(Event.step)).where(
            Event.run_id == origin.run_id, Event.attempt_id == origin.attempt_id, Event.kind == "alert",
            Event.name == decision.module, Event.text.startswith(f"{rule.name}: ", autoescape=True)))
    if said is None or origin.step - said > max(rule.cooldown_steps, origin.every):
        record(session, origin, "alert", decision.module, f"{rule.name}: {decision.why}")


async def undo(session: AsyncSession, origin: Origin, rule_name: str, action: dict[str, Any]) -> None:
    """A rule's command did not come to pass: let the rule remember what its layers really run in.

    The step of the failure counts as that of the last change, so the rule waits before it asks again.
    """
    row = next((one for one in await lock_rules(session, origin.run_id) if one.name == rule_name), None)
    if row is None:
        return
    state = state_of(row, origin.producer)
    if state.attempt != origin.attempt_id:
        return
    believed: Status = action["precision"]
    really: Status = "fp8" if believed == "bf16" else "bf16"
    layers = {
        module: LayerState(status=really, since_step=origin.step, switches=layer.switches)
        if module in action["modules"] and layer.status == believed else layer
        for module, layer in state.layers.items()
    }
    keep_state(row, origin.producer,
               RuleState(attempt=state.attempt, last_step=state.last_step, layers=layers))
