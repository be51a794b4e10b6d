"""The Triton round trip against the plain-torch one: logic in Triton's interpreter, bits on a GPU.

As in test_quantize_kernel, one child process runs every case. The interpreter's cast to E4M3 loses carries,
so cases either hand the kernel the codes of the reference, or hold values that need no rounding.
"""

import math
from typing import Any

import pytest
import torch
from tests.probe.kernel_cases import Case, differences, interpreted, normal
from torch import Tensor

from fp8scope import quantize, roundtrip
from fp8scope.sums import COUNT_COLUMNS, MAX_COLUMNS, SUM_COLUMNS, RowSums
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, FORMATS

pytest.importorskip("triton", reason="triton is not installed")

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="bit-exactness needs a CUDA device of compute capability 8.9",
)

SCALINGS = {"tile 1x128": quantize.quantize_tiles, "block 128x128": quantize.quantize_blocks}

SUM_TOLERANCE = 2e-6
"""Relative. Both add fp32 numbers within a tile, in another order: 128 of them are off by about 1e-7. `xe` is
a sum of mixed signs, so it is measured against sqrt(sum x^2 sum e^2). The kernel takes log2 s in fp32."""


def planted(dtype: torch.dtype = torch.float32) -> Tensor:
    """[133, 200] with a zero tile, NaN, both infinities and minus zero; the last four rows hold no NaN."""
    x = normal((133, 200), dtype=dtype)
    x[2] = 0.0
    x[3, 7], x[4, 140], x[5, 199] = float("nan"), float("inf"), float("-inf")
    x[6, 0] = -0.0
    return x


def with_codes(x: Tensor, scaling: str, format: str = "e4m3", **options: Any) -> Case:
    """A case whose codes (and scales, if `options` gives any) are those of the reference."""
    q = SCALINGS[scaling](x, FORMATS[format], **options)
    return x, format, scaling, {"codes": q.codes, **options}


def stretched(x: Tensor, scaling: str, factor: float) -> Tensor:
    """The current scales times `factor`: below 1 they saturate, above they underflow."""
    return SCALINGS[scaling](x, E4M3).scales * factor


def cases() -> dict[str, Case]:
    out: dict[str, Case] = {}
    x, one_scale = planted(), torch.full((1, 1), 0.25)
    tall, wide = x[:, :72], x[:40]  # two tiles each; the interpreter takes seconds for more
    powers = 2.0 ** torch.arange(-16, 9).repeat(6)[:130].float().expand(3, 130)
    for scaling in SCALINGS:  # what depends on how tiles share scales
        for shape in ((1, 1), (130, 1), (0, 5)):
            out[f"{scaling} {shape}"] = with_codes(normal(shape), scaling)
        out[f"{scaling} planted"] = with_codes(x, scaling)
        out[f"{scaling} transposed"] = with_codes(x[:, 7:147].t(), scaling)
        out[f"{scaling} too small scales"] = with_codes(tall, scaling, scales=stretched(tall, scaling, 0.3))
        out[f"{scaling} too large scales"] = with_codes(wide, scaling, scales=stretched(wide, scaling, 900.0))
        out[f"{scaling} own codes"] = (powers, "e4m3", scaling, {"power_of_two": True})
        out[f"{scaling} own codes, one scale"] = (powers, "e4m3", scaling, {"scales": one_scale})
        out[f"{scaling} nothing finite"] = with_codes(torch.full((3, 130), math.nan), scaling)
        out[f"{scaling} all zero"] = with_codes(torch.zeros(3, 130), scaling)
    scaling = "tile 1x128"
    for dtype in (torch.bfloat16, torch.float16):
        out[f"{dtype}"] = with_codes(planted(dtype)[:8], scaling)
    out["no columns"] = with_codes(normal((5, 0)), scaling)
    out["strided"] = with_codes(x[::2, 1::3], scaling)
    out["twice"] = with_codes(x[:8], scaling)
    out["power of two"] = with_codes(x[:8], scaling, power_of_two=True)
    out["e5m2"] = with_codes(x[:8], scaling, "e5m2")
    out["tiny"] = with_codes(normal((5, 300)) * 1e-30, scaling)
    out["huge"] = with_codes(normal((5, 300)) * 1e30, scaling)
    out["no histogram"] = with_codes(x[:8], scaling)
    out["no histogram"][3]["histogram"] = False
    stochastic = with_codes(x[:8], scaling, scales=stretched(x[:8], scaling, 900.0))
    out["stochastic"] = (*stochastic[:3], {**stochastic[3], "rounding": "stochastic"})
    return out


