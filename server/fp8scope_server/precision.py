"""What every layer ran in at every step: what its attempt said at its start, then each applied switch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.series import Series
from fp8scope_server.models import CommandRow
from fp8scope_server.view import View

IN_BF16 = ("bf16", "shadow")


@dataclass(frozen=True, slots=True)
class History:
    """(attempt, module) -> switches as (step, precision), ascending; a switch counts from its step on."""

    switches: dict[tuple[str, str], list[tuple[int, str]]]

    def at(self, attempt: str, module: str, step: int) -> str:
        """The precision of a layer at a step; empty where nothing is known of the layer."""
        known = self.switches.get((attempt, module), [])
        return next((precision for since, precision in reversed(known) if since <= step), "")

    def bf16_marks(
        self, series: Sequence[Series], steps: npt.NDArray[np.int64], attempts: Sequence[str]
    ) -> npt.NDArray[np.bool_]:
        """True where the layer of a live series ran in BF16: [steps, series].

        A what-if series is never marked: its format is not what the layer runs in anyway.
        """
        marks = np.zeros((len(steps), len(series)), dtype=np.bool_)
        owner = np.array(attempts)
        module_of = np.array([one.module if one.live else "" for one in series], dtype=np.str_)
        for (attempt, module), switches in self.switches.items():
            columns = np.flatnonzero(module_of == module)
            for i, (since, precision) in enumerate(switches):
                until = switches[i + 1][0] if i + 1 < len(switches) else np.iinfo(np.int64).max
                lines = np.flatnonzero((owner == attempt) & (steps >= since) & (steps < until))
                marks[np.ix_(lines, columns)] = precision in IN_BF16
        return marks


async def read_history(session: AsyncSession, run: str, view: View) -> History:
    """The precision history of the attempts in a view."""
    switches: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for part in view.parts:
        for module in part.hello.get("precision", ()):
            switches[part.attempt, module["name"]].append((0, module["precision"]))
    statement = (
        select(CommandRow.attempt_id, CommandRow.action, CommandRow.applied_step, CommandRow.reports)
        .where(CommandRow.run_id == run, CommandRow.state == "applied", CommandRow.applied_step.is_not(None))
        .order_by(CommandRow.applied_step, CommandRow.id)
    )
    for row in await session.execute(statement):
        said = {report.get("precision") for report in row.reports.values()}
        became = (said.pop() if len(said) == 1 else None) or row.action["precision"]
        for module in row.action["modules"]:
            switches[row.attempt_id, module].append((row.applied_step, became))
    return History(dict(switches))
