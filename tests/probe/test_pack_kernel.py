"""Codes at the speed of a copy against the plain-torch quantizers: logic in Triton's interpreter, bits on a
GPU. One child process runs every case of the interpreter."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.probe.kernel_cases import normal
from torch import Tensor

from fp8scope import backend, quantize
from fp8scope.quantize import Quantized
from fp8scope_protocol.formats import E4M3, E5M2

pytest.importorskip("triton", reason="triton is not installed")

from fp8scope import both_kernel, pack_kernel

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="the kernels need compute capability 9.0",
)

CHILD = """
import sys, torch
from fp8scope import both_kernel, pack_kernel
from fp8scope_protocol.formats import E4M3
answers = {}
for key, x in torch.load(sys.argv[1]).items():
    options = {"power_of_two": key.endswith("power of two")}
    found = (pack_kernel.quantize_tiles(x, E4M3, **options),
             pack_kernel.quantize_tiles(x.t(), E4M3, **options),
             pack_kernel.quantize_blocks(x, E4M3, **options),
             pack_kernel.quantize_blocks(x.t(), E4M3, **options),
             *both_kernel.quantize_both(x, E4M3, **options))
    answers[key] = [(q.codes.view(torch.uint8), q.scales) for q in found]
torch.save(answers, sys.argv[2])
"""


def planted() -> Tensor:
    """A column of zeros, minus zero, NaN, both infinities, 1e30 and 1e-38 in some tiles."""
    x = normal((128, 256))
    x[:, 2], x[6, 0], x[7, 5], x[:, 130] = 0.0, -0.0, 1e30, -0.0
    x[3, 7], x[4, 140], x[5, 199], x[9] = float("nan"), float("inf"), float("-inf"), x[9] * 1e-38
    return x


def cases() -> dict[str, Tensor]:
    x = normal((128, 128))
    found = {
        "normal": normal((256, 128)), "48 decades": x * torch.logspace(-44, 4, 128), "huge": x * 1e37,
        "denormal": x * 1e-40, "half zero": x.relu(), "zeros": torch.zeros(128, 128),
        "nothing finite": x * float("nan"), "planted": planted(),
    }
    found |= {f"{name}, power of two": found[name] for name in ("huge", "planted")}
    return {key: one.bfloat16() for key, one in found.items()} | {
        "part of rows": normal((128, 256)).bfloat16()[:, 64:192]}


CASES = cases()
WHAT = ("tiles", "tiles of x.t()", "blocks", "blocks of x.t()", "tiles, with x.t()", "tiles of x.t(), with x")


def references(x: Tensor, *, power_of_two: bool = False) -> list[Quantized]:
    """Tiles of x, of x.t(), blocks of both; tiles again."""
    tiles = [quantize.quantize_tiles(x, E4M3, power_of_two=power_of_two),
             quantize.quantize_tiles(x.t(), E4M3, power_of_two=power_of_two)]
    return [*tiles, quantize.quantize_blocks(x, E4M3, power_of_two=power_of_two),
            quantize.quantize_blocks(x.t(), E4M3, power_of_two=power_of_two), *tiles]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Tensor, Tensor]]]:
    folder: Path = tmp_path_factory.mktemp("codes")
    ours, theirs = folder / "cases.pt", folder / "answers.pt"
    torch.save(CASES, ours)
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD, str(ours), str(theirs)], check=True,
                   env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=290)
    found: dict[str, list[tuple[Tensor, Tensor]]] = torch.load(theirs)
    return found


@pytest.mark.parametrize(("key", "what"), list(product(CASES, WHAT)))
def test_codes_and_scales_are_the_references_in_the_interpreter(
    key: str, what: str, answers: dict[str, list[tuple[Tensor, Tensor]]]
) -> None:
    """To the bit: NaN, Inf, zeros of both signs, denormals, 1e37, powers of two, rows that are apart."""
    codes, scales = answers[key][WHAT.index(what)]
    expected = references(CASES[key], power_of_two=key.endswith("power of two"))[WHAT.index(what)]
    assert torch.equal(codes, expected.codes.view(torch.uint8))
    assert torch.equal(scales, expected.scales)


@pytest.mark.parametrize("x", [
    normal((120, 128)).bfloat16(), normal((128, 120)).bfloat16(), normal((128, 128)),
    normal((128, 129)).bfloat16()[:, 1:], normal((128, 128)).bfloat16().t()[::2].t(),
    torch.empty(0, 128).bfloat16(),
], ids=["ragged rows", "ragged columns", "fp32", "not aligned", "columns apart", "empty"])
def test_what_does_not_fit_is_left_to_the_other_kernels(x: Tensor) -> None:
    """Blocks and tiles of x.t() say so with None."""
    assert pack_kernel.quantize_blocks(x, E4M3) is None
    assert pack_kernel.quantize_tiles(x.t(), E4M3) is None
    assert both_kernel.quantize_both(x, E4M3) is None
    assert pack_kernel.quantize_tiles(normal((128, 128)).bfloat16(), E5M2) is None


def test_the_quotient_is_the_ieee_one() -> None:
    """fma(x, r, x tail), r = 1 / s rounded down, is x / s for every pair of bf16 significands with s from
    amax / 448, computed with fractions."""
    from fractions import Fraction

    def nearest(value: Fraction, *, down: bool = False) -> Fraction:
        """To 24 bits, half to even."""
        if not value:
            return value
        exponent = value.numerator.bit_length() - value.denominator.bit_length()
        exponent -= Fraction(2) ** exponent > value
        unit = Fraction(2) ** (exponent - 23)
        return (value // unit if down else round(value / unit)) * unit

    for amax in range(128, 256):
        s = nearest(Fraction(amax, 128 * 448))
        r = nearest(1 / s, down=True)
        tail = nearest(nearest(1 - s * r) * r)
        assert tail >= 0
        for x in range(128, 256):
            value = Fraction(x, 128)
            assert nearest(value * r + nearest(value * tail)) == nearest(value / s)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_codes_and_scales_are_the_references_to_the_bit(key: str, power_of_two: bool) -> None:
    """On the GPU, through `backend`; the same twice."""
    x = CASES[key].cuda()
    for _ in range(2):
        found = (backend.quantize_tiles(x, E4M3, power_of_two=power_of_two),
                 backend.quantize_tiles(x.t(), E4M3, power_of_two=power_of_two),
                 backend.quantize_blocks(x, E4M3, power_of_two=power_of_two),
                 backend.quantize_blocks(x.t(), E4M3, power_of_two=power_of_two),
                 *backend.quantize_both(x, E4M3, power_of_two=power_of_two))
        for q, expected in zip(found, references(x, power_of_two=power_of_two), strict=True):
            assert torch.equal(q.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(q.scales, expected.scales)


@pytest.mark.gpu
@needs_hopper
def test_every_bf16_over_every_bf16_amax() -> None:
    """All 65,536 values, each in tiles whose amax is any of 128 significands and 9 exponents."""
    values = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()].view(-1, 64)
    amax = torch.arange(128, 256, device="cuda").float()
    for exponent in (-126, -100, -20, -7, 0, 9, 40, 99, 119):
        x = torch.zeros(values.shape[0], 128, 128, device="cuda", dtype=torch.bfloat16)
        top = (amax * 2.0**exponent).bfloat16()
        x[:, :, 64:] = top[None, :, None]
        x[:, :, :64] = torch.where(values[:, None].abs() <= top[None, :, None], values[:, None], 0.0)
        x = x.flatten(0, 1)
        x = x[:x.shape[0] // 128 * 128]
        for q, expected in zip((backend.quantize_tiles(x, E4M3), backend.quantize_tiles(x.t(), E4M3)),
                               references(x)[:2], strict=True):
            assert torch.equal(q.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(q.scales, expected.scales)


@pytest.mark.gpu
@needs_hopper
def test_more_than_two_to_the_31_elements() -> None:
    """Offsets are 64-bit: the last rows and columns are right."""
    x = torch.zeros(2**18, 2**13 + 128, device="cuda", dtype=torch.bfloat16)
    x[-128:, -128:] = normal((128, 128)).bfloat16().cuda()
    expected = references(x[-128:, -128:])
    tiles, columns = backend.quantize_tiles(x, E4M3), backend.quantize_tiles(x.t(), E4M3)
    blocks, turned = backend.quantize_blocks(x, E4M3), backend.quantize_blocks(x.t(), E4M3)
    both = backend.quantize_both(x, E4M3)
    for q, one in zip((tiles, columns, blocks, turned, *both), expected, strict=True):
        assert torch.equal(q.codes[-128:, -128:].view(torch.uint8), one.codes.view(torch.uint8))
