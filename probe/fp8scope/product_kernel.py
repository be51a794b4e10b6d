"""Triton twin of the errors in `gemm`: A B^T twice in one pass, of the operands and of their codes.

    A [R, K], rows of it sampled evenly    B [N, K]    both read from memory once, quantized in registers

A program owns 64 rows of A and 64 or 128 rows of B and walks along K in steps of 128. A step makes one
product of the operands and one of their codes; the codes are exact in FP16, their scales multiply the fp32
result. BF16 operands are multiplied as they are, others as three TF32 products. A's rows are brought near 1
by the greatest power of two met so far (rows near 1e-30 would vanish in e^2); when that grows, what was
summed up shrinks with it, exactly.

Each program writes sum e^2 and sum y^2 of its rows in float64; `_finish_kernel` turns all of them into one
number.

Rejected: dequantized copies of both operands, fp32 (what `gemm` does, readable, and 6 times the memory of a
weight); split K (two buffers of [64, N] a split; the squares need the whole sum).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.quantize_kernel import CODE_TYPES, TILE, magnitude_bits, scale_of
from fp8scope.slab_kernel import reciprocal, unit_of
from fp8scope_protocol.formats import TILE as TILE_EDGE
from fp8scope_protocol.formats import Format

_ROWS = 64
_NOTHING = tl.constexpr(-math.inf)
_LEAST_UNIT = tl.constexpr(2.0**-125)
_CHUNK = 1024


@triton.jit
def _quantized(x: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr, CODE: tl.constexpr) -> tl.tensor:
    """The codes of x as FP16 numbers, which hold all of E4M3 and E5M2."""
    y = tl.clamp(tl.div_rn(x, scale), -LARGEST, LARGEST)
    return y.to(CODE).to(tl.float32).to(tl.float16)


@triton.jit
def _product_error_kernel(a_ptr: tl.tensor, b_ptr: tl.tensor, a_scales: tl.tensor, b_scales: tl.tensor,
                          out_ptr: tl.tensor, R: tl.tensor, S: tl.tensor, N: tl.tensor, K: tl.tensor,
                          a_r: tl.tensor, a_c: tl.tensor, b_r: tl.tensor, b_c: tl.tensor,
                          as_r: tl.tensor, as_c: tl.tensor, bs_r: tl.tensor, bs_c: tl.tensor,
                          LARGEST: tl.constexpr, CODE: tl.constexpr, A_GIVEN: tl.constexpr,
                          B_GIVEN: tl.constexpr, B_BLOCK: tl.constexpr, BF16: tl.constexpr,
                          ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    """S of the R rows of A against COLUMNS rows of B; out [2, S, blocks of B] gets e^2 and y^2."""
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = slot.to(tl.int64) * R // S
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    here, there = slot < S, column < N
    unit = tl.full([ROWS], _LEAST_UNIT, tl.float32)
    exact = tl.zeros([ROWS, COLUMNS], tl.float32)
    coded = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(0, tl.cdiv(K, TILE)):
        k = tile * TILE + tl.arange(0, TILE)
        inside = k[None, :] < K
        a = tl.load(a_ptr + row[:, None] * a_r + k[None, :] * a_c, mask=here[:, None] & inside, other=0.0)
        b = tl.load(b_ptr + column[:, None] * b_r + k[None, :] * b_c, mask=there[:, None] & inside, other=0.0)
        x, w = a.to(tl.float32), b.to(tl.float32)
        x_bits, w_bits = tl.max(magnitude_bits(x), axis=1), tl.max(magnitude_bits(w), axis=1)
        if B_BLOCK:
            w_bits = tl.zeros_like(w_bits) + tl.max(w_bits, axis=0)
        x_scale = scale_of(x_bits, LARGEST, False)
        w_scale = scale_of(w_bits, LARGEST, False)
        if A_GIVEN:
            x_scale = tl.load(a_scales + row * as_r + tile * as_c, mask=here, other=1.0)
        if B_GIVEN:
            group = column // TILE if B_BLOCK else column
            w_scale = tl.load(b_scales + group * bs_r + tile * bs_c, mask=there, other=1.0)
        amax = x_bits.to(tl.float32, bitcast=True)
        before = unit
        unit = tl.maximum(unit, tl.where((x_bits > 0) & (amax < math.inf), unit_of(amax), _LEAST_UNIT))
        shrink = before * reciprocal(unit)
        near = x * reciprocal(unit)[:, None]
        if BF16:
            whole = tl.dot(near.to(tl.bfloat16), tl.trans(w.to(tl.bfloat16)))
        else:
            whole = tl.dot(near, tl.trans(w), input_precision="tf32x3")
        q = tl.dot(_quantized(x, x_scale[:, None], LARGEST, CODE),
                   tl.trans(_quantized(w, w_scale[:, None], LARGEST, CODE)))
        exact = exact * shrink[:, None] + whole
        coded = coded * shrink[:, None] + q * (x_scale * reciprocal(unit))[:, None] * w_scale[None, :]
    e = coded - exact
    weight = unit.to(tl.float64) * unit.to(tl.float64)
    blocks = tl.num_programs(1)
    out = out_ptr + slot.to(tl.int64) * blocks + tl.program_id(1)
    tl.store(out, tl.sum(e * e, axis=1).to(tl.float64) * weight, mask=here)
    tl.store(out + S.to(tl.int64) * blocks, tl.sum(exact * exact, axis=1).to(tl.float64) * weight, mask=here)


@triton.jit(do_not_specialize=["S", "blocks"])
def _finish_kernel(parts_ptr: tl.tensor, out_ptr: tl.tensor, S: tl.tensor, blocks: tl.tensor,
                   WORST: tl.constexpr, CHUNK: tl.constexpr) -> None:
    """||e|| / ||y|| of everything, or WORST, of the row where it is greatest. One program."""
    total_e, total_y = tl.zeros([CHUNK], tl.float64), tl.zeros([CHUNK], tl.float64)
    worst = tl.full([CHUNK], _NOTHING, tl.float64)
    count = S.to(tl.int64) * blocks
    for start in range(0, S, CHUNK):
        rows = start + tl.arange(0, CHUNK).to(tl.int64)
        e, y = tl.zeros([CHUNK], tl.float64), tl.zeros([CHUNK], tl.float64)
        for block in range(blocks):
            e += tl.load(parts_ptr + rows * blocks + block, mask=rows < S, other=0.0)
            y += tl.load(parts_ptr + count + rows * blocks + block, mask=rows < S, other=0.0)
        total_e += e
        total_y += y
        ratio = tl.sqrt(e / tl.where(y == 0.0, 1.0, y))
        ratio = tl.where(ratio < math.inf, ratio, math.inf)  # NaN too
        worst = tl.maximum(worst, tl.where(y == 0.0, _NOTHING, ratio))
    if WORST:
        tl.store(out_ptr, tl.max(worst, axis=0))
    else:
        e_all, y_all = tl.sum(total_e, axis=0), tl.sum(total_y, axis=0)
        ratio = tl.sqrt(e_all / tl.where(y_all == 0.0, 1.0, y_all))
        ratio = tl.where(ratio < math.inf, ratio, math.inf)
        tl.store(out_ptr, tl.where(y_all == 0.0, _NOTHING, ratio))


def product_error(
    a: Tensor, b: Tensor, element: Format, *, rows: int, blocks: bool, worst: bool,
    a_scales: Tensor | None = None, b_scales: Tensor | None = None,
) -> Tensor:
    """Relative error of A B^T -> float64 []; see `gemm`.

    a [R, K], `rows` of it taken evenly, in [1,128] tiles; b [N, K] in [128,128] `blocks`, else in tiles.
    Scales as in `quantize.Quantized`, or one for all. `worst`: of the worst row of A instead of the whole.
    """
    columns = TILE_EDGE if blocks else 64
    bf16 = a.dtype == b.dtype == torch.bfloat16
    parts = triton.cdiv(b.shape[0], columns)
    found = a.new_empty((2, rows, parts), dtype=torch.float64)
    answer = a.new_empty((), dtype=torch.float64)
    tiles = triton.cdiv(a.shape[1], TILE_EDGE)
    used_a = a if a_scales is None else a_scales.float().expand(a.shape[0], tiles)
    groups = triton.cdiv(b.shape[0], TILE_EDGE) if blocks else b.shape[0]
    used_b = b if b_scales is None else b_scales.float().expand(groups, tiles)
    with torch.cuda.device_of(a):
        _product_error_kernel[(triton.cdiv(rows, _ROWS), parts)](
            a, b, used_a, used_b, found, a.shape[0], rows, b.shape[0], a.shape[1], *a.stride(), *b.stride(),
            *used_a.stride(), *used_b.stride(), LARGEST=element.largest, CODE=CODE_TYPES[element.name],
            A_GIVEN=a_scales is not None, B_GIVEN=b_scales is not None, B_BLOCK=blocks,
            BF16=bf16, ROWS=_ROWS, COLUMNS=columns, num_warps=8, num_stages=2 if bf16 else 1,
        )
        _finish_kernel[(1,)](found, answer, rows, parts, WORST=worst, CHUNK=_CHUNK, num_warps=8)
    return answer
