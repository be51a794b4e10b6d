"""Rounding by chance, by a counter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8scope_trainer.rounding import hashed, key_of, lower, round_bf16, round_e4m3, round_integer, upper


def bits(count: int, *, seed: int = 0, step: int = 1, stream: int = 0, first: int = 0) -> Tensor:
    return hashed(torch.arange(first, first + count), key_of(seed=seed, step=step, stream=stream))


def drawn(count: int, **names: int) -> Tensor:
    return upper(bits(count, **names))


def test_the_hash_is_the_one_that_is_written_down() -> None:
    """Computed by hand, in Python's integers, for an index beyond 2^32: upper half m, lower half r."""
    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return x ^ x >> 16

    index = 5 * 2**32 + 77
    for weight in (False, True):
        key = mix(mix(mix(9) ^ 4) ^ 2)
        key = mix(key ^ 0x9E3779B9) if weight else key
        wanted = mix(77 ^ mix(key ^ 5))
        found = hashed(torch.tensor([index]), key_of(seed=9, step=4, stream=2, weight=weight))
        assert found.item() == wanted
        assert (upper(found).item(), lower(found).item()) == (wanted >> 16, wanted & 0xFFFF)


@pytest.mark.parametrize("half", [upper, lower])
def test_numbers_are_uniform_and_independent_of_their_neighbours(half: Callable[[Tensor], Tensor]) -> None:
    """Mean 1/2, variance 1/12, every tenth as full as the next, no correlation over index, step or stream."""
    u = half(bits(100_000)).double() / 2**16
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(u.var() - 1 / 12) < 0.002
    assert (torch.histc(u.float(), 10) - 10_000).abs().max() < 500
    others = {"index": bits(100_000, first=1), "step": bits(100_000, step=2),
              "stream": bits(100_000, stream=1), "seed": bits(100_000, seed=1)}
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack((u, half(other).double())))[0, 1]
        assert abs(correlation) < 0.015, name


def test_the_two_halves_are_independent() -> None:
    """Of one hash the upper half rounds m and the lower v: uncorrelated."""
    h = bits(100_000)
    pair = torch.stack((upper(h).double(), lower(h).double()))
    assert abs(torch.corrcoef(pair)[0, 1]) < 0.015


def test_numbers_depend_on_the_counter_alone() -> None:
    """A part of a tensor gets the numbers that the whole gives it; indices beyond 2^32 have their own."""
    assert torch.equal(drawn(1000)[300:400], drawn(100, first=300))
    assert not torch.equal(drawn(100), drawn(100, first=2**32))


def test_e4m3_keeps_codes_and_hits_only_neighbours() -> None:
    """All 127 finite non-negative codes stay; anything between two codes becomes one of them."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.float()
    for u in (0, 2**15, 2**16 - 1):
        assert torch.equal(round_e4m3(values, torch.full((127,), u)).float(), values)
    low, high = values[1:-1], values[2:]
    y = (low + (high - low) * torch.rand(125, generator=torch.Generator().manual_seed(0))).clamp(max=448)
    found = round_e4m3(y, drawn(125)).float()
    assert bool(((found == low) | (found == high)).all())


def test_e4m3_is_unbiased_where_nearest_is_not() -> None:
    """The mean of 20,000 roundings is the value, for normal and subnormal codes, within four errors."""
    for y in (1.03, -1.03, 0.0051, -0.0001, 300.0):
        rounded = round_e4m3(torch.full((20_000,), y), drawn(20_000)).double()
        error = rounded.std() / 20_000**0.5
        assert abs(rounded.mean() - y) < 4 * error
        assert len(set(rounded.tolist())) == 2


def test_integers_and_bf16_are_unbiased() -> None:
    """The mean of 20,000 roundings is the value, within four errors; only two neighbours are hit."""
    u = drawn(20_000)
    for y in (0.2, -0.2, 126.7, -3.5):
        for rounded in (round_integer(torch.full((20_000,), y), u, largest=127.0).double(),
                        round_bf16(torch.full((20_000,), y * 1.003), u).double() / 1.003):
            assert abs(rounded.mean() - y) < 4 * rounded.std() / 20_000**0.5 + 1e-7
            assert len(set(rounded.tolist())) == 2


def test_e4m3_by_hand() -> None:
    """P(up) is exact to 2^-16: a quarter of the way from 1 to 1.125, up from U = 49152 on."""
    y = torch.full((2,), 1.03125)
    assert round_e4m3(y, torch.tensor([49151, 49152])).float().tolist() == [1.0, 1.125]
    y = torch.full((2,), -(2.0**-9) * 2.5)  # subnormal: half-way
    assert (round_e4m3(y, torch.tensor([32767, 32768])).float() * 2**9).tolist() == [-2.0, -3.0]


def test_integers_by_hand() -> None:
    """floor(y + u), inside of the range; what is positive gets at least `smallest`."""
    y = torch.tensor([2.25, 2.25, -2.25, -2.25, 300.0, 0.0, 1e-9])
    u = torch.tensor([49151, 49152, 16383, 16384, 65535, 65535, 0])
    assert round_integer(y, u, largest=255.0).tolist() == [2, 3, -3, -2, 255, 0, 0]
    assert round_integer(y, u, largest=255.0, smallest=1.0).tolist() == [2, 3, -3, -2, 255, 0, 1]


def test_bf16_by_hand() -> None:
    """The upper 16 bits, one more where the lower ones and U carry; NaN, Inf and bf16 values stay."""
    x = torch.tensor([0x3F808000, 0x3F808000, 0x3F80_0000], dtype=torch.int32).view(torch.float32)
    found = round_bf16(x, torch.tensor([0x7FFF, 0x8000, 0xFFFF])).view(torch.int16)
    assert found.tolist() == [0x3F80, 0x3F81, 0x3F80]
    odd = round_bf16(torch.tensor([torch.nan, torch.inf, -torch.inf]), torch.full((3,), 65535))
    assert odd[0].isnan()
    assert odd[1:].tolist() == [float("inf"), -float("inf")]


def test_a_positive_value_never_becomes_zero_and_nothing_leaves_the_range() -> None:
    """With `keep_nonzero` the smallest code is the floor; 0 stays 0, 448 the largest, NaN NaN."""
    y = torch.tensor([0.0, 1e-30, 1e-6, 447.9, 448.0001, torch.nan])
    for u in (0, 2**16 - 1):
        found = round_e4m3(y, torch.full((6,), u), keep_nonzero=True).float()
        assert found[0] == 0
        assert bool((found[1:3] == 2.0**-9).all())
        assert bool(((found[3:5] == 416) | (found[3:5] == 448)).all())
        assert bool(found[5].isnan())
