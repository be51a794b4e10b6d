"""The rows that fill up during a step: one per series, in tables on the device."""

import math
import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8scope.sums import MAX_COLUMNS, SUM_COLUMNS, RowSums, SumTables
from fp8scope_protocol.series import Layout, Series

FIRST_CAPACITY = 64
STALENESS = MAX_COLUMNS.index("staleness_bits")


class Rows:
    """Rows of every series seen so far. A series is added when it is first asked for and never goes, and its
    row stays where it is: a CUDA graph may hold its address. More room is more tables, not larger ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._series: list[Series] = []
        self._index: dict[tuple[str, ...], int] = {}
        self._parts = [SumTables.zeros(FIRST_CAPACITY, device)]
        self._starts = [0]
        """Index of the first row of each part."""
        self._capacity = FIRST_CAPACITY
        self._rows: list[RowSums] = []
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._order = torch.empty(0, dtype=torch.int64)

    @property
    def count(self) -> int:
        """How many series there are."""
        return len(self._series)

    @property
    def bytes(self) -> int:
        """Memory of all tables."""
        return sum(part.nbytes for part in self._parts)

    def reserve(self, series: int) -> None:
        """Makes room for so many series, if that is all there are."""
        while self._capacity < series:
            self._parts.append(SumTables.zeros(self._capacity, self.device))
            self._starts.append(self._capacity)
            self._capacity *= 2

    def has_room(self, series: Series) -> bool:
        """Whether `series` has a row, or gets one without an allocation."""
        return series.key in self._index or self.count < self._capacity

    def row(self, series: Series) -> RowSums:
        """The row of `series`: views."""
        index = self._index.get(series.key)
        return self._rows[self._add(series) if index is None else index]

    def add(self, series: Sequence[Series], *, elements: Sequence[int], sums: dict[str, Tensor]) -> None:
        """Adds to several rows at once: a call with its elements, if any, and columns of sums, [S] each."""
        for one in series:
            self.row(one)
        indices = [self._index[one.key] for one in series]
        for part, start in zip(self._parts, self._starts, strict=True):
            here = [i for i, index in enumerate(indices) if 0 <= index - start < len(part)]
            if not here:
                continue
            rows = self._there([indices[i] - start for i in here])
            counts = self._there([[elements[i], min(elements[i], 1)] for i in here])
            part.counts[:, :2].index_add_(0, rows, counts)
            which = None if len(here) == len(indices) else self._there(here)
            for column, values in sums.items():
                mine = values.to(self.device, non_blocking=True)
                part.sums[:, SUM_COLUMNS.index(column)].index_add_(
                    0, rows, mine if which is None else mine[which])

    def collect(self) -> tuple[SumTables, Layout] | None:
        """What was measured, in the order of the layout, on its way to the host; then begins anew.

        None while there is no series. The copies are asynchronous: wait for the device before reading.
        """
        if not self._series:
            return None
        if self._layout is None:
            order = sorted(range(len(self._series)), key=lambda i: _place(self._series[i]))
            self._layout = Layout(series=tuple(self._series[i] for i in order))
            self._order = self._there(order)
        ordered = [torch.cat(column) if len(column) > 1 else column[0] for column in zip(
            *((part.counts, part.sums, part.maxes, part.histogram) for part in self._parts), strict=True)]
        counts, sums, maxes, histogram = (to_host(column.index_select(0, self._order)) for column in ordered)
        for part in self._parts:
            part.clear()
        return SumTables(counts=counts, sums=sums, maxes=maxes, histogram=histogram), self._layout

    def worst_staleness(self) -> Tensor:
        """Largest scale staleness, in bits, of the series under delayed scaling; -inf without any."""
        rows = [i for i, one in enumerate(self._series) if one.policy == "delayed"]
        cells = [self._rows[i].maxes[STALENESS] for i in rows]
        return torch.stack(cells).amax() if cells else self._parts[0].maxes.new_full((), -math.inf)

    def _add(self, series: Series) -> int:
        with self._lock:  # a model may run in several threads
            index = self._index.get(series.key, self.count)
            if index < self.count:
                return index
            self.reserve(index + 1)
            part = bisect_right(self._starts, index) - 1
            self._rows.append(self._parts[part].row(index - self._starts[part]))
            self._series.append(series)
            self._layout = None
            self._index[series.key] = index
            return index

    def _there(self, numbers: Any) -> Tensor:
        """int64, on the device."""
        return torch.tensor(numbers, dtype=torch.int64).to(self.device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; from a GPU pinned and asynchronous."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _place(series: Series) -> tuple[int, str, str, str, str, str]:
    return (series.depth, *series.key)
