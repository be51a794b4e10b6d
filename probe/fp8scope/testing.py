"""For tests of a job that uses the probe: keep what it measures in memory, without threads or a collector.

    worker = MemoryWorker()
    with Scope(model, (optimizer,), worker=worker, every=1):
        train()
    assert worker.metrics(0)["fc1", "gradient", "rowwise"]["nan_count"] == 0
"""

from collections import deque
from typing import Any

from fp8scope.derive import derive, derive_sentinels
from fp8scope.sums import StepRecord, StepResult
from fp8scope_protocol.commands import Command
from fp8scope_protocol.wire import is_missing

Metrics = dict[str, Any]


class MemoryWorker:
    """A `sums.StepWorker` that keeps every record of its rank, unreduced."""

    def __init__(self, *, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = self.job = world
        self.partial = False
        self.first_depth = 0
        self.records: list[StepRecord] = []
        self.commands: dict[int, tuple[Command, ...]] = {}
        """Step -> commands that its result carries, as if they had been merged with it."""
        self.cadences: dict[int, int] = {}
        """Step -> cadence that its result carries."""
        self.closed = False

    def holders(self, name: str) -> tuple[int, ...]:
        return tuple(range(self.world))

    def submit(self, record: StepRecord) -> None:
        record.ready()
        self.records.append(record)

    def result(self, step: int) -> StepResult:
        return StepResult(step=step, commands=self.commands.pop(step, ()),
                          every=self.cadences.get(step))

    def close(self) -> None:
        self.closed = True

    def record(self, step: int) -> StepRecord:
        """The newest record of `step`."""
        return next(record for record in reversed(self.records) if record.step == step)

    def metrics(self, step: int) -> dict[tuple[str, str, str], Metrics]:
        """(name, role, orientation) -> the metrics of `step` that were measured, of the first format."""
        record = self.record(step)
        if record.tables is None or record.layout is None:
            return {}
        arrays = derive(record.tables, record.layout)
        arrays.pop("exponent_histogram", None)
        found: dict[tuple[str, str, str], Metrics] = {}
        for i, series in enumerate(record.layout.series):
            values = {key: column[i].item() for key, column in arrays.items() if not is_missing(column)[i]}
            found.setdefault((series.name, series.role, series.orientation), values)
        return found

    def sentinels(self, step: int) -> dict[str, float]:
        """The sentinels of `step`."""
        return derive_sentinels(self.record(step).sentinels, deque())
