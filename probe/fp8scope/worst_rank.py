"""Which rank is the worst, of each series: one column that the reduction of maxima takes along.

Merged numbers say how bad a series is, not where. A rank is judged by what quantization loses there, from 0
to 1: the larger of the share of nonzero elements that underflow and of the relative squared error, since
each of them is blind to the other; any NaN or infinity in the tensor is worse than all of that. Ranks whose
badness is the same to the bit of a float32 count by their number, the lowest first.

The bits of a non-negative float32 order like the float, so with the rank behind them they make one integer,
exact in a float64, whose maximum over ranks names the worst one.
"""

import torch
from torch import Tensor

from fp8scope.sums import COUNT_COLUMNS, SUM_COLUMNS, SumTables

MOST_RANKS = 2**20
"""31 bits of badness and 20 of a rank are below the 53 that a float64 holds."""


def badness_with_rank(tables: SumTables, rank: int) -> Tensor:
    """float64 [S]: this rank's bid for each series; -inf where it saw nothing of it."""
    counts = dict(zip(COUNT_COLUMNS, tables.counts.double().unbind(1), strict=True))
    sums = dict(zip(SUM_COLUMNS, tables.sums.unbind(1), strict=True))
    broken = counts["nan"] + counts["inf"]
    lost = (counts["underflow"] / counts["nonzero"]).nan_to_num(0.0)
    error = (sums["e2"] / sums["coded_x2"]).nan_to_num(0.0, posinf=1.0).clamp(0.0, 1.0)
    badness = torch.where(broken > 0, 2.0 + broken / counts["elements"], torch.maximum(lost, error))
    bits = badness.float().view(torch.int32).double()
    return torch.where(counts["elements"] > 0, bits * MOST_RANKS + (MOST_RANKS - 1 - rank), -torch.inf)


def worst_rank(bids: Tensor) -> Tensor:
    """float64 [S]: the rank behind the largest bid; -1 where no rank saw anything."""
    return torch.where(bids >= 0, MOST_RANKS - 1 - bids % MOST_RANKS, -1.0)
