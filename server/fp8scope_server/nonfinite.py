"""NaNs and infinities of each run so far, by role: a counter that is exact and never runs backwards."""

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_server.catalogue import Catalogue
from fp8scope_server.models import Frame, Producer


@dataclass(kw_only=True, slots=True)
class _Tally:
    seen: dict[tuple[str, str], int] = field(default_factory=dict)
    """(attempt, producer) -> highest seq counted."""
    totals: Counter[str] = field(default_factory=Counter)


class NonfiniteTally:
    """Reads each frame once; after a restart it reads them again and comes to the same totals.

    Until then, a batch that arrived after a later one of its producer was counted is left out.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _Tally] = {}
        self._turn = asyncio.Lock()

    async def read(self, session: AsyncSession, run: str, catalogue: Catalogue) -> dict[str, int]:
        """Role -> count up to the newest stored batch; 0 for a role without any."""
        async with self._turn:
            tally = self._runs.setdefault(run, _Tally())
            producers = await session.execute(
                select(Producer.attempt_id, Producer.producer, Producer.last_seq)
                .where(Producer.run_id == run))
            for attempt, producer, last in producers.all():
                after = tally.seen.get((attempt, producer), -1)
                if last > after:
                    frames = select(Frame.layout_id, Frame.values).where(
                        Frame.run_id == run, Frame.attempt_id == attempt, Frame.producer == producer,
                        Frame.seq > after, Frame.seq <= last)
                    tally.totals.update(await _count(session, frames, catalogue))
                    tally.seen[attempt, producer] = last
            return {role: tally.totals[role] for role in sorted({one.role for one in catalogue.series})}

    def keep(self, runs: Collection[str]) -> None:
        """Forget all runs but these."""
        self._runs = {run: tally for run, tally in self._runs.items() if run in runs}


async def _count(
    session: AsyncSession, frames: Select[str, bytes], catalogue: Catalogue
) -> Counter[str]:
    """Role -> NaNs and infinities in `frames`; a tensor that is measured in several formats counts once."""
    first: dict[tuple[str, str], int] = {}
    for index, one in enumerate(catalogue.series):
        first.setdefault((one.name, one.role), index)
    counted = set(first.values())
    statement = frames.where(Frame.metric.in_(("nan_count", "inf_count")),
                             func.btrim(Frame.values, b"\0") != b"")  # most are all zeros: leave those there
    counts: Counter[str] = Counter()
    for layout, values in await session.execute(statement):
        numbers = np.frombuffer(values, dtype="<u8")
        for column in np.flatnonzero(numbers):
            index = int(catalogue.columns[layout][column])
            if index in counted:
                counts[catalogue.series[index].role] += int(numbers[column])
    return counts
