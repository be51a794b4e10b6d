"""The series of a run: what its layouts list, put together.

Producers have layouts of their own, and a layout grows when a new layer fires; the same series then sits
in different columns. A run's catalogue gives each series one index, by first appearance, which never
changes afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.documents import SeriesDocument
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.formats import FORMATS
from fp8scope_protocol.series import ORIENTATIONS, ROLES, Layout, Series, decode_layout, matching_names
from fp8scope_server.models import LayoutRow

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which series: each field None takes all. `module` is a pattern over layer and series names."""

    role: str | None = None
    orientation: str | None = None
    format: str | None = None
    module: str | None = None

    def __post_init__(self) -> None:
        for field, known in (("role", ROLES), ("orientation", ORIENTATIONS), ("format", FORMATS)):
            value = getattr(self, field)
            if value is not None and value not in known:
                raise UnknownName(field, value, known)

    def __str__(self) -> str:
        parts = [part for part in (self.role, self.orientation, self.format, self.module) if part]
        return ", ".join(parts) or "all"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """`series[i]` has index i; column j of a frame with layout L holds the series `columns[L][j]`."""

    series: tuple[Series, ...]
    columns: dict[str, Ints]

    def select(self, wanted: Selection) -> list[int]:
        """Indices of the selected series, from input to output."""
        named = self._named(wanted.module)
        found = [
            index for index, one in enumerate(self.series)
            if wanted.role in (None, one.role)
            and wanted.orientation in (None, one.orientation)
            and wanted.format in (None, one.format)
            and (named is None or one.module in named or one.name in named)
        ]
        return sorted(found, key=lambda index: (self.series[index].depth, index))

    def document(self, index: int) -> SeriesDocument:
        """The series at `index`, or `Invalid` naming the range."""
        if not 0 <= index < len(self.series):
            raise Invalid("series", index, f"must be 0 to {len(self.series) - 1}" if self.series
                          else "the run has no series yet")
        one = self.series[index]
        return SeriesDocument(
            index=index, name=one.name, module=one.module, role=one.role, orientation=one.orientation,
            format=one.format, scaling=one.scaling, policy=one.policy, live=one.live, depth=one.depth,
            aliases=list(one.aliases))

    def _named(self, pattern: str | None) -> frozenset[str] | None:
        if pattern is None:
            return None
        names = {one.name for one in self.series} | {one.module for one in self.series if one.module}
        found = frozenset(matching_names(pattern, names))
        if names and not found:
            raise UnknownName("module", pattern, names)
        return found


def merge_layouts(layouts: Sequence[tuple[str, Layout]]) -> Catalogue:
    """The catalogue of (id, layout) pairs, oldest first; a series' attributes are those of the newest."""
    indices: dict[tuple[str, ...], int] = {}
    series: list[Series] = []
    columns: dict[str, Ints] = {}
    for layout_id, layout in layouts:
        for one in layout.series:
            if one.key in indices:
                series[indices[one.key]] = one
            else:
                indices[one.key] = len(series)
                series.append(one)
        columns[layout_id] = np.array([indices[one.key] for one in layout.series], dtype=np.int64)
    return Catalogue(tuple(series), columns)


async def read_catalogue(session: AsyncSession, run: str) -> Catalogue:
    """The catalogue of a run; empty before its first layout."""
    statement = (select(LayoutRow.id, LayoutRow.body).where(LayoutRow.run_id == run)
                 .order_by(LayoutRow.created_at, LayoutRow.id))
    rows = (await session.execute(statement)).all()
    return merge_layouts([(row.id, decode_layout(row.body)) for row in rows])
