"""The Triton round trip of any format and scaling against the plain-torch one.

Its codes are arithmetic, so the interpreter's are right too: counts, histograms and extremes are compared to
the bit, as they are on a GPU. As in test_roundtrip_kernel, one child process runs every case.
"""

import math
from typing import Any

import pytest
import torch
from tests.probe.kernel_cases import Case, differences, interpreted, normal
from tests.waits import no_waits
from torch import Tensor

from fp8scope import backend, roundtrip
from fp8scope.quantize import quantize
from fp8scope.sums import COUNT_COLUMNS, MAX_COLUMNS, SUM_COLUMNS, RowSums
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, FORMATS

triton = pytest.importorskip("triton", reason="triton is not installed")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PAIRS = [
    *[("int8", s) for s in ("tensorwise", "rowwise", "tile 1x128", "block 128x128", "flat 32", "flat 100",
                            "flat 256", "flat 4096")],
    ("int4", "tile 1x128"), ("int4", "block 128x128"), ("mxfp8", "mx 1x32 floor"), ("mxfp8", "mx 1x32 rceil"),
    ("e4m3", "rowwise"), ("e4m3", "tensorwise"), ("e4m3", "tile 1x128"), ("e5m2", "flat 256"),
    ("e5m2", "block 128x128"),
]
SUM_TOLERANCE = 1e-6
"""Relative; see `kernel_cases.differences`."""


