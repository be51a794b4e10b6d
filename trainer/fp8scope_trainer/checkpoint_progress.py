"""A bar for checkpoints that take long: DCP's planners, counting the bytes that pass."""

import sys
import time
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

SILENT_SECONDS = 2.0
LINE_SECONDS = 10.0


class Meter:
    """Bytes done of `total`, of this rank; rank 0 shows them once `SILENT_SECONDS` have passed.

    A bar on a terminal, a line every 10 s elsewhere.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.total = self.done = 0
        self._silent = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
        self._next = time.monotonic() + SILENT_SECONDS
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, size: int) -> None:
        """Counts `size` bytes more."""
        self.done += size
        now = time.monotonic()
        if self._silent or now < self._next:
            return
        if sys.stderr.isatty():
            self._draw()
        else:
            self._next = now + LINE_SECONDS
            print(f"{self.name}: {self.done / 2**20:,.0f} of {self.total / 2**20:,.0f} MiB of rank 0",
                  file=sys.stderr, flush=True)

    def _draw(self) -> None:
        if self._bar is None:
            self._bar = Progress(TextColumn(self.name), BarColumn(), DownloadColumn(binary_units=True),
                                 TransferSpeedColumn(), console=Console(stderr=True))
            self._bar.add_task(self.name, total=self.total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self.done)


class SavePlanner(DefaultSavePlanner):
    """DCP's own; tells `meter`."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan of this rank is known: so is what there is to write."""
        plan = super().finish_plan(new_plan)
        self._meter.total = sum(_bytes(item) for item in plan.items)
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Called for each piece as it is written."""
        self._meter.add(_bytes(write_item))
        return super().resolve_data(write_item)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's own; tells `meter`."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """The plan of this rank is known; sizes are those of the targets."""
        plan = super().finish_plan(new_plan)
        self._meter.total = sum(
            item.lengths.numel() * self.lookup_tensor(item.dest_index).element_size()
            for item in plan.items if not item.type.name.startswith("BYTE"))
        return plan

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Called for each piece once it is read."""
        super().commit_tensor(read_item, tensor)
        self._meter.add(tensor.numel() * tensor.element_size())


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
