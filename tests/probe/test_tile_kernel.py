"""Tiles of bf16 from one read against the plain-torch round trip and quantizer: logic in Triton's
interpreter, bits on a GPU. One child process runs every case of the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.probe.kernel_cases import differences, normal
from torch import Tensor

from fp8scope import backend, quantize, roundtrip
from fp8scope.quantize import Quantized
from fp8scope.sums import RowSums
from fp8scope_protocol.formats import E4M3, E5M2

pytest.importorskip("triton", reason="triton is not installed")

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="the kernel needs compute capability 9.0",
)

SUM_TOLERANCE = 1e-6
"""Relative; of `xe`, of mixed signs, against sqrt(sum x^2 sum e^2)."""

CHILD = """
import sys, torch
from fp8scope import tile_kernel
from fp8scope.sums import RowSums
from fp8scope_protocol.formats import E4M3
answers, TILES = {}, "tile 1x128"
for key, x in torch.load(sys.argv[1]).items():
    assert tile_kernel.fits(x, E4M3, TILES), key
    row = RowSums.zeros("cpu")
    q = tile_kernel.quantize_tiles(x, E4M3, power_of_two=key.endswith("power of two"), out=row)
    answers[key] = tuple(row), q.codes.view(torch.uint8), q.scales
answers["round trip alone"] = tuple(tile_kernel.round_trip(x, E4M3, TILES)), None, None
x = torch.cat([x] * 8)
answers["blocks"] = tuple(tile_kernel.round_trip(x, E4M3, "block 128x128")), None, None
torch.save(answers, sys.argv[2])
"""


def planted() -> Tensor:
    """Zeros, minus zero, NaN, both infinities and 1e30 in some tiles, a tile of zeros, and Gaussian ones."""
    x = normal((16, 256))
    x[2], x[6, 0], x[7, 5] = 0.0, -0.0, 1e30
    x[3, 7], x[4, 140], x[5, 199] = float("nan"), float("inf"), float("-inf")
    return x


def cases() -> dict[str, Tensor]:
    x = normal((16, 128))
    found = {
        "normal": normal((32, 256)), "48 decades": x * torch.logspace(-44, 4, 128), "huge": x * 1e37,
        "tiny": x * 1e-37, "denormal": x * 1e-40, "2^99": x * 2.0**99, "half zero": x.relu(),
        "ones": torch.ones(16, 128), "zeros": torch.zeros(16, 128), "nothing finite": x * float("nan"),
        "lost": x * 10.0 ** torch.linspace(-6, 0, 2048).view(128, 16).t(), "planted": planted(),
    }
    found |= {f"{name}, power of two": found[name] for name in ("huge", "planted")}
    whole = {key: one.bfloat16() for key, one in found.items()}
    apart = normal((32, 256)).bfloat16()
    strided = {"part of rows": apart[:, 64:192], "every other row": apart[::2]}
    return whole | strided | {"the last": whole["planted"]}


CASES = cases()

Answer = tuple[RowSums | None, Tensor, Tensor]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    folder: Path = tmp_path_factory.mktemp("tiles")
    ours, theirs = folder / "cases.pt", folder / "answers.pt"
    torch.save(CASES, ours)
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD, str(ours), str(theirs)], check=True,
                   env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=290)
    return {key: (row and RowSums(*row), codes, scales)
            for key, (row, codes, scales) in torch.load(theirs).items()}


def reference(key: str, x: Tensor) -> tuple[RowSums, Quantized]:
    power_of_two = key.endswith("power of two")
    row = roundtrip.round_trip(x, E4M3, "tile 1x128", histogram=False, power_of_two=power_of_two)
    return row, quantize.quantize_tiles(x, E4M3, power_of_two=power_of_two)


@pytest.mark.parametrize("key", CASES)
def test_sums_codes_and_scales_are_the_references_in_the_interpreter(
    key: str, answers: dict[str, Answer]
) -> None:
    """Counts, extremes, codes and scales to the bit from one kernel: NaN, Inf, zeros of both signs,
    underflow, denormals, 1e37, scales that are powers of two, rows that are apart."""
    row, codes, scales = answers[key]
    expected, q = reference(key, CASES[key])
    assert row is not None
    assert differences(row, expected, tolerance=SUM_TOLERANCE) == []
    assert torch.equal(codes, q.codes.view(torch.uint8))
    assert torch.equal(scales, q.scales)


def test_sums_without_codes_are_those_with_codes(answers: dict[str, Answer]) -> None:
    """Of the round trip alone."""
    row = answers["the last"][0]
    alone = answers["round trip alone"][0]
    assert row is not None
    assert alone is not None
    assert differences(alone, row, tolerance=SUM_TOLERANCE) == []


def test_blocks_have_the_references_sums_in_the_interpreter(answers: dict[str, Answer]) -> None:
    """[128,128] blocks, of which one has NaN and Inf in it."""
    x = torch.cat([CASES["the last"]] * 8)
    expected = roundtrip.round_trip(x, E4M3, "block 128x128", histogram=False)
    found = answers["blocks"][0]
    assert found is not None
    assert differences(found, expected, tolerance=SUM_TOLERANCE) == []


def test_what_does_not_fit_is_left_to_other_kernels() -> None:
    """Other formats and types, ragged shapes, adjacent columns, rows that begin anywhere, nothing at all."""
    from fp8scope.tile_kernel import fits

    x = torch.zeros(64, 256, dtype=torch.bfloat16)
    assert fits(x, E4M3, "tile 1x128")
    others = [x.float(), x[:-1], x[:, :-1], x.t(), x[:, 1:129], x[:0], x[0], x.view(64, 2, 128)]
    assert not any(fits(one, E4M3, "tile 1x128") for one in others)
    assert not fits(x, E5M2, "tile 1x128")
    assert not fits(x, E4M3, "block 128x128")
    assert fits(x.view(128, 128), E4M3, "block 128x128")
    assert not fits(x, E4M3, "rowwise")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("key", CASES)
def test_sums_codes_and_scales_are_the_references_on_the_gpu(key: str) -> None:
    """The same cases with the hardware's casts; `backend` gives what the kernel gives; every run has the bits
    of the first."""
    from fp8scope import tile_kernel

    x = CASES[key].cuda()
    power_of_two = key.endswith("power of two")
    expected, q = reference(key, x)
    for _ in range(2):
        row = RowSums.zeros("cuda")
        both = tile_kernel.quantize_tiles(x, E4M3, power_of_two=power_of_two, out=row)
        alone = backend.quantize_tiles(x, E4M3, power_of_two=power_of_two)
        trip = backend.round_trip(x, E4M3, "tile 1x128", histogram=False, power_of_two=power_of_two)
        assert differences(trip, expected, tolerance=SUM_TOLERANCE) == []
        assert differences(row, expected, tolerance=SUM_TOLERANCE) == []
        for one in (both, alone):
            assert torch.equal(one.codes.view(torch.uint8), q.codes.view(torch.uint8))
            assert torch.equal(one.scales, q.scales)
    again = tile_kernel.round_trip(x, E4M3, "tile 1x128", power_of_two=power_of_two)
    assert all(torch.equal(a, b) for a, b in zip(trip, again, strict=True))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("shape", [(4096, 2048), (16384, 8192), (16, 14336)])
def test_large_tensors_on_the_gpu(shape: tuple[int, int]) -> None:
    """Programs of many slabs, and of few; Gaussian values, heavy tails, and what lies 2^-20 below them."""
    from fp8scope import tile_kernel

    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda")
    heavy = x / (torch.randn(shape, device="cuda").abs() + 0.01)
    for one in (x, heavy, x * 2.0 ** -(20 * torch.rand(shape, device="cuda"))):
        y = torch.cat([one, one], 1).bfloat16()[:, 128:128 + shape[1]]  # rows are apart
        row = RowSums.zeros("cuda")
        q = tile_kernel.quantize_tiles(y, E4M3, out=row)
        expected, wanted = reference("", y)
        alone = tile_kernel.round_trip(y, E4M3, "tile 1x128")
        assert differences(alone, expected, tolerance=SUM_TOLERANCE) == []
        assert differences(row, expected, tolerance=SUM_TOLERANCE) == []
        assert torch.equal(q.codes.view(torch.uint8), wanted.codes.view(torch.uint8))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("shape", [(128, 128), (2048, 8192), (14336, 4096)])
def test_blocks_on_the_gpu(shape: tuple[int, int]) -> None:
    """Blocks as weights have them, with zeros, NaN in some, far up and far down; the same bits twice."""
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda") * 0.02
    holes = torch.where(torch.rand(shape, device="cuda") < 1e-5, float("nan"), x).relu()
    for one in (x, holes, x * 2.0 ** -(30 * torch.rand(shape, device="cuda")), x * 1e37, x * 1e-36, x * 0):
        y = one.bfloat16()
        for power_of_two in (False, True):
            row, again, expected = (
                trip(y, E4M3, "block 128x128", histogram=False, power_of_two=power_of_two)
                for trip in (backend.round_trip, backend.round_trip, roundtrip.round_trip))
            assert differences(row, expected, tolerance=SUM_TOLERANCE) == []
            assert all(torch.equal(a, b) for a, b in zip(row, again, strict=True))


@pytest.mark.gpu
@needs_hopper
def test_more_than_two_to_the_31_elements() -> None:
    """Offsets are 64-bit."""
    from fp8scope import tile_kernel

    x = torch.zeros((2**16 + 16, 2**15), dtype=torch.bfloat16, device="cuda")
    x[-1, -3:] = torch.tensor([3.0, -100.0, 0.1])
    row = tile_kernel.round_trip(x, E4M3, "tile 1x128")
    assert row.counts[0] == x.numel()
    assert row.counts[2] == 3
    assert row.maxes[0] == 100.0


@pytest.mark.gpu
@needs_hopper
def test_the_kernel_may_be_left_out_by_a_flag_on_the_device() -> None:
    """Under a flag of 0 nothing is added, under 1 everything is."""
    x, row = normal((32, 256)).bfloat16().cuda(), RowSums.zeros("cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    backend.round_trip(x, E4M3, "tile 1x128", histogram=False, out=row, flag=flag)
    assert row.counts.eq(0).all()
    assert row.sums.eq(0).all()
    backend.round_trip(x, E4M3, "tile 1x128", histogram=False, out=row, flag=flag.fill_(1))
    assert differences(row, reference("", x)[0], tolerance=SUM_TOLERANCE) == []
