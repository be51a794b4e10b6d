"""Rows merge exactly, find their place in another layout, and become metrics; sentinels likewise."""

import math
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from fp8scope.derive import GRAD_NORM_WINDOW, derive, derive_sentinels
from fp8scope.layers import find_layers, find_unobserved
from fp8scope.precision import precision_map
from fp8scope.roundtrip import round_trip
from fp8scope.sums import SENTINEL_MAX_COLUMNS, SENTINEL_SUM_COLUMNS, SentinelSums, SumTables
from fp8scope_protocol.formats import E4M3
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.series import Layout, Series
from fp8scope_protocol.wire import is_missing
from fp8scope_trainer.linear import Fp8Linear


def layout_of(*names: str) -> Layout:
    return Layout(series=tuple(
        Series(name=name, role="gradient", format="e4m3", scaling="tile 1x128") for name in names))


def test_parts_of_a_tensor_merge_to_the_whole() -> None:
    """Rows of ranks and micro-batches add up to the row of all elements: counts and extremes exactly."""
    x = torch.randn(60, 130) * torch.exp(4 * torch.randn(60, 1))
    whole, parts = SumTables.zeros(2), [SumTables.zeros(2) for _ in range(3)]
    round_trip(x, E4M3, "tile 1x128", out=whole.row(1))
    for part, rows in zip(parts, torch.tensor_split(x, (1, 20)), strict=True):
        round_trip(rows, E4M3, "tile 1x128", out=part.row(1))
    first, *others = parts
    for other in others:
        first.merge(other)
    whole.counts[1, 1] = 3  # calls
    assert torch.equal(first.counts, whole.counts)
    assert torch.equal(first.maxes, whole.maxes)
    assert torch.equal(first.histogram, whole.histogram)
    torch.testing.assert_close(first.sums, whole.sums, rtol=1e-12, atol=0)


def test_rows_find_their_place_in_another_layout() -> None:
    """A rank without some series gets empty rows for them, and loses none of its own."""
    tables = SumTables.zeros(2)
    tables.counts[:, 0] = torch.tensor([7, 9])
    tables.maxes[:, 0] = torch.tensor([0.5, 0.25])
    moved = tables.to_layout(layout_of("a", "c"), layout_of("a", "b", "c"))
    assert moved.counts[:, 0].tolist() == [7, 0, 9]
    assert moved.maxes[:, 0].tolist() == [0.5, -math.inf, 0.25]


def test_an_empty_row_is_missing_in_every_value() -> None:
    """Counts of 0, values that say "not measured", and no NaN that could be taken for one of the run."""
    arrays = derive(SumTables.zeros(3), layout_of("a", "b", "c"))
    assert set(arrays) == set(METRICS), "a histogram of nothing is none"
    for key, metric in METRICS.items():
        if metric.kind == "count":
            assert arrays[key].dtype == np.dtype("<u8")
            assert not arrays[key].any()
        else:
            assert is_missing(arrays[key]).all(), key


def test_a_table_of_another_size_is_refused() -> None:
    """Rows without a series would shift every later one."""
    with pytest.raises(ValueError, match="3 rows for a layout of 2 series"):
        derive(SumTables.zeros(3), layout_of("a", "b"))


def sentinels(**values: float) -> SentinelSums:
    row = SentinelSums.zeros()
    for name, value in values.items():
        if name in SENTINEL_SUM_COLUMNS:
            row.sums[SENTINEL_SUM_COLUMNS.index(name)] = value
        else:
            row.maxes[SENTINEL_MAX_COLUMNS.index(name)] = value
    return row


def test_sentinels_not_measured_are_absent() -> None:
    """Nothing was logged and no optimizer stepped: nothing is known, also not that all was finite."""
    assert derive_sentinels(sentinels(), deque()) == {}
    assert derive_sentinels(sentinels(nonfinite=1.0), deque()) == {"nonfinite_count": 1.0}


def test_the_norm_is_compared_with_its_own_history() -> None:
    """`grad_norm_ratio` is over the median of the last 64 finite norms; a NaN is reported, not remembered."""
    norms: deque[float] = deque()
    for step in range(100):
        found = derive_sentinels(sentinels(grad_square=4.0 if step < 90 else 16.0, grad_count=1), norms)
        assert found["grad_norm"] == (2.0 if step < 90 else 4.0)
    assert found["grad_norm_ratio"] == 2.0
    bad = derive_sentinels(sentinels(grad_square=math.nan, grad_count=1), norms)
    assert math.isnan(bad["grad_norm"])
    assert len(norms) == GRAD_NORM_WINDOW
    assert all(map(math.isfinite, norms))


def test_losses_average_and_extremes_stay() -> None:
    """Two ranks: the loss is their mean, update_max the larger, a zero gradient a norm of 0."""
    both = sentinels(loss_sum=3.0, loss_count=2, update_max=7.0, grad_count=2, v_zero=1, v_total=4)
    found = derive_sentinels(both, deque())
    assert found == {"loss": 1.5, "update_max": 7.0, "grad_norm": 0.0, "v_zero_share": 0.25,
                     "nonfinite_count": 0.0}


def test_the_precision_map_says_what_runs_and_why() -> None:
    """F2: each layer's real precision, whether it can be switched, and the reason if not."""
    model = nn.ModuleDict({
        "embed": nn.Embedding(4, 128), "fp8": Fp8Linear(128, 128),
        "plain": nn.Linear(128, 130, dtype=torch.bfloat16),
    })
    fp8, plain = precision_map(find_layers(model))
    assert (fp8.name, fp8.precision, fp8.switchable) == ("fp8", "fp8", True)
    assert fp8.reason.startswith("requested fp8, running fp32 products of FP8 codes")  # on a CPU
    assert (plain.name, plain.precision, plain.switchable) == ("plain", "bf16", False)
    assert plain.reason == "Linear computes in one precision only"
    (unseen,) = find_unobserved(model)
    assert (unseen.name, unseen.reason) == ("embed", "Embedding is not a linear layer")
