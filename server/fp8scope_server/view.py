"""Which attempt supplies which steps.

A run that crashes at step 15 and resumes from its checkpoint at 10 has steps 10 to 15 twice. In the
default view the newest attempt wins from its first step on; older attempts supply what came before. So
each step belongs to one attempt, and a line over steps never turns back. Any single attempt can be
viewed alone.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, false, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from fp8scope_protocol.errors import UnknownName
from fp8scope_server.models import Attempt, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The steps that one attempt supplies: all, or those before `before`."""

    attempt: str
    number: int
    before: int | None
    hello: dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """Parts, newest attempt first."""

    parts: tuple[Part, ...]

    def covers(
        self, attempt: InstrumentedAttribute[str], step: InstrumentedAttribute[int]
    ) -> ColumnElement[bool]:
        """The condition that a row with these columns is in the view."""
        return or_(false(), *(
            attempt == part.attempt if part.before is None
            else and_(attempt == part.attempt, step < part.before)
            for part in self.parts))

    @property
    def every(self) -> int:
        """Steps between two full measurements: the longest of the parts, at least 1."""
        return max([1, *(int(part.hello.get("every", 1)) for part in self.parts)])


async def read_view(session: AsyncSession, run: str, attempt: int | None = None) -> View:
    """The default view of a run, or that of one attempt by its number."""
    first = (select(func.min(Step.step)).where(Step.run_id == run, Step.attempt_id == Attempt.id)
             .correlate(Attempt).scalar_subquery().label("first"))
    statement = (select(Attempt.id, Attempt.number, Attempt.hello, first).where(Attempt.run_id == run)
                 .order_by(Attempt.number.desc()))
    parts: list[Part] = []
    before: int | None = None
    rows = (await session.execute(statement)).all()
    for row in rows:
        if attempt is None:
            parts.append(Part(attempt=row.id, number=row.number, before=before, hello=row.hello))
            if row.first is not None:
                before = row.first if before is None else min(before, row.first)
        elif attempt == row.number:
            parts.append(Part(attempt=row.id, number=row.number, before=None, hello=row.hello))
    if attempt is not None and not parts:
        raise UnknownName("attempt", str(attempt), (str(row.number) for row in rows))
    return View(tuple(parts))
