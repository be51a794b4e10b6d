"""What the programs of `roundtrip_kernel` hand over: a column of partial results each, merged in fixed order.

Columns are in the order of `sums`: after `elements` and `calls`, which need no kernel, the counts of a
round trip (ints [11] and, where it is wanted, the histogram's 40 bins), its sums (reals [8]), of the maxes
the five that come before `channel_outlier`. The merge adds each row up in one program, always in the same
order, so that the same input gives the same bits every time; atomics on floats would not.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.launch_kernel import Launcher
from fp8scope.sums import COUNT_COLUMNS, MAX_COLUMNS, SUM_COLUMNS, RowSums
from fp8scope_protocol.metrics import HISTOGRAM_BINS

COUNTS = tl.constexpr(COUNT_COLUMNS.index("stored") - COUNT_COLUMNS.index("nonzero"))
BINS = tl.constexpr(HISTOGRAM_BINS)
NOT_MEASURED = tl.constexpr(-math.inf)

_HOST_COUNTS = tl.constexpr(COUNT_COLUMNS.index("nonzero"))
_SUMS = tl.constexpr(SUM_COLUMNS.index("wanted2"))
_MAXES = tl.constexpr(MAX_COLUMNS.index("channel_outlier"))

_CHUNK = 1024  # partial results a program of the merge reads at a time


class Partials:
    """Results of every program: ints [11 or 51, slots], reals [13, slots], uninitialised."""

    def __init__(self, x: Tensor, slots: int, *, histogram: bool) -> None:
        self.slots = slots
        self.ints = x.new_empty((COUNTS.value + histogram * BINS.value, slots), dtype=torch.int32)
        self.reals = x.new_empty((_SUMS.value + _MAXES.value, slots), dtype=torch.float64)

    def merge_into(self, row: RowSums, x: Tensor, flag: Tensor | None = None) -> None:
        """Adds everything, one call and the elements of x to `row`, in place; nothing if `flag` holds 0."""
        _merge(len(self.ints) + len(self.reals), self.ints, self.reals, *row,
               self.ints if flag is None else flag, self.slots, x.numel(), num_warps=4,
               constants={"INTS": len(self.ints), "CHUNK": _CHUNK, "FLAGGED": flag is not None})


@triton.jit
def merge_column(k: tl.tensor, ints_ptr: tl.tensor, reals_ptr: tl.tensor, pitch: tl.tensor, slots: tl.tensor,
                 counts_ptr: tl.tensor, sums_ptr: tl.tensor, maxes_ptr: tl.tensor, histogram_ptr: tl.tensor,
                 elements: tl.tensor, INTS: tl.constexpr, CHUNK: tl.constexpr) -> None:
    """Adds up row k of the partial results, `pitch` from row to row, of which the first `slots` belong to one
    tensor, and merges it."""
    if k < INTS:
        count = tl.zeros([CHUNK], tl.int64)
        for start in range(0, slots, CHUNK):
            at = start + tl.arange(0, CHUNK)
            count += tl.load(ints_ptr + k.to(tl.int64) * pitch + at, mask=at < slots, other=0).to(tl.int64)
        target = counts_ptr + _HOST_COUNTS + k if k < COUNTS else histogram_ptr + k - COUNTS
        tl.store(target, tl.load(target) + tl.sum(count, axis=0))
    elif k < INTS + _SUMS:
        row = k - INTS
        total = tl.zeros([CHUNK], tl.float64)
        for start in range(0, slots, CHUNK):
            at = start + tl.arange(0, CHUNK)
            total += tl.load(reals_ptr + row.to(tl.int64) * pitch + at, mask=at < slots, other=0.0)
        tl.store(sums_ptr + row, tl.load(sums_ptr + row) + tl.sum(total, axis=0))
    else:
        row = k - INTS
        worst = tl.full([CHUNK], NOT_MEASURED, tl.float64)
        for start in range(0, slots, CHUNK):
            at = start + tl.arange(0, CHUNK)
            here = tl.load(reals_ptr + row.to(tl.int64) * pitch + at, mask=at < slots, other=NOT_MEASURED)
            worst = tl.maximum(worst, here)
        target = maxes_ptr + row - _SUMS
        tl.store(target, tl.maximum(tl.load(target), tl.max(worst, axis=0)))
    if k == 0:
        tl.store(counts_ptr, tl.load(counts_ptr) + elements)
        tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + 1)


@triton.jit(do_not_specialize=["slots", "elements"])
def _merge_kernel(ints_ptr: tl.tensor, reals_ptr: tl.tensor, counts_ptr: tl.tensor, sums_ptr: tl.tensor,
                  maxes_ptr: tl.tensor, histogram_ptr: tl.tensor, flag_ptr: tl.tensor, slots: tl.tensor,
                  elements: tl.tensor, INTS: tl.constexpr, CHUNK: tl.constexpr,
                  FLAGGED: tl.constexpr) -> None:
    if FLAGGED:
        flag = tl.load(flag_ptr)
        if flag == 0:
            return
    merge_column(tl.program_id(0), ints_ptr, reals_ptr, slots, slots, counts_ptr, sums_ptr, maxes_ptr,
                 histogram_ptr, elements, INTS, CHUNK)


_merge = Launcher(_merge_kernel)
