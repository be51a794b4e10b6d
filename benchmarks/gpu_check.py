"""Are the FP8 linear's three GEMMs and its quantizers right on this GPU?

    python benchmarks/gpu_check.py [--quick] [--json]

GEMMs: output, input gradient and weight gradient of `Fp8Linear` against the float64 product of the
*dequantized* operands, over shapes in which K/128, N/128 and M/128 are no multiples of 4 and token counts no
multiples of 128; random, all-positive and outlier inputs; BF16 and fp32; current and delayed scales.
Against the full-precision product the error is 3.8 % and hides faults: all scales 2 % off read 4.2 %.

Bits: codes and scales of the quantizers, and the stochastic rounding of the optimizer's moments, on the GPU
against the CPU.

The exit status is 1 if any error is over its limit or any bit differs.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fp8scope import backend, quantize
from fp8scope.quantize import Quantized, dequantize
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer.gemm import rounded_matmul
from fp8scope_trainer.history import advance_histories
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe, quantize_both, quantize_weight
from fp8scope_trainer.rounding import hashed, key_of, lower, round_bf16, round_e4m3, round_integer

SHAPES = [(256, 256, 384), (130, 512, 640), (1000, 384, 128), (2048, 1024, 4096), (4096, 4096, 1024),
          (512, 640, 16384), (65536, 256, 384)]
"""(tokens, out features, in features): the contraction of wgrad is the tokens, that of fprop the last."""
QUICK_SHAPES = SHAPES[:3]
KINDS = ("random", "positive", "outliers")
LIMITS = {torch.bfloat16: 4e-3, torch.float32: 1e-3}
"""Of the relative error, by the dtype of the output; a weight gradient always comes in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """Relative error of one GEMM in one setting."""

    gemm: str
    shape: tuple[int, int, int]
    kind: str
    dtype: str
    policy: str
    error: float
    limit: float

    @property
    def missed(self) -> bool:
        return not self.error <= self.limit


