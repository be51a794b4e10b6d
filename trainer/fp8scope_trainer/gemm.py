"""The three GEMMs of an FP8 linear: fprop Y = X W^T, dgrad dX = dY W, wgrad dW = dY^T X.

Operands are codes with dequantization scales; the product is that of the dequantized operands. In blocks:

| gemm  | a, scales                                   | b, scales                                         |
|-------|---------------------------------------------|---------------------------------------------------|
| fprop | X [M, K], (M, K/128) stride (1, M)          | W.t(), (L4, N/128) stride (1, L4)                 |
| dgrad | dY [M, N], (M, N/128) stride (1, M)         | W.t() made contiguous, its scales transposed      |
| wgrad | dY^T [N, M], (N, M/128) stride (1, N)       | X^T [K, M] .t(), (K, M/128) stride (1, K)         |
|       |                                             | or in blocks, (L4, K/128) stride (1, L4) of M/128 |

L4 is K/128 rounded up to a multiple of 4; a scale laid out in another way gives wrong numbers, not an error.
A block's scale does not depend on its orientation, so the weight's transpose for dgrad is exact: codes are
transposed when needed and no second copy is stored. Rows are padded to 4 and the contraction of wgrad to 128
with zero codes here, out of sight of whoever measures the operands.

Under one scale a tensor all three are the same product A B^T of row-major codes, in E4M3 or with E5M2 on one
side; sizes are padded to 16. Fast accumulation, which loses bits in long sums, is for its fprop only.

On Hopper this is `torch.nn.functional.scaled_mm`, under one scale on Ada too. Elsewhere the operands are
dequantized and multiplied in fp32 (BF16 products on ordinary CPUs are 80 times slower). Other output types
than BF16 and fp32 are rounded from fp32. Rejected: the private `torch._scaled_mm`, which does not pad scales
to L4.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8scope.quantize import Quantized, decode, dequantize
from fp8scope_trainer.transpose import transposed

TILE = 128
STEP = 16
"""Of sizes of operands under one scale."""
HOPPER, ADA = (9, 0), (8, 9)
"""Compute capabilities: 9.0 takes 1x128 and 128x128 scales, from 8.9 on GEMMs take one scale a tensor."""


def fprop(x: Quantized, weight: Quantized, *, dtype: torch.dtype) -> Tensor:
    """Y [M, N] in `dtype` from x [M, K] in tiles and weight [N, K] in blocks."""
    if not _native(x.codes):
        return (dequantize(x) @ dequantize(weight).t()).to(dtype)
    return _by_block(x, weight.codes.t(), weight.scales, dtype)


def dgrad(dy: Quantized, weight: Quantized, *, dtype: torch.dtype) -> Tensor:
    """dX [M, K] in `dtype` from dy [M, N] in tiles and weight [N, K] in blocks."""
    if not _native(dy.codes):
        return (dequantize(dy) @ dequantize(weight)).to(dtype)
    return _by_block(dy, transposed(weight.codes).t(), weight.scales.t(), dtype)


def wgrad(dy_t: Quantized, x_t: Quantized, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """dW [N, K] in `dtype` from dy_t [N, M] in tiles along the tokens and x_t [K, M] in tiles or in blocks.

    The sum is in fp32 and rounded once.
    """
    if not _native(dy_t.codes):
        return (dequantize(dy_t) @ dequantize(x_t).t()).to(dtype)
    tokens = -dy_t.codes.shape[1] % TILE
    a, b = _pad(dy_t.codes, columns=tokens), _pad(x_t.codes, columns=tokens)
    if x_t.scaling == "block 128x128":
        return _by_block(Quantized(a, dy_t.scales, dy_t.scaling), b.t(), x_t.scales, dtype)
    return F.scaled_mm(
        a, b.t(), _outer_major(dy_t.scales), F.ScalingType.BlockWise1x128,
        _outer_major(x_t.scales), F.ScalingType.BlockWise1x128,
        output_dtype=_sum_dtype(dtype), use_fast_accum=False,
    ).to(dtype)


def tensorwise(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """a [R, S] @ b.t(), b [C, S], in `dtype`; scales fp32 [1, 1]. C is a multiple of 16.

    fast: accumulates in fewer bits where the device offers it.
    """
    if not _has_tensorwise(a.device):
        return ((decode(a) @ decode(b).t()) * (a_scale * b_scale)).to(dtype)
    rows, shared = a.shape
    if rows % STEP or shared % STEP:
        a = _pad(a, rows=-rows % STEP, columns=-shared % STEP)
        b = _pad(b, columns=-shared % STEP)
    y = F.scaled_mm(
        a, b.t(), a_scale, F.ScalingType.TensorWise, b_scale, F.ScalingType.TensorWise,
        output_dtype=_sum_dtype(dtype), use_fast_accum=fast,
    ).to(dtype)
    return y[:rows] if rows % STEP else y


def runs_natively(device: torch.device, scaling: str) -> bool:
    """Whether tensor cores compute FP8 products of `scaling`, block or tensorwise; meta counts as yes."""
    if device.type == "meta":
        return True
    return device.type == "cuda" and (_has_blocks if scaling == "block" else _has_tensorwise)(device)


def rounded_matmul(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """a [R, S] @ b [S, C] of operands rounded to BF16, accumulated in fp32, in `dtype`."""
    a, b = a.bfloat16(), b.bfloat16()
    if a.device.type != "cuda":
        return (a.float() @ b.float()).to(dtype)
    return torch.mm(a, b, out_dtype=torch.float32).to(dtype) if dtype == torch.float32 else (a @ b).to(dtype)


def _native(codes: Tensor) -> bool:
    return codes.is_cuda and _has_blocks(codes.device)


@cache
def _has_blocks(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == HOPPER[0]


@cache
def _has_tensorwise(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= ADA


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which a GEMM hands out its sums."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _by_block(a: Quantized, b: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """a [M, S] in tiles times b [S, C], column-major, in blocks with scales b_scales [C/128, S/128]."""
    rows = a.codes.shape[0]
    codes, scales = _pad(a.codes, rows=-rows % 4), a.scales
    if rows % 4:
        scales = F.pad(scales, (0, 0, 0, -rows % 4), value=1.0)
    return F.scaled_mm(
        codes, b, _outer_major(scales), F.ScalingType.BlockWise1x128,
        _padded_to_four(b_scales), F.ScalingType.BlockWise128x128,
        output_dtype=_sum_dtype(dtype), use_fast_accum=False,
    )[:rows].to(dtype)


def _outer_major(scales: Tensor) -> Tensor:
    """(R, T) with stride (1, R), which the quantizers write."""
    if scales.stride() == (1, scales.shape[0]):
        return scales
    return scales.t().contiguous().t()


def _padded_to_four(scales: Tensor) -> Tensor:
    """[C/128, S/128] -> (L4, C/128) with stride (1, L4), L4 = S/128 rounded up to a multiple of 4."""
    if short := -scales.shape[1] % 4:
        scales = F.pad(scales, (0, short), value=1.0)  # without anything to pad, still a copy
    return scales.contiguous().t()


def _pad(codes: Tensor, *, rows: int = 0, columns: int = 0) -> Tensor:
    """Codes with zero rows below and zero columns to the right, row-major."""
    if not rows and not columns:
        return codes
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).contiguous().view(codes.dtype)
