"""The rows that fill up during a step: one per series, all in one set of tables on the device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8scope.sums import MAX_COLUMNS, SUM_COLUMNS, RowSums, SumTables
from fp8scope_protocol.series import Layout, Series

FIRST_CAPACITY = 64
STALENESS = MAX_COLUMNS.index("staleness_bits")


class Rows:
    """Rows of every series seen so far. A series is added when it is first asked for and never goes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._series: list[Series] = []
        self._index: dict[tuple[str, ...], int] = {}
        self._tables = SumTables.zeros(FIRST_CAPACITY, device)
        self._layout: Layout | None = None
        self._order: list[int] = []

    @property
    def count(self) -> int:
        """How many series there are."""
        return len(self._series)

    def row(self, series: Series) -> RowSums:
        """Views of the row of `series`. Keep them no longer than one call: tables grow and are swapped."""
        index = self._index.get(series.key)
        if index is None:
            index = self._add(series)
        return self._tables.row(index)

    def add(self, series: Sequence[Series], *, elements: Sequence[int], sums: dict[str, Tensor]) -> None:
        """Adds to several rows at once: a call with its elements, if any, and columns of sums, [S] each."""
        for one in series:
            self.row(one)
        rows = torch.tensor([self._index[one.key] for one in series]).to(self.device, non_blocking=True)
        counts = torch.tensor([[number, min(number, 1)] for number in elements])
        self._tables.counts[:, :2].index_add_(0, rows, counts.to(self.device, non_blocking=True))
        for column, values in sums.items():
            here = values.to(self.device, non_blocking=True)
            self._tables.sums[:, SUM_COLUMNS.index(column)].index_add_(0, rows, here)

    def collect(self) -> tuple[SumTables, Layout] | None:
        """What was measured, in the order of the layout, on its way to the host; then begins anew.

        None while there is no series. The copies are asynchronous: wait for the device before reading.
        """
        if not self._series:
            return None
        if self._layout is None:
            order = sorted(range(len(self._series)), key=lambda i: _place(self._series[i]))
            self._layout = Layout(series=tuple(self._series[i] for i in order))
            self._order = order
        ordered = self._tables.take(self._order)
        self._tables = SumTables.zeros(len(self._tables), self.device)
        host = SumTables(
            counts=to_host(ordered.counts), sums=to_host(ordered.sums), maxes=to_host(ordered.maxes),
            histogram=to_host(ordered.histogram),
        )
        return host, self._layout

    def worst_staleness(self) -> Tensor:
        """Largest scale staleness, in bits, of the series under delayed scaling; -inf without any."""
        rows = [i for i, one in enumerate(self._series) if one.policy == "delayed"]
        cells = [self._tables.maxes[i, STALENESS] for i in rows]
        return torch.stack(cells).amax() if cells else self._tables.maxes.new_full((), -math.inf)

    def _add(self, series: Series) -> int:
        index = len(self._series)
        if index == len(self._tables):
            self._tables = self._tables.take([*range(index), *[-1] * index])
        self._series.append(series)
        self._index[series.key] = index
        self._layout = None
        return index


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; from a GPU pinned and asynchronous."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _place(series: Series) -> tuple[int, str, str, str, str, str]:
    return (series.depth, *series.key)