def operand(kind: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Seeded values on the GPU."""
    x = torch.randn(rows, columns, device="cuda")
    if kind == "positive":
        x = x.abs()
    if kind == "outliers":
        x[torch.rand_like(x) < 1e-3] *= 1e3
    return x.to(dtype)


def relative(found: Tensor, exact: Tensor) -> float:
    """||found - exact|| / ||exact||, NaN if anything is."""
    return float(((found.double() - exact).norm() / exact.norm()).item())


def exactly(q: Quantized) -> Tensor:
    return dequantize(q).double()


def check_linear(
    shape: tuple[int, int, int], kind: str, dtype: torch.dtype, policy: str
) -> Iterator[Error]:
    """One forward and backward of a layer."""
    tokens, out_features, in_features = shape
    torch.manual_seed(0)
    recipe = Recipe(policy=policy)
    layer = Fp8Linear(in_features, out_features, bias=False, recipe=recipe, device="cuda")
    with torch.no_grad():
        layer.weight.copy_(operand(kind, out_features, in_features, torch.float32))
    x, dy = operand(kind, tokens, in_features, dtype), operand(kind, tokens, out_features, dtype)
    scale = None
    if layer.history is not None:
        layer.history.observe(x)
        advance_histories(layer)
        scale = layer.history.scale()
    x.requires_grad_()
    y = layer(x)
    torch.autograd.backward(y, dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    x_row, x_column = quantize_both(x.detach(), recipe, scale)
    dy_row, dy_column = quantize_both(dy, recipe)
    w = exactly(quantize_weight(layer.weight.detach(), recipe))
    products = {
        "fprop": (y.detach(), exactly(x_row) @ w.t()),
        "dgrad": (x.grad, exactly(dy_row) @ w),
        "wgrad": (layer.weight.grad, exactly(dy_column) @ exactly(x_column).t()),
    }
    for gemm, (found, exact) in products.items():
        yield Error(gemm=gemm, shape=shape, kind=kind, dtype=str(dtype), policy=policy,
                    error=relative(found, exact), limit=LIMITS[found.dtype])


def check_bf16(shape: tuple[int, int, int]) -> Iterator[Error]:
    """The fallback: products of operands rounded to BF16."""
    tokens, out_features, in_features = shape
    torch.manual_seed(0)
    a = operand("random", tokens, in_features, torch.float32)
    b = operand("random", in_features, out_features, torch.float32)
    exact = a.bfloat16().double() @ b.bfloat16().double()
    for dtype, limit in LIMITS.items():
        yield Error(gemm="bf16", shape=shape, kind="random", dtype=str(dtype), policy="-",
                    error=relative(rounded_matmul(a, b, dtype=dtype), exact), limit=limit)


def differing_bits() -> Iterator[str]:
    """What is not the same on the GPU and on the CPU."""
    for rows, columns in ((256, 384), (130, 200), (512, 640)):
        for kind in KINDS:
            x = operand(kind, rows, columns, torch.float32)
            x[0], x[1, 3], x[2, 5] = 0.0, torch.nan, torch.inf
            here = {"tiles": (backend.quantize_tiles(x, E4M3), quantize.quantize_tiles(x.cpu(), E4M3)),
                    "transposed": (backend.quantize_tiles(x.t(), E4M3),
                                   quantize.quantize_tiles(x.cpu().t(), E4M3)),
                    "blocks": (backend.quantize_blocks(x, E4M3), quantize.quantize_blocks(x.cpu(), E4M3))}
            for name, (on_gpu, on_cpu) in here.items():
                if not _same_codes(on_gpu.codes, on_cpu.codes):
                    yield f"codes of {name}, {kind}, {rows} x {columns}"
                if not torch.equal(on_gpu.scales.cpu(), on_cpu.scales):
                    yield f"scales of {name}, {kind}, {rows} x {columns}"
    indices = torch.arange(2**31, 2**31 + 2**18)
    key = key_of(seed=1, step=7, stream=3)
    random = [lower(hashed(i, key)) for i in (indices, indices.cuda())]
    if not torch.equal(random[0], random[1].cpu()):
        yield "random numbers of the optimizer's rounding"
    y = operand("random", 1, 2**18, torch.float32).view(-1) * 100
    codes = [round_e4m3(*pair, keep_nonzero=True) for pair in ((y.cpu(), random[0]), (y, random[1]))]
    if not _same_codes(codes[1], codes[0]):
        yield "stochastic rounding to E4M3"
    whole = [round_integer(*pair, largest=255.0) for pair in ((y.cpu(), random[0]), (y, random[1]))]
    halves = [round_bf16(*pair) for pair in ((y.cpu(), random[0]), (y, random[1]))]
    if not torch.equal(whole[0], whole[1].cpu()) or not torch.equal(halves[0], halves[1].cpu()):
        yield "stochastic rounding to integers or bf16"


def _same_codes(on_gpu: Tensor, on_cpu: Tensor) -> bool:
    """Equal bytes; the sign of a NaN does not count."""
    pair = [codes.contiguous().view(torch.uint8) for codes in (on_gpu.cpu(), on_cpu)]
    gpu, cpu = (torch.where(codes & 0x7F == 0x7F, 0x7F, codes) for codes in pair)
    return torch.equal(gpu, cpu)


def worst(errors: list[Error]) -> dict[str, dict[str, float]]:
    """GEMM and dtype -> the largest error and its limit."""
    found: dict[str, dict[str, float]] = {}
    for one in errors:
        key = f"{one.gemm} {one.dtype.removeprefix('torch.')}"
        before = found.get(key, {"error": 0.0})["error"]
        found[key] = {"error": one.error if not one.error <= before else before, "limit": one.limit}
    return found


def main() -> int:
    """Prints the table; 1 if anything missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three small shapes")
    parser.add_argument("--json", action="store_true", help="print a summary as the last line")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device; run it on a machine with one", file=sys.stderr)
        return 2
    shapes = QUICK_SHAPES if options.quick else SHAPES
    errors = [error for shape in shapes for kind in KINDS for dtype in LIMITS
              for policy in ("current", "delayed") for error in check_linear(shape, kind, dtype, policy)]
    errors += [error for shape in shapes for error in check_bf16(shape)]
    bits = list(differing_bits())
    print(f"{'gemm':<16}{'worst error':>12}{'limit':>10}")
    for name, row in worst(errors).items():
        print(f"{name:<16}{row['error']:>12.2e}{row['limit']:>10.0e}")
    missed = [error for error in errors if error.missed]
    print(f"{len(errors)} products, {len(missed)} over their limit; GPU and CPU differ in {len(bits)} places")
    for line in [*map(str, missed), *bits]:
        print(f"  MISSED {line}")
    if options.json:
        results = {"worst": worst(errors), "missed": [asdict(one) for one in missed], "differing": bits}
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        print(json.dumps({"benchmark": "gpu_check", "machine": machine, "results": results}))
    return 1 if missed or bits else 0


if __name__ == "__main__":
    sys.exit(main())
