"""Commands on their way into the job, and the answers on their way back.

Only rank 0 talks to the collector. What it fetched rides in the merge of the next step, so all ranks learn
of a command in the same step n and apply it at the boundary of step n + 2.
"""

import threading
from collections.abc import Iterable, Sequence

from fp8scope.precision import joint
from fp8scope_protocol.commands import Command, CommandReport

DELAY = 2
"""Steps between the merge that carries a command and the boundary at which it is applied."""


class Inbox:
    """Commands that rank 0 has fetched and not yet handed to the ranks. Each id is handed out once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Command] = {}
        self._known = 0

    @property
    def known(self) -> int:
        """Highest id seen so far."""
        return self._known

    def add(self, commands: Iterable[Command]) -> None:
        """Keep what is new; ids only grow, so an id at or below `known` was here before."""
        with self._lock:
            new = [command for command in commands if command.id > self._known]
            self._waiting.update((command.id, command) for command in new)
            self._known = max([self._known, *(command.id for command in new)])

    def take(self, step: int) -> tuple[tuple[Command, ...], tuple[CommandReport, ...]]:
        """Commands to apply at the boundary of `step` + DELAY, in order, and reports on those too old."""
        with self._lock:
            waiting = [self._waiting[id_] for id_ in sorted(self._waiting)]
            self._waiting.clear()
        boundary = step + DELAY
        due = tuple(one for one in waiting if one.expires_step is None or boundary <= one.expires_step)
        late = tuple(
            CommandReport(
                id=one.id, state="expired", step=boundary,
                reason=f"the first boundary it could be applied at is step {boundary}, over its limit of "
                       f"step {one.expires_step}",
            )
            for one in waiting if one not in due
        )
        return due, late


class Answers:
    """Collects what every rank of the job has to say about a command, until all have spoken.

    `members` are the ranks of this producer, which reports for them. A command that no rank has a layer of is
    for `first`, the producer of the job's first rank, to reject.
    """

    def __init__(self, members: Sequence[int], *, first: bool) -> None:
        self._members = members
        self._first = first
        self._heard: dict[int, dict[int, CommandReport]] = {}
        self._owned: dict[int, set[int]] = {}

    def add(
        self, by_rank: Sequence[Sequence[CommandReport]], passed: Sequence[Sequence[CommandReport]]
    ) -> tuple[CommandReport, ...]:
        """Reports that are now complete: `applied` only if every rank with a layer of it applied it."""
        for rank, reports in enumerate(by_rank):
            for report in (*reports, *passed[rank]):
                self._heard.setdefault(report.id, {})[rank] = report
            for report in reports:
                self._owned.setdefault(report.id, set()).add(rank)
        complete = []
        for id_, heard in sorted(self._heard.items()):
            if len(heard) >= len(by_rank):  # more, after ranks have left
                del self._heard[id_]
                complete += self._of_producer(heard, self._owned.pop(id_, set()), alone=len(by_rank) == 1)
        return tuple(complete)

    def _of_producer(
        self, heard: dict[int, CommandReport], owners: set[int], *, alone: bool
    ) -> list[CommandReport]:
        mine = {rank: heard[rank] for rank in owners if alone or rank in self._members}
        if mine:
            return [_joint(mine)]
        return [_joint(heard)] if self._first and not owners else []


def _joint(heard: dict[int, CommandReport]) -> CommandReport:
    """One report for several ranks; the first rank that did not apply the command decides the state."""
    reports = [heard[rank] for rank in sorted(heard)]
    worst = next((report for report in reports if report.state != "applied"), reports[0])
    steps = tuple(report.step for report in reports)
    return CommandReport(
        id=worst.id, state=worst.state, step=max(steps), steps_by_rank=steps, reason=worst.reason,
        precision=joint(report.precision for report in reports),
    )
