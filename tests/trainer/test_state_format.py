"""State formats: codes by hand, what no code may do, and what the root is for."""

import pytest
import torch
from torch import Tensor

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.rounding import hashed, key_of, lower, upper
from fp8scope_trainer.state_block import FORMATS
from fp8scope_trainer.state_format import StateFormat

QUANTIZED = [name for name in FORMATS if name not in ("fp32", "bf16")]


def random(rows: int, columns: int, *, root: bool = False) -> Tensor:
    h = hashed(torch.arange(rows * columns), key_of(seed=3, step=2, stream=1)).view(rows, columns)
    return lower(h) if root else upper(h)


def round_trip(name: str, x: Tensor, *, root: bool, block: int | None = None) -> Tensor:
    format = StateFormat.of(name, block)
    return format.decode(format.encode(x, random(*x.shape, root=root), root=root), x.shape[1], root=root)


def test_int8_by_hand() -> None:
    """amax 254 in the first block: s = 2, y = 0.75 goes up from u = 1/4 on; the short block has its own s."""
    x = torch.zeros(1, 260)
    x[0, 0], x[0, 1], x[0, 2], x[0, 258] = 254.0, 1.5, -1.5, 12.7
    for u, codes in ((16383, [127, 0, -1]), (16384, [127, 1, -1]), (49152, [127, 1, 0])):
        found = StateFormat.of("int8", 256).encode(x, torch.full(x.shape, u), root=False)
        assert found.codes[0, :3].tolist() == codes
        assert found.codes.dtype == torch.int8
        assert found.codes[0, 258] == 127
        assert found.scales is not None
        assert found.scales.tolist() == [[2.0, pytest.approx(0.1)]]


def test_int4_is_packed_along_the_row() -> None:
    """Even columns in the low half; m in two's complement, r from 0 to 15; an odd row ends in half a byte."""
    m = torch.tensor([[7.0, -7.0, 1.0, -1.0, 3.0]])
    found = StateFormat.of("int4", 64).encode(m, torch.zeros(1, 5, dtype=torch.int64), root=False)
    assert found.codes.tolist() == [[0x97, 0xF1, 0x03]]
    assert found.codes.dtype == torch.uint8
    r = torch.tensor([[15.0, 8.0, 0.0, 1.0]])
    found = StateFormat.of("int4", 64).encode(r, torch.zeros(1, 4, dtype=torch.int64), root=True)
    assert found.codes.tolist() == [[0x8F, 0x10]]
    for x, root in ((m, False), (r, True)):
        format = StateFormat.of("int4", 64)
        stored = format.encode(x, torch.zeros(x.shape, dtype=torch.int64), root=root)
        assert torch.equal(format.decode(stored, x.shape[1], root=root), x)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("root", [False, True])
def test_o4_codes_are_monotone_hold_zero_and_keep_signs(name: str, root: bool) -> None:
    """O4: every code of the map, rounded again, is itself; they are in order, 0 is 0, m symmetric, r never
    negative; what is positive in r does not become 0."""
    largest = {"int16": (32767, 32767), "fp8": (448, 448), "int8": (127, 255), "int4": (7, 15)}[name][root]
    if name == "fp8":
        codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        codes = torch.arange(0.0, largest + 1)
    values = codes if root else torch.cat((-codes[1:].flip(0), codes))
    assert bool((values.diff() > 0).all())
    # each value in a row of its own, beside the largest, so that the scale is 1
    x = torch.stack((values, torch.full_like(values, largest)), dim=1)
    format = StateFormat.of(name)
    u = torch.full(x.shape, 2**15) if name == "int16" else random(*x.shape, root=root)
    assert torch.equal(format.decode(format.encode(x, u, root=root), 2, root=root), x)
    tiny = torch.rand(64, 200, generator=torch.Generator().manual_seed(0)) ** 30
    found = round_trip(name, tiny, root=root)
    assert bool((found >= 0).all())
    if root:
        assert bool(((found > 0) == (tiny > 0)).all())


