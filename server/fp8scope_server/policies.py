"""A run's rules, as people read and write them."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.rule_check import check_rule
from fp8scope_protocol.rules import Rule
from fp8scope_protocol.series import matching_names
from fp8scope_server.body import described, written
from fp8scope_server.commands import find_run, read_switchable
from fp8scope_server.models import RuleRow
from fp8scope_server.problems import Refused

router = APIRouter(prefix="/api/v1")


@router.get("/runs/{run}/rules")
async def get_rules(run: str, request: Request) -> list[Rule]:
    """All rules of a run, by name."""
    async with request.app.state.database.session() as session:
        await find_run(session, run)
        rows = await session.scalars(select(RuleRow).where(RuleRow.run_id == run).order_by(RuleRow.name))
        return [msgspec.convert(row.body, Rule) for row in rows]


@router.get("/runs/{run}/rules/{name}")
async def get_rule(run: str, name: str, request: Request) -> Rule:
    """One rule."""
    async with request.app.state.database.session() as session:
        await find_run(session, run)
        return msgspec.convert((await _find_rule(session, run, name)).body, Rule)


@router.put("/runs/{run}/rules/{name}", openapi_extra=described(Rule))
async def put_rule(run: str, name: str, rule: Annotated[Rule, written(Rule)], request: Request) -> Rule:
    """Create or replace a rule. It must be able to fire, on a layer that can be switched."""
    if rule.name != name:
        raise Invalid("name", rule.name, f"must be the name in the address, {name!r}")
    check_rule(rule)
    async with request.app.state.database.session() as session:
        await find_run(session, run)
        switchable = await read_switchable(session, run)
        if not matching_names(rule.modules, switchable):
            raise UnknownName("modules", rule.modules, switchable)
        body = msgspec.to_builtins(rule)
        row = await session.get(RuleRow, (run, name), with_for_update=True)
        if row is None:
            session.add(RuleRow(run_id=run, name=name, body=body, state={}))
        else:
            row.body, row.state = body, _without_windows(row.state)
    request.app.state.changes.notify(run)
    return rule


@router.delete("/runs/{run}/rules/{name}", status_code=204)
async def delete_rule(run: str, name: str, request: Request) -> Response:
    """Forget a rule. Layers that it sent to BF16 stay there until a person takes them back."""
    async with request.app.state.database.session() as session:
        await find_run(session, run)
        await session.delete(await _find_rule(session, run, name))
    request.app.state.changes.notify(run)
    return Response(status_code=204)


async def _find_rule(session: AsyncSession, run: str, name: str) -> RuleRow:
    row = await session.get(RuleRow, (run, name), with_for_update=True)
    if row is None:
        near = UnknownName("rule", name, await session.scalars(
            select(RuleRow.name).where(RuleRow.run_id == run)))
        raise Refused(404, str(near), near=near.near)
    return row


def _without_windows(state: dict[str, Any]) -> dict[str, Any]:
    """A rule's state for new conditions: it still knows which layers it holds, not what it counted."""
    return {
        producer: {**kept, "layers": {
            module: {**layer, "enter_window": (), "leave_window": ()}
            for module, layer in kept["layers"].items()}}
        for producer, kept in state.items()
    }
