"""Are the Triton kernels right, and how far are they from the memory floor?

    python benchmarks/gpu_kernels.py [--quick] [--json]

First part: codes, scales and counts of every kernel against the plain-torch reference on the same GPU, to the
bit, over shapes, dtypes and layouts with planted zeros, NaN, infinities and denormals; the reference on the
GPU against itself on the CPU; float sums within SUM_TOLERANCE, and the same bits in a second run. Any
difference is printed and makes the exit status 1.

Second part: median times on one large bf16 tensor, next to a device copy (the bandwidth that exists), to
`torch.linalg.vector_norm` (one read of the tensor) and to the plain-torch reference.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from fp8scope import quantize, quantize_kernel, roundtrip, roundtrip_kernel
from fp8scope.quantize import Quantized
from fp8scope.sums import COUNT_COLUMNS, MAX_COLUMNS, SUM_COLUMNS, RowSums
from fp8scope_protocol.formats import E4M3, E5M2, Format

SHAPES = [(128, 128), (256, 512), (1, 128), (1, 1), (127, 129), (130, 1), (512, 1000), (2048, 4096), (0, 5),
          (5, 0)]
QUICK_SHAPES = [(256, 512), (127, 129), (0, 5)]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SUM_TOLERANCE = 2e-6
"""Relative. Both add 128 fp32 numbers a tile, in another order: about 1e-7. `xe`, of mixed signs, is measured
against sqrt(sum x^2 sum e^2)."""
QUANTIZERS = ("quantize_tiles", "quantize_blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One timed function: microseconds, the bytes it must move, and what that makes of the copy's rate."""

    microseconds: float
    gigabytes_per_second: float
    share_of_copy: float
    over_norm: float
    over_reference: float | None