CASES = cases()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RowSums]:
    """The rows that the kernel fills for `CASES` in the interpreter."""
    return interpreted("roundtrip_kernel", CASES, tmp_path_factory.mktemp("interpreter"))


@pytest.mark.parametrize("key", CASES)
def test_kernel_agrees_with_reference_in_the_interpreter(key: str, answers: dict[str, RowSums]) -> None:
    """Counts, histogram and extremes are equal, sums agree to fp32 rounding: masks, strides, NaN, Inf, zeros,
    given scales, given codes, stochastic underflow, 1e-30 and 1e30, empty tensors, two calls into one row."""
    x, format, scaling, options = CASES[key]
    reference = roundtrip.round_trip(x, FORMATS[format], scaling, **options)
    if key.endswith("twice"):
        roundtrip.round_trip(x, FORMATS[format], scaling, out=reference, **options)
    assert differences(answers[key], reference, tolerance=SUM_TOLERANCE) == []


def test_cases_reach_every_column() -> None:
    """Each count, sum and maximum that the kernel fills differs from an empty row's in some case: no column
    agrees only because it is never touched."""
    empty = RowSums.zeros("cpu")
    rows = [roundtrip.round_trip(x, FORMATS[format], scaling, **options)
            for x, format, scaling, options in CASES.values()]
    columns = {"counts": COUNT_COLUMNS[:13], "sums": SUM_COLUMNS[:8], "maxes": MAX_COLUMNS[:5]}
    for part, names in columns.items():
        for i, name in enumerate(names):
            assert any(getattr(row, part)[i] != getattr(empty, part)[i] for row in rows), name


def test_kernel_refuses_what_only_the_reference_knows() -> None:
    """Tensorwise scaling, codes of another dtype and what is not a matrix are errors, not guesses."""
    from fp8scope import roundtrip_kernel

    x = torch.zeros(2, 128)
    with pytest.raises(Invalid, match="tile 1x128 or block 128x128"):
        roundtrip_kernel.round_trip(x, E4M3, "tensorwise")
    with pytest.raises(Invalid, match="float8_e4m3fn"):
        roundtrip_kernel.round_trip(x, E4M3, "tile 1x128", codes=x)
    with pytest.raises(Invalid, match="flatten leading dimensions"):
        roundtrip_kernel.round_trip(torch.zeros(2, 3, 4), E4M3, "tile 1x128")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(257, 1000), (128, 128), (1, 4096), (0, 5)])
def test_kernel_agrees_with_reference_on_the_gpu(
    shape: tuple[int, int], dtype: torch.dtype, scaling: str
) -> None:
    """With the hardware's own codes, counts are equal and sums agree, rowwise and transposed, current and
    given scales; and a second run gives the same bits."""
    from fp8scope import roundtrip_kernel

    x = normal(shape, decades=40, dtype=dtype).cuda()
    if x.numel() > 4096:
        x[3], x[5, 17], x[7, -1] = 0.0, float("nan"), float("-inf")
    for source in (x, x.t()):
        for scales in (None, torch.full((1, 1), 1e-3, device="cuda")):
            ours = roundtrip_kernel.round_trip(source, E4M3, scaling, scales=scales)
            reference = roundtrip.round_trip(source, E4M3, scaling, scales=scales)
            assert differences(ours, reference, tolerance=SUM_TOLERANCE) == []
            again = roundtrip_kernel.round_trip(source, E4M3, scaling, scales=scales)
            assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