@pytest.mark.parametrize(("name", "bits"), [("int16", 8), ("int8", 8), ("int4", 4)])
def test_o4_the_unsigned_root_has_a_better_snr_than_linear_codes_of_v(name: str, bits: int) -> None:
    """O4: of v log-uniform over 4 decades, against symmetric codes of as many bits, rounded to nearest."""
    v = log_uniform()
    amax = v.amax(dim=1, keepdim=True)
    steps = amax / (127 if bits == 8 else 7)
    linear = (v / steps).round() * steps
    found = round_trip(name, v.sqrt(), root=True, block=1024).square()
    errors = [(d - v).square().sum().item() for d in (found, linear)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", ["int16", "fp8", "int8"])
def test_o4_the_root_keeps_small_v(name: str) -> None:
    """O4: on a log-uniform v the relative error of the root, rms, is below that of linear INT8 codes of v."""
    v = log_uniform()
    steps = v.amax(dim=1, keepdim=True) / 127
    linear = (v / steps).round() * steps
    found = round_trip(name, v.sqrt(), root=True).square()
    errors = [((d - v) / v).square().mean().item() for d in (found, linear)]
    assert errors[0] < errors[1]


def log_uniform() -> Tensor:
    return 10 ** (-4 * torch.rand(64, 1024, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("root", [False, True])
def test_rounding_is_unbiased(name: str, root: bool) -> None:
    """The mean of 400 roundings is within an eighth of a code of each element (five standard errors), and of
    all together within a hundredth. To nearest, an element would be off by up to half a code."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 300, generator=generator) + 0.3
    x = x if root else x * torch.randn(1, 300, generator=generator).sign()
    format, largest = StateFormat.of(name), {"int16": 32767, "int8": 127 + 128 * root, "int4": 7 + 8 * root}
    gap = x.abs() / 8 if name not in largest else torch.full_like(x, x.abs().max().item() / largest[name])
    many = []
    for step in range(400):
        h = hashed(torch.arange(300), key_of(seed=0, step=step, stream=0)).view(1, 300)
        stored = format.encode(x, lower(h) if root else upper(h), root=root)
        many.append(format.decode(stored, 300, root=root))
    error = (torch.cat(many).double().mean(dim=0) - x[0]) / gap[0]
    assert error.abs().max().item() < 1 / 8
    assert abs(error.mean().item()) < 0.01


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nan_or_inf_is_seen_in_its_block_and_nowhere_else(name: str, bad: float) -> None:
    """The block decodes as NaN throughout, the next one as it was; a row of zeros as zeros."""
    block = StateFormat.of(name).block
    x = torch.full((2, 2 * block), 0.5)
    x[0, 3], x[1] = bad, 0.0
    for root in (False, True):
        found = round_trip(name, x, root=root)
        assert bool(found[0, :block].isnan().all())
        assert bool((found[0, block:] == 0.5).all())
        assert bool((found[1] == 0).all())


def test_the_smallest_numbers_have_a_scale() -> None:
    """A block of subnormal numbers decodes as finite numbers of its size or zero, not as NaN."""
    for name in QUANTIZED:
        found = round_trip(name, torch.full((1, 70), 1e-44), root=False)
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("shape", [(0, 200), (3, 1), (5, 129), (2, 0)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    """No rows, one column, ragged rows, no columns: shapes come back."""
    for name in FORMATS:
        assert round_trip(name, torch.rand(shape), root=True).shape == shape


def test_what_cannot_be_is_refused_by_name() -> None:
    """Names, blocks out of range, and blocks where there are none."""
    for name, block, match in (("int3", None, "must be one of fp32, bf16, int16, fp8, int8, int4"),
                               ("int8", 128, "a power of two from 256 to 8192"),
                               ("int8", 1000, "a power of two from 256 to 8192"),
                               ("int4", 2048, "a power of two from 64 to 1024"),
                               ("fp8", 256, "of fp8 states must be 128"), ("fp32", 128, "have no blocks")):
        with pytest.raises(Invalid, match=match):
            StateFormat.of(name, block)