def inputs(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors on the GPU that a quantizer could get wrong, with a name each."""
    torch.manual_seed(seed)
    normal = torch.randn(shape, device="cuda")
    yield "normal", normal.to(dtype)
    yield "normal, transposed", normal.to(dtype).t()
    yield "every other column", normal.to(dtype)[:, ::2]
    wide = normal * torch.logspace(-44, 4, shape[1], device="cuda")
    yield "48 decades, denormals", wide.to(dtype)
    yield "48 decades, transposed", wide.to(dtype).t()
    outliers = normal.clone()
    outliers[torch.rand(shape, device="cuda") < 1e-3] *= 1e4
    yield "outliers", outliers.to(dtype)
    planted = normal * 1e-3
    flat = planted.view(-1)
    if flat.numel() >= 128:
        planted[0] = 0.0
        planted[:, 0] = -0.0
        flat[100], flat[flat.numel() // 2], flat[-1] = float("nan"), float("inf"), float("-inf")
    yield "planted zero, NaN, Inf", planted.to(dtype)
    yield "planted, transposed", planted.to(dtype).t()
    yield "all zero", torch.zeros(shape, device="cuda", dtype=dtype)
    yield "all the smallest denormal", torch.full(shape, 1e-45, device="cuda").to(dtype)
    yield "largest", torch.full(shape, torch.finfo(dtype).max, device="cuda", dtype=dtype)


def check(shapes: list[tuple[int, int]], dtypes: tuple[torch.dtype, ...]) -> tuple[int, list[str]]:
    """(comparisons made, differences found) over every kernel, format, scale policy and input."""
    made, wrong = 0, []
    for seed, shape in enumerate(shapes):
        for dtype in dtypes:
            for name, x in inputs(shape, dtype, seed):
                # Compilations are what takes the time here: E5M2 changes constants only, fp16 only the load.
                for element in (E4M3, E5M2) if seed == 0 and dtype == torch.bfloat16 else (E4M3,):
                    where = f"{element.name} {tuple(x.shape)} {dtype} {name}"
                    for function, options in variants(x):
                        wrong += compare_quantizer(function, x, element, options, f"{where} {list(options)}")
                        made += 1
                    for scaling in roundtrip_kernel.SCALINGS if dtype != torch.float16 else ():
                        wrong += compare_round_trip(x, element, scaling, f"{where} {scaling}")
                        made += 2
    return made, wrong


def variants(x: Tensor) -> Iterator[tuple[str, dict[str, bool | Tensor]]]:
    """Every quantizer with every option that changes its arithmetic."""
    for function in QUANTIZERS:
        yield function, {}
        yield function, {"power_of_two": True}
    tiles = -(-x.shape[1] // 128)
    yield "quantize_tiles", {"scales": torch.rand(x.shape[0], tiles, device="cuda") * 1e-2 + 1e-4}
    yield "quantize_tiles", {"scales": torch.full((1, 1), 3e-3, device="cuda")}
    yield "quantize_blocks", {"scales": torch.rand(-(-x.shape[0] // 128), tiles, device="cuda") * 1e-2 + 1e-4}


def compare_quantizer(
    function: str, x: Tensor, element: Format, options: dict[str, bool | Tensor], where: str
) -> list[str]:
    ours = as_list(getattr(quantize_kernel, function)(x, element, **options))
    reference = as_list(getattr(quantize, function)(x, element, **options))
    on_cpu = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in options.items()}
    host = as_list(getattr(quantize, function)(x.cpu(), element, **on_cpu))
    wrong = []
    for a, b, c in zip(ours, reference, host, strict=True):
        wrong += different(a, b, f"{function}, kernel against reference: {where}")
        wrong += different(b, c, f"{function}, reference on GPU against CPU: {where}")
    return wrong


def as_list(got: Quantized | tuple[Quantized, Quantized]) -> list[Quantized]:
    return [got] if isinstance(got, Quantized) else list(got)


def different(a: Quantized, b: Quantized, where: str) -> list[str]:
    codes, other = a.codes.view(torch.uint8).cpu(), b.codes.view(torch.uint8).cpu()
    bits, other_bits = (q.scales.contiguous().view(torch.int32).cpu() for q in (a, b))
    out = []
    if bits.shape != other_bits.shape or not torch.equal(bits, other_bits):
        out.append(f"scales differ: {where}" + first_difference(bits, other_bits))
    if codes.shape != other.shape or not torch.equal(codes, other):
        out.append(f"codes differ: {where}" + first_difference(codes, other))
    return out


def first_difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"; shapes {tuple(a.shape)} and {tuple(b.shape)}"
    places = (a != b).nonzero()
    at = tuple(places[0].tolist())
    return f"; {len(places)} of {a.numel()}, first at {at}: {a[at].item():#x} and {b[at].item():#x}"


def compare_round_trip(x: Tensor, element: Format, scaling: str, where: str) -> list[str]:
    """Current scales, then one given scale with the codes it yields."""
    given = torch.full((1, 1), 3e-3, device="cuda")
    quantizer = quantize.quantize_tiles if scaling == "tile 1x128" else quantize.quantize_blocks
    codes = quantizer(x, element, scales=given).codes
    wrong = []
    for scales, used in ((None, None), (given, codes)):
        label = f"round_trip {'current' if scales is None else 'given'}: {where}"
        ours = roundtrip_kernel.round_trip(x, element, scaling, scales=scales, codes=used)
        again = roundtrip_kernel.round_trip(x, element, scaling, scales=scales, codes=used)
        reference = roundtrip.round_trip(x, element, scaling, scales=scales, codes=used)
        wrong += [f"{label}: {what}" for what in row_differences(ours, reference)]
        if not all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)):
            wrong.append(f"{label}: two runs differ")
    return wrong


def row_differences(ours: RowSums, reference: RowSums) -> list[str]:
    """Columns that differ: counts and histogram exactly, extremes to 1e-12, sums to SUM_TOLERANCE."""
    found = []
    for name, a, b in zip(COUNT_COLUMNS, ours.counts.tolist(), reference.counts.tolist(), strict=True):
        if a != b:
            found.append(f"{name} {a} and {b}")
    sums = dict(zip(SUM_COLUMNS, reference.sums.tolist(), strict=True))
    for name, a in zip(SUM_COLUMNS, ours.sums.tolist(), strict=True):
        size = (sums["coded_x2"] * sums["e2"]) ** 0.5 if name == "xe" else abs(sums[name])
        if a != sums[name] and not abs(a - sums[name]) <= SUM_TOLERANCE * size:
            found.append(f"{name} {a} and {sums[name]}")
    for name, a, b in zip(MAX_COLUMNS, ours.maxes.tolist(), reference.maxes.tolist(), strict=True):
        if a != b and not abs(a - b) <= 1e-12 * max(1.0, abs(b)):
            found.append(f"{name} {a} and {b}")
    if not torch.equal(ours.histogram, reference.histogram):
        found.append("histogram")
    return found


def median_us(function: Callable[[], object], quick: bool) -> float:
    return 1e3 * float(do_bench(function, warmup=20, rep=50 if quick else 200, return_mode="median"))


def times(quick: bool) -> dict[str, Speed]:
    """Medians on a bf16 tensor of 64 MiB (--quick) or 256 MiB; do_bench flushes the L2 between runs."""
    rows, columns = (8192, 4096) if quick else (16384, 8192)
    x = (torch.randn(rows, columns, device="cuda") * 0.02).to(torch.bfloat16)
    target = torch.empty_like(x)
    n = x.numel()
    copy_us = median_us(lambda: target.copy_(x), quick)
    copy_rate = 4 * n / copy_us
    norm_us = median_us(lambda: torch.linalg.vector_norm(x), quick)

    def speed(us: float, moved: float, reference_us: float | None = None) -> Speed:
        return Speed(
            microseconds=us, gigabytes_per_second=moved / us * 1e-3, share_of_copy=moved / us / copy_rate,
            over_norm=us / norm_us, over_reference=None if reference_us is None else us / reference_us,
        )

    found = {"copy": speed(copy_us, 4 * n), "vector_norm": speed(norm_us, 2 * n)}
    for name, source, function, moved in (
        ("quantize_tiles", x, "quantize_tiles", 3 * n + 4 * n // 128),
        ("quantize_tiles of x.t()", x.t(), "quantize_tiles", 3 * n + 4 * n // 128),
        ("quantize_blocks", x, "quantize_blocks", 3 * n),
    ):
        kernel, torch_only = getattr(quantize_kernel, function), getattr(quantize, function)
        found[name] = speed(median_us(partial(kernel, source, E4M3), quick), moved,
                            median_us(partial(torch_only, source, E4M3), quick))
    row, reference_row = RowSums.zeros("cuda"), RowSums.zeros("cuda")
    for name, source, scaling in (
        ("round_trip tile 1x128", x, "tile 1x128"),
        ("round_trip tile 1x128 of x.t()", x.t(), "tile 1x128"),
        ("round_trip block 128x128", x, "block 128x128"),
    ):
        found[name] = speed(
            median_us(partial(roundtrip_kernel.round_trip, source, E4M3, scaling, out=row), quick), 2 * n,
            median_us(partial(roundtrip.round_trip, source, E4M3, scaling, out=reference_row), quick),
        )
    return found


def show(found: dict[str, Speed]) -> None:
    """The table: share of the copy's bandwidth, multiple of the norm's time, how often faster than torch."""
    print(f"{'':32} {'us':>9} {'GB/s':>7} {'of copy':>8} {'x norm':>7} {'x torch':>8}")
    for name, one in found.items():
        faster = "" if one.over_reference is None else f"{1 / one.over_reference:8.1f}"
        print(f"{name:32} {one.microseconds:9.1f} {one.gigabytes_per_second:7.0f} {one.share_of_copy:8.0%} "
              f"{one.over_norm:7.2f} {faster:>8}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and dtypes, a 64 MiB tensor")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("gpu_kernels: needs a CUDA device of compute capability 8.9 or more", file=sys.stderr)
        return 2
    quick = arguments.quick
    made, wrong = check(QUICK_SHAPES if quick else SHAPES, DTYPES[:2] if quick else DTYPES)
    for line in wrong[:40]:
        print(line)
    print(f"{made} comparisons, {len(wrong)} differences")
    found = times(quick)
    show(found)
    if arguments.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                   "triton": triton.__version__}
        results = {"comparisons": made, "differences": len(wrong),
                   "times": {name: asdict(one) for name, one in found.items()}}
        print(json.dumps({"benchmark": "gpu_kernels", "machine": machine, "results": results}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
