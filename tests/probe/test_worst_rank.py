"""What makes a rank the worst one for a series."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fp8scope.derive import derive
from fp8scope.roundtrip import round_trip
from fp8scope.sums import SumTables
from fp8scope.worst_rank import MOST_RANKS, badness_with_rank, worst_rank
from fp8scope_protocol.formats import E4M3
from fp8scope_protocol.series import Layout, Series
from fp8scope_protocol.wire import is_missing


def table(x: Tensor | None, scale: float = 1.0) -> SumTables:
    """One series: x with a given scale, or nothing."""
    tables = SumTables.zeros(1)
    if x is not None:
        round_trip(x, E4M3, "tensorwise", scales=torch.full((1, 1), scale), out=tables.row(0))
    return tables


NORMAL = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
BROKEN = NORMAL.clone()
BROKEN[0, 0] = math.nan
IN_ORDER = {
    "nothing": table(None),
    "zeros": table(torch.zeros(4, 4)),
    "healthy": table(NORMAL, 1 / 64),
    "5 % underflow": table(NORMAL * torch.where(torch.arange(4096).view(64, 64) % 20 == 0, 1e-4, 1.0), 1 / 8),
    "saturated": table(NORMAL, 1 / 4096),
    "all underflow": table(NORMAL, 1e6),
    "NaN": table(BROKEN, 1 / 64),
}


@pytest.mark.parametrize(("better", "worse"), list(pairwise(IN_ORDER)))
def test_what_is_worse(better: str, worse: str) -> None:
    """Whichever rank it happens on; error and underflow are each seen where the other is not."""
    for rank in (0, 1):
        bids = torch.stack([badness_with_rank(IN_ORDER[better], 1 - rank),
                            badness_with_rank(IN_ORDER[worse], rank)])
        assert worst_rank(bids.amax(0)).tolist() == [rank]


def test_the_lowest_of_equals_is_named() -> None:
    """Up to the last rank there may be, exactly."""
    for ranks in ((0, 1), (7, MOST_RANKS - 1), (MOST_RANKS - 2, MOST_RANKS - 1)):
        bids = torch.stack([badness_with_rank(IN_ORDER["NaN"], rank) for rank in ranks])
        assert worst_rank(bids.amax(0)).tolist() == [ranks[0]]
    assert worst_rank(badness_with_rank(IN_ORDER["NaN"], MOST_RANKS - 1)).tolist() == [MOST_RANKS - 1]


def test_without_other_ranks_there_is_no_worst_one() -> None:
    """Missing, as it is where no rank saw anything."""
    layout = Layout(series=(Series(name="a", role="activation", format="e4m3", scaling="tensorwise"),))
    assert is_missing(derive(IN_ORDER["healthy"], layout)["worst_rank"]).all()
    assert worst_rank(badness_with_rank(IN_ORDER["nothing"], 3)).tolist() == [-1.0]
