"""A circle of ranks and the probe's collectives among them, over gloo on the host."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Circle:
    """Ranks that merge their numbers. Without a group it is this rank alone, and nothing is sent."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.count = dist.get_world_size(group) if group is not None else 1
        """How many ranks: the first dimension of what `gather` returns."""
        self.index = dist.get_rank(group) if group is not None else 0
        """This rank's row in it."""

    def leave(self) -> None:
        """Be alone from now on. The connections are closed, so that no other rank waits for us."""
        group, self._group = self._group, None
        self.count, self.index = 1, 0
        if group is not None and dist.is_initialized():
            with suppress(ValueError, RuntimeError):  # the job may have destroyed it before
                dist.destroy_process_group(group)

    def gather(self, row: Tensor) -> Tensor:
        """row [K] of each rank -> [count, K]."""
        if self._group is None:
            return row[None]
        rows = torch.empty((self.count, *row.shape), dtype=row.dtype)
        dist.all_gather(list(rows.unbind(0)), row, group=self._group)
        return rows

    def gather_bytes(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        """`data` of each rank; `sizes` are all ranks' lengths, known from an earlier `gather`."""
        if self._group is None:
            return [data]
        longest = max(sizes)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        rows = self.gather(padded).numpy()
        return [rows[i, :size].tobytes() for i, size in enumerate(sizes)]

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks, in place."""
        if self._group is not None:
            dist.all_reduce(values, dist.ReduceOp.SUM, group=self._group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, in place."""
        if self._group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values