def planted(rows: int = 37, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, 150] with a zero row, NaN, both infinities and minus zero."""
    x = normal((rows, 150), dtype=dtype)
    x[2] = 0.0
    x[3, 7], x[4, 140], x[5, 149] = float("nan"), float("inf"), float("-inf")
    x[6, 0] = -0.0
    return x


def ties(format: str) -> Tensor:
    """[32, 128]: every code of the format, halves between neighbours, and values just beside those."""
    element = FORMATS[format]
    halves = torch.arange(0, 2048, dtype=torch.float64)
    codes = halves * element.smallest_subnormal / 2
    if not element.is_integer:
        codes = torch.cat([codes[:512], codes[:512] * 64, codes[:512] * 4096, codes[:512] * 2.0**14])
    codes = codes.clamp(max=element.largest)
    beside = torch.cat([codes, codes.float().nextafter(torch.tensor(0.0)).double()])
    return (beside * torch.tensor([1.0, -1.0]).repeat(2048)).float().view(32, 128)


def cases() -> dict[str, Case]:
    out: dict[str, Case] = {}
    x, plain = planted(), {"histogram": False}  # quicker; the first case of each pair has it
    for i, (format, scaling) in enumerate(PAIRS):
        out[f"{format} {scaling}"] = (x, format, scaling, {})
        scales = quantize(x, FORMATS[format], scaling).scales.nan_to_num(1.0)
        factor = (0.25, 512.0)[i % 2]
        out[f"{format} {scaling} x {factor}"] = (x, format, scaling, {"scales": scales * factor, **plain})
    for scaling in ("rowwise", "tensorwise", "block 128x128"):
        out[f"tall {scaling}"] = (planted(133)[:, :130], "int8", scaling, plain)
        out[f"tall clean {scaling}"] = (planted(133)[6:, :130], "int8", scaling, plain)
        out[f"one {scaling}"] = (normal((1, 1)), "int8", scaling, plain)
    for scaling in ("rowwise", "flat 100"):
        out[f"transposed {scaling}"] = (x[6:].t(), "int8", scaling, plain)
        out[f"sliced {scaling}"] = (x[::2, 10:77], "int8", scaling, plain)
        out[f"nothing finite {scaling}"] = (torch.full((3, 130), math.nan), "int8", scaling, plain)
        out[f"zeros {scaling}"] = (torch.zeros(3, 130), "int8", scaling, plain)
        for shape in ((0, 5), (5, 0)):
            out[f"{shape} {scaling}"] = (torch.zeros(shape), "int8", scaling, plain)
    for format in ("int8", "int4", "e4m3", "e5m2"):
        out[f"ties {format}"] = (ties(format), format, "tensorwise", {"scales": torch.ones(1, 1)})
    for dtype in (torch.bfloat16, torch.float16):
        out[f"{dtype}"] = (planted(dtype=dtype)[:8], "int8", "rowwise", plain)
    for scale in (1e-38, 1e30):
        for scaling in ("mx 1x32 floor", "mx 1x32 rceil"):
            out[f"{scaling} {scale}"] = (normal((5, 100)) * scale, "mxfp8", scaling, plain)
        out[f"rowwise {scale}"] = (normal((5, 300)) * scale, "int8", "rowwise", plain)
    out["twice"] = (x[:8], "int8", "flat 256", {})
    out["power of two"] = (x[:8], "int8", "rowwise", {"power_of_two": True, **plain})
    odd = torch.tensor([0.0, math.nan, math.inf, -1.0])
    out["odd scales"] = (x[8:12, :40], "int8", "rowwise", {"scales": odd})
    q = quantize(x[:8], FORMATS["int8"], "rowwise")
    out["int8 codes"] = (x[:8], "int8", "rowwise", {"codes": q.codes, "scales": q.scales, **plain})
    out["decoded"] = (x[:8], "int8", "flat 64", {"codes": q.codes.float() * 0.77, **plain})
    e = quantize(x[:8], E4M3, "rowwise", scales=torch.full((8, 1), 0.01))
    stochastic = {"codes": e.codes, "scales": e.scales, "rounding": "stochastic", **plain}
    out["stochastic"] = (x[:8], "e4m3", "rowwise", stochastic)
    return out


CASES = cases()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RowSums]:
    """The rows that the kernel fills for `CASES` in the interpreter."""
    return interpreted("group_kernel", CASES, tmp_path_factory.mktemp("interpreter"))


@pytest.mark.parametrize("key", CASES)
def test_kernel_agrees_with_reference_in_the_interpreter(key: str, answers: dict[str, RowSums]) -> None:
    """Counts, histogram and extremes are equal, sums agree to fp32 rounding: every pair with current and
    other scales, views, NaN, Inf, zeros, ties of every format, foreign codes, 1e-38 and 1e30, empty ones."""
    x, format, scaling, options = CASES[key]
    reference = roundtrip.round_trip(x, FORMATS[format], scaling, **options)
    if key.endswith("twice"):
        roundtrip.round_trip(x, FORMATS[format], scaling, out=reference, **options)
    assert differences(answers[key], reference, tolerance=SUM_TOLERANCE) == []


def test_cases_reach_every_column() -> None:
    """No column agrees only because it is never touched."""
    empty = RowSums.zeros("cpu")
    rows = [roundtrip.round_trip(x, FORMATS[format], scaling, **options)
            for x, format, scaling, options in CASES.values()]
    columns = {"counts": COUNT_COLUMNS[:13], "sums": SUM_COLUMNS[:8], "maxes": MAX_COLUMNS[:5]}
    for part, names in columns.items():
        for i, name in enumerate(names):
            assert any(getattr(row, part)[i] != getattr(empty, part)[i] for row in rows), name


def test_kernel_refuses_what_has_no_scales() -> None:
    """A plain cast is left to the reference."""
    from fp8scope import group_kernel

    with pytest.raises(Invalid, match="what has scales"):
        group_kernel.round_trip(torch.zeros(2, 128), E4M3, "none")
    with pytest.raises(Invalid, match="2-D and floating"):
        group_kernel.round_trip(torch.zeros(2, 3, 4), E4M3, "rowwise")


@pytest.mark.parametrize(("capability", "flat", "given", "dtype", "rule", "ones"), [
    (80, False, False, "bf16", 1, ()), (80, True, True, "fp32", 0, ()), (90, True, False, "fp16", 2, ()),
    (90, False, True, "bf16", 0, ("R", "stride_r")),
    (90, True, False, "bf16", 0, ("C", "stride_c", "N", "R")),
    (90, False, False, "fp32", 0, ("C", "stride_c", "N", "R")),
])
def test_kernels_compile(
    capability: int, flat: bool, given: bool, dtype: str, rule: int, ones: tuple[str, ...]
) -> None:
    """No GPU is needed: ptxas comes with Triton. Nothing in them asks for FP8 in hardware. Sizes of 1 are
    constants to Triton, which lack what other numbers have."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope import group_kernel

    options: dict[str, Any] = {
        "LARGEST": 127.0, "SUBNORMAL": 1.0, "MANTISSA": 7, "NORMAL": 134, "BAD": 0.01, "RULE": rule,
        "POWER_OF_TWO": False, "GIVEN": given, "CODED": given, "STOCHASTIC": False, "HISTOGRAM": True,
        "FLAT": flat, "FOLD": not flat, "ROWS": 32, "W": 128, "GROUPS": 1 if flat else 128,
        "PIECES": 128, "FLAGGED": False,
    }
    one = dict.fromkeys(ones, 1)
    kinds = {"x_ptr": f"*{dtype}", "codes_ptr": "*i8", "reals_ptr": "*fp64", "squares_ptr": "*fp64",
             "scales_ptr": "*fp32", "ints_ptr": "*i32", "bits_ptr": "*i32",
             "flag_ptr": "*i32", "stride_r": "i64", "N": "i64"}
    for name in ("_amax_kernel", "_pieces_kernel", "_groups_kernel"):
        kernel = getattr(group_kernel, name)
        names = kernel.arg_names
        specialized = one if name != "_groups_kernel" else {}
        constants = {key: value for key, value in (options | specialized).items() if key in names}
        signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs={
            (names.index(key),): value for key, value in constants.items()})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert compiled.asm["cubin"]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("format", "scaling"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(257, 1000), (1, 5000), (4096, 33), (0, 5)])
