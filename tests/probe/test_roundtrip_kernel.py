"""The Triton round trip against the plain-torch one: logic in Triton's interpreter, bits on a GPU.

As in test_quantize_kernel, one child process runs every case. The interpreter's cast to E4M3 loses carries,
so cases either hand the kernel the codes of the reference, or hold values that need no rounding.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
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

CHILD = """
import sys, torch
from fp8scope import roundtrip_kernel
from fp8scope_protocol.formats import FORMATS
answers = {}
for key, (x, format, scaling, options) in torch.load(sys.argv[1]).items():
    row = roundtrip_kernel.round_trip(x, FORMATS[format], scaling, **options)
    if key.endswith("twice"):
        roundtrip_kernel.round_trip(x, FORMATS[format], scaling, out=row, **options)
    answers[key] = tuple(part.clone() for part in row)
torch.save(answers, sys.argv[2])
"""

Case = tuple[Tensor, str, str, dict[str, Any]]


def normal(shape: tuple[int, int], *, decades: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian values whose columns span `decades`, so that some underflow."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    spread = torch.logspace(-decades, 0, shape[1])
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


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
    powers = 2.0 ** torch.arange(-16, 9).repeat(6)[:130].float().expand(3, 130)
    for scaling in SCALINGS:  # what depends on how tiles share scales
        for shape in ((1, 1), (130, 1), (0, 5)):
            out[f"{scaling} {shape}"] = with_codes(normal(shape), scaling)
        out[f"{scaling} planted"] = with_codes(x, scaling)
        out[f"{scaling} transposed"] = with_codes(x.t(), scaling)
        out[f"{scaling} too small scales"] = with_codes(x, scaling, scales=stretched(x, scaling, 0.3))
        out[f"{scaling} too large scales"] = with_codes(x, scaling, scales=stretched(x, scaling, 900.0))
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
    folder: Path = tmp_path_factory.mktemp("interpreter")
    torch.save(CASES, folder / "cases.pt")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(folder / "cases.pt"), str(folder / "answers.pt")],
        check=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=240,
    )
    return {key: RowSums(*parts) for key, parts in torch.load(folder / "answers.pt").items()}


@pytest.mark.parametrize("key", CASES)
def test_kernel_agrees_with_reference_in_the_interpreter(key: str, answers: dict[str, RowSums]) -> None:
    """Counts, histogram and extremes are equal, sums agree to fp32 rounding: masks, strides, NaN, Inf, zeros,
    given scales, given codes, stochastic underflow, 1e-30 and 1e30, empty tensors, two calls into one row."""
    x, format, scaling, options = CASES[key]
    reference = roundtrip.round_trip(x, FORMATS[format], scaling, **options)
    if key.endswith("twice"):
        roundtrip.round_trip(x, FORMATS[format], scaling, out=reference, **options)
    assert differences(answers[key], reference) == []


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
            assert differences(ours, roundtrip.round_trip(source, E4M3, scaling, scales=scales)) == []
            again = roundtrip_kernel.round_trip(source, E4M3, scaling, scales=scales)
            assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def differences(ours: RowSums, reference: RowSums) -> list[str]:
    """What differs, in words; counts, histogram and extremes exactly, sums within SUM_TOLERANCE."""
    found = []
    for name, a, b in zip(COUNT_COLUMNS, ours.counts.tolist(), reference.counts.tolist(), strict=True):
        if a != b:
            found.append(f"{name}: {a} and {b}")
    sums = dict(zip(SUM_COLUMNS, reference.sums.tolist(), strict=True))
    for name, a in zip(SUM_COLUMNS, ours.sums.tolist(), strict=True):
        size = math.sqrt(sums["coded_x2"] * sums["e2"]) if name == "xe" else abs(sums[name])
        if not abs(a - sums[name]) <= SUM_TOLERANCE * size:
            found.append(f"{name}: {a} and {sums[name]}")
    for name, a, b in zip(MAX_COLUMNS, ours.maxes.tolist(), reference.maxes.tolist(), strict=True):
        if a != b and not abs(a - b) <= 1e-12 * max(1.0, abs(b)):
            found.append(f"{name}: {a} and {b}")
    if not torch.equal(ours.histogram, reference.histogram):
        found.append(f"histogram: {ours.histogram.tolist()} and {reference.histogram.tolist()}")
    return found
