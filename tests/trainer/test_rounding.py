"""Stochastic rounding to E4M3 by a counter."""

import torch

from fp8scope_trainer.rounding import round_e4m3, uniform


def drawn(count: int, *, seed: int = 0, step: int = 1, stream: int = 0, first: int = 0) -> torch.Tensor:
    return uniform(torch.arange(first, first + count), seed=seed, step=step, stream=stream)


def test_numbers_are_uniform_and_independent_of_their_neighbours() -> None:
    """Mean 1/2, variance 1/12, every tenth as full as the next, no correlation over index, step or stream."""
    u = drawn(100_000).double()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(u.var() - 1 / 12) < 0.002
    assert (torch.histc(u.float(), 10) - 10_000).abs().max() < 500
    others = {"index": drawn(100_000, first=1), "step": drawn(100_000, step=2),
              "stream": drawn(100_000, stream=1), "seed": drawn(100_000, seed=1)}
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack((u, other.double())))[0, 1]
        assert abs(correlation) < 0.015, name


def test_numbers_depend_on_the_counter_alone() -> None:
    """A part of a tensor gets the numbers that the whole gives it; indices beyond 2^32 have their own."""
    assert torch.equal(drawn(1000)[300:400], drawn(100, first=300))
    assert not torch.equal(drawn(100), drawn(100, first=2**32))


def test_rounding_keeps_codes_and_hits_only_neighbours() -> None:
    """All 127 finite non-negative codes stay; anything between two codes becomes one of them."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.float()
    for u in (0.0, 0.5, 1 - 2.0**-24):
        assert torch.equal(round_e4m3(values, torch.full_like(values, u)).float(), values)
    low, high = values[1:-1], values[2:]
    y = (low + (high - low) * torch.rand(125, generator=torch.Generator().manual_seed(0))).clamp(max=448)
    found = round_e4m3(y, drawn(125)).float()
    assert bool(((found == low) | (found == high)).all())


def test_rounding_is_unbiased_where_nearest_is_not() -> None:
    """The mean of 20,000 roundings is the value, for normal and subnormal codes, within four errors."""
    for y in (1.03, -1.03, 0.0051, -0.0001, 300.0):
        rounded = round_e4m3(torch.full((20_000,), y), drawn(20_000)).double()
        error = rounded.std() / 20_000**0.5
        assert abs(rounded.mean() - y) < 4 * error
        assert len(set(rounded.tolist())) == 2


def test_a_positive_value_never_becomes_zero_and_nothing_leaves_the_range() -> None:
    """With `keep_nonzero` the smallest code is the floor; 0 stays 0, 448 the largest, NaN NaN."""
    y = torch.tensor([0.0, 1e-30, 1e-6, 447.9, 448.0001, torch.nan])
    for u in (0.0, 1 - 2.0**-24):
        found = round_e4m3(y, torch.full_like(y, u), keep_nonzero=True).float()
        assert found[0] == 0
        assert bool((found[1:3] == 2.0**-9).all())
        assert bool(((found[3:5] == 416) | (found[3:5] == 448)).all())
        assert bool(found[5].isnan())