def test_kernel_agrees_with_reference_on_the_gpu(
    shape: tuple[int, int], dtype: torch.dtype, format: str, scaling: str
) -> None:
    """Counts, histogram and extremes to the bit, rowwise and transposed, current and given scales and codes;
    and a second run gives the same bits. The reference's codes are the hardware's."""
    from fp8scope import group_kernel

    element = FORMATS[format]
    x = normal(shape, decades=30, dtype=dtype).cuda()
    if x.numel():
        x[0, 5], x[-1, 17], x[-1, -1], x[:, 2] = 0.0, float("nan"), float("-inf"), 0.0
    for source in (x, x.t()):
        given = quantize(source, element, scaling).scales.nan_to_num(1.0) * 3.0
        codes = quantize(source, element, scaling, scales=given).codes
        how: list[dict[str, Any]] = [{}, {"scales": given}, {"scales": given, "codes": codes}]
        for options in how:
            ours = group_kernel.round_trip(source, element, scaling, **options)
            reference = roundtrip.round_trip(source, element, scaling, **options)
            assert differences(ours, reference, tolerance=SUM_TOLERANCE) == []
            again = group_kernel.round_trip(source, element, scaling, **options)
            assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("key", CASES)
def test_interpreted_cases_hold_on_the_gpu(key: str) -> None:
    """The same cases through `backend`, which chooses the kernel, without waiting for the device."""
    x, format, scaling, options = CASES[key]
    there: dict[str, Any] = {name: one.cuda() if isinstance(one, Tensor) else one
                             for name, one in options.items()}
    source, rows = x.cuda(), RowSums.zeros("cuda")
    backend.round_trip(source, FORMATS[format], scaling, **there)  # compiles
    with no_waits():
        backend.round_trip(source, FORMATS[format], scaling, out=rows, **there)
    reference = roundtrip.round_trip(source, FORMATS[format], scaling, **there)
    assert differences(rows, reference, tolerance=SUM_TOLERANCE) == []


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "flat 256"])
def test_more_than_two_to_the_31_elements(scaling: str) -> None:
    """Offsets are 64-bit."""
    from fp8scope import group_kernel

    x = torch.zeros((2**16 + 8, 2**15), dtype=torch.bfloat16, device="cuda")
    x[-1, -3:] = torch.tensor([3.0, -100.0, 0.1])
    row = group_kernel.round_trip(x, FORMATS["int8"], scaling)
    counts = dict(zip(COUNT_COLUMNS, row.counts.tolist(), strict=True))
    assert (counts["elements"], counts["nonzero"], counts["underflow"]) == (x.numel(), 3, 1)
    assert row.maxes[MAX_COLUMNS.index("amax")].item() == 100.0
