"""Layouts as the collector uses them: stored per run, decoded once."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.errors import BrokenMessage, Invalid
from fp8scope_protocol.series import Layout, decode_layout, encode_layout
from fp8scope_server.models import LayoutRow

Side = tuple[str, str]
"""(role, orientation) of a layer's tensor."""


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A layout, and for each module the columns that speak for it."""

    layout: Layout
    columns: dict[str, dict[Side, tuple[int, ...]]]


class Layouts:
    """The layouts decoded last, by content hash: the same one serves any number of runs."""

    def __init__(self, *, keep: int = 64) -> None:
        self._keep = keep
        self._known: OrderedDict[str, KnownLayout] = OrderedDict()

    async def find(self, session: AsyncSession, run_id: str, layout_id: str) -> KnownLayout | None:
        """The layout if this run has it."""
        of_run = (LayoutRow.run_id == run_id, LayoutRow.id == layout_id)
        if layout_id in self._known:
            if await session.scalar(select(LayoutRow.size).where(*of_run)) is None:
                return None
        else:
            body = await session.scalar(select(LayoutRow.body).where(*of_run))
            if body is None:
                return None
            self._known[layout_id] = await asyncio.to_thread(_know, body)
            while len(self._known) > self._keep:
                self._known.popitem(last=False)
        self._known.move_to_end(layout_id)
        return self._known[layout_id]


def parse_layout(body: bytes, layout_id: str) -> Layout:
    """The layout in `body`; `BrokenMessage` if it is none, or not the one called `layout_id`."""
    try:
        layout = decode_layout(body)
    except (msgspec.DecodeError, Invalid, ValueError) as error:
        raise BrokenMessage(f"not a layout: {error}") from None
    if layout.id != layout_id:
        raise BrokenMessage(f"this layout is {layout.id}, not {layout_id[:64]!r}")
    return layout


async def store_layout(session: AsyncSession, run_id: str, layout: Layout) -> None:
    """Keep a layout for a run; again is fine."""
    row = {"run_id": run_id, "id": layout.id, "size": len(layout.series), "body": encode_layout(layout)}
    await session.execute(insert(LayoutRow).values(row).on_conflict_do_nothing())


def _know(body: bytes) -> KnownLayout:
    layout = decode_layout(body)
    return KnownLayout(layout, columns_by_module(layout))


def columns_by_module(layout: Layout) -> dict[str, dict[Side, tuple[int, ...]]]:
    """Which series stand for a layer when it is judged: what it really runs, else the first what-if.

    A side may have several series (a layer with two parameters); those of one format are kept together.
    """
    chosen: dict[str, dict[Side, list[int]]] = {}
    for live in (True, False):
        for i, one in enumerate(layout.series):
            if one.live != live or not one.module:
                continue
            columns = chosen.setdefault(one.module, {}).setdefault((one.role, one.orientation), [])
            first = layout.series[columns[0]] if columns else one
            if (first.live, first.format, first.scaling) == (live, one.format, one.scaling):
                columns.append(i)
    return {module: {side: tuple(found) for side, found in sides.items()} for module, sides in chosen.items()}
