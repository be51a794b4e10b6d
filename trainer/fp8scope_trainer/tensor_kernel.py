"""Codes of bf16 under one scale, of x and in the same read of x.t().

The twin of `tensor.reference`, for what `fits`: codes and scale are the same bits.

    _amax_kernel     one read of x: the largest |x| that each of up to 1,024 programs has seen
    _codes_kernel    one read of x, one or both orientations written
    _close_kernel    delayed scaling only: the largest of all programs, and whether anything is not finite

Current scaling takes the first two. Every program of the second looks through the results of the first, 4 KiB
that lie in the L2 cache: no launch, no atomic and no zeroed counter in between. Delayed scaling takes the
last two; the maxima that programs of the second leave behind are the next steps' history.

Codes. A program has a block of [128, WIDTH]. Rows 4 r + j are loaded as four tensors of pairs, as in
`pack_kernel`, whose quotient this is too; a thread packs the codes of four neighbours along a column into a
word. Words leave transposed for x.t(). For x itself two byte permutations turn the words of two neighbouring
columns into four pairs of codes, one a row: a code is computed once.

The quotient is the IEEE one for scales that come from an amax in bf16, for powers of two and for 1, so for
every current scale and for delayed ones of layers that saw bf16. For another scale it differs from the
division where x / s lies within 2^-46 of the middle between two fp32, which is not seen in practice.

Scales of 2^90 and more, whose inverse could be denormal, are divided by; so is a NaN, which makes all codes
of current scaling NaN.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.launch_kernel import BoundLauncher, Launcher
from fp8scope.pack_kernel import inverse, over
from fp8scope.pair_kernel import (
    LOW,
    MAGNITUDES,
    four_codes,
    max_of_pairs,
    packs,
    pair_max,
    upper,
    widen,
)
from fp8scope.quantize import DTYPES
from fp8scope.quantize_kernel import CODE_TYPES, INFINITY, scale_of
from fp8scope_protocol.formats import TILE, Format
from fp8scope_trainer.tensor import TensorCodes

SHAPE = (128, 8)
"""Columns and warps of a program that writes codes."""
SHAPES = ((64, 2), (64, 4), (128, 4), (128, 8))
"""Those worth a try on another device; benchmarks/linear.py times them."""

_EDGE = tl.constexpr(TILE)
_HUGE = tl.constexpr(2.0**90)
_NAN = tl.constexpr(0x7FC00000)  # its bits: Triton compares constants, and NaN is not equal to itself
_PARTIALS = 1024  # programs of the first pass, at most
_BLOCK = 4096  # pairs that one of them reads at a time


@triton.jit
def _nan(like: tl.tensor) -> tl.tensor:
    """NaN, shaped like an int32."""
    return (like * 0 + _NAN).to(tl.float32, bitcast=True)


@triton.jit
def _words_of(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, scale: tl.tensor,
              LARGEST: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr, CODE: tl.constexpr,
              ASM: tl.constexpr) -> tl.tensor:
    """Codes of four rows under a scalar scale, as int32."""
    if scale < _HUGE:
        r, tail = inverse(scale)
        word = four_codes(over(a, scale, r, tail, not ASM), over(b, scale, r, tail, not ASM),
                          over(c, scale, r, tail, not ASM), over(d, scale, r, tail, not ASM),
                          LARGEST, MANTISSA, NORMAL, CODE, ASM)
    else:
        word = four_codes(tl.div_rn(a, scale), tl.div_rn(b, scale), tl.div_rn(c, scale),
                          tl.div_rn(d, scale), LARGEST, MANTISSA, NORMAL, CODE, ASM)
    return word


@triton.jit
def _rows_of(even: tl.tensor, odd: tl.tensor,
             ASM: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Words down two neighbouring columns -> the four pairs across them, int16."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, $3, 0x5140;
            prmt.b32 $1, $2, $3, 0x7362;
            """, "=&r,=&r,r,r", [even, odd], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        low = (even & 0xFF) | ((odd & 0xFF) << 8) | ((even & 0xFF00) << 8) | ((odd & 0xFF00) << 16)
        e, o = upper(even), upper(odd)
        high = (e & 0xFF) | ((o & 0xFF) << 8) | ((e & 0xFF00) << 8) | ((o & 0xFF00) << 16)
    return low.to(tl.int16), upper(low).to(tl.int16), high.to(tl.int16), upper(high).to(tl.int16)


@triton.jit
def _amax_kernel(x_ptr: tl.tensor, partials_ptr: tl.tensor, blocks: tl.tensor, programs: tl.tensor,
                 BLOCK: tl.constexpr, ASM: tl.constexpr) -> None:
    """partials [programs]: the bits of the largest |x| of every programs-th block, int32."""
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], dtype=tl.int32)
    for _ in range(tl.program_id(0), blocks, programs):
        most = pair_max(most, tl.load(x_ptr) & MAGNITUDES, ASM)
        x_ptr += programs * BLOCK
    largest = max_of_pairs(most, 0, ASM)
    tl.store(partials_ptr + tl.program_id(0), tl.maximum(upper(largest), largest & LOW) << 16)


@triton.jit
def _codes_kernel(x_ptr: tl.tensor, codes_ptr: tl.tensor, turned_ptr: tl.tensor, scale_ptr: tl.tensor,
                  amax_ptr: tl.tensor, partials_ptr: tl.tensor, R: tl.tensor, C: tl.tensor, count: tl.tensor,
                  LARGEST: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr, CODE: tl.constexpr,
                  POWER_OF_TWO: tl.constexpr, GIVEN: tl.constexpr, TURNED: tl.constexpr,
                  PARTIALS: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr) -> None:
    """x [R, C], codes [R, C], turned [C, R]. GIVEN: reads the scale and leaves partials; else reads `count`
    partials and leaves scale and amax."""
    bands, program = C // WIDTH, tl.program_id(0)
    band, tile = (program % bands).to(tl.int64), (program // bands).to(tl.int64)
    four, pair = tl.arange(0, _EDGE // 4), tl.arange(0, WIDTH // 2)
    stride = C // 2
    offsets = (tile * _EDGE + 4 * four)[:, None] * stride + (band * (WIDTH // 2) + pair)[None, :]
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + offsets
    x, y = tl.load(x_ptr), tl.load(x_ptr + stride)
    z, w = tl.load(x_ptr + 2 * stride), tl.load(x_ptr + 3 * stride)
    if GIVEN:
        scale = tl.load(scale_ptr)
        most = pair_max(pair_max(x & MAGNITUDES, y & MAGNITUDES, ASM),
                        pair_max(z & MAGNITUDES, w & MAGNITUDES, ASM), ASM)
        most = max_of_pairs(max_of_pairs(most, 1, ASM), 0, ASM)
        tl.store(partials_ptr + program, tl.maximum(upper(most), most & LOW) << 16)
    else:
        slots = tl.arange(0, PARTIALS)
        bits = tl.max(tl.load(partials_ptr + slots, mask=slots < count, other=0), axis=0)
        scale = tl.where(bits < INFINITY, scale_of(bits, LARGEST, POWER_OF_TWO), _nan(bits))
        tl.store(scale_ptr, scale, mask=program == 0)
        amax = tl.where(bits < INFINITY, bits.to(tl.float32, bitcast=True), _nan(bits))
        tl.store(amax_ptr, amax, mask=program == 0)
    x, x1 = widen(x)
    y, y1 = widen(y)
    z, z1 = widen(z)
    w, w1 = widen(w)
    even = _words_of(x, y, z, w, scale, LARGEST, MANTISSA, NORMAL, CODE, ASM)
    odd = _words_of(x1, y1, z1, w1, scale, LARGEST, MANTISSA, NORMAL, CODE, ASM)
    a, b, c, d = _rows_of(even, odd, ASM)
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int16)) + offsets
    tl.store(codes_ptr, a)
    tl.store(codes_ptr + stride, b)
    tl.store(codes_ptr + 2 * stride, c)
    tl.store(codes_ptr + 3 * stride, d)
    if TURNED:
        words = tl.reshape(tl.join(even, odd), (_EDGE // 4, WIDTH))
        columns = band * WIDTH + tl.arange(0, WIDTH)
        turned_ptr = turned_ptr.to(tl.pointer_type(tl.int32)) + (tile * (_EDGE // 4) + four)[None, :]
        tl.store(turned_ptr + columns[:, None] * (R // 4), tl.trans(words))


@triton.jit
def _close_kernel(partials_ptr: tl.tensor, scale_ptr: tl.tensor, used_ptr: tl.tensor, amax_ptr: tl.tensor,
                  count: tl.tensor, BLOCK: tl.constexpr) -> None:
    """The largest of `count` partials; the scale that was used, NaN where that is not finite."""
    slots = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, count, BLOCK):
        most = tl.maximum(most, tl.load(partials_ptr + first + slots, mask=first + slots < count, other=0))
    bits = tl.max(most, axis=0)
    tl.store(amax_ptr, tl.where(bits < INFINITY, bits.to(tl.float32, bitcast=True), _nan(bits)))
    tl.store(used_ptr, tl.where(bits < INFINITY, tl.load(scale_ptr), _nan(bits)))


def fits(x: Tensor) -> bool:
    """Whether x [R, C] is what the kernels take: bf16, contiguous, both sizes multiples of 128, at 16 bytes.
    On the CPU too, where they run in Triton's interpreter only."""
    return (
        x.dtype == torch.bfloat16 and x.dim() == 2 and x.is_contiguous() and x.numel() > 0
        and x.shape[0] % TILE == 0 and x.shape[1] % TILE == 0 and x.data_ptr() % 16 == 0
        and (not x.is_cuda or packs(x.device))
    )


def quantize_tensor(
    x: Tensor, element: Format, *, scale: Tensor | None = None, power_of_two: bool = False,
    turned: bool = False, shape: tuple[int, int] = SHAPE,
) -> TensorCodes:
    """Of x, which `fits`; see `tensor.quantize_tensor`. shape: one of SHAPES."""
    rows, columns = x.shape
    programs = (rows // TILE) * (columns // shape[0])
    codes = x.new_empty((rows, columns), dtype=DTYPES[element.name])
    other = x.new_empty((columns, rows), dtype=codes.dtype) if turned else None
    used, amax = x.new_empty((1, 1), dtype=torch.float32), x.new_empty(1, dtype=torch.float32)
    blocks = x.numel() // 2 // _BLOCK
    count = programs if scale is not None else min(_PARTIALS, blocks)
    partials = x.new_empty(count, dtype=torch.int32)
    if scale is None:
        _amax(x.is_cuda)(count, x, partials, blocks, count)
    _codes(element, power_of_two, scale is not None, turned, shape, x.is_cuda)(
        programs, x, codes.view(torch.uint8), (codes if other is None else other).view(torch.uint8),
        used if scale is None else scale, amax, partials, rows, columns, count)
    if scale is not None:
        _close()(1, partials, scale, used, amax, count)
    return TensorCodes(codes, other, used, amax)


def constants_of(
    element: Format, power_of_two: bool, *, given: bool, turned: bool, width: int, compiled: bool
) -> dict[str, Any]:
    """Those of `_codes_kernel`, in its order."""
    return {
        "LARGEST": element.largest, "MANTISSA": element.mantissa_bits,
        "NORMAL": 127 + int(math.log2(element.smallest_normal)), "CODE": CODE_TYPES[element.name],
        "POWER_OF_TWO": power_of_two, "GIVEN": given, "TURNED": turned, "PARTIALS": _PARTIALS,
        "WIDTH": width, "ASM": compiled,
    }


@cache
def _codes(
    element: Format, power_of_two: bool, given: bool, turned: bool, shape: tuple[int, int], compiled: bool
) -> BoundLauncher:
    width, warps = shape
    constants = constants_of(element, power_of_two, given=given, turned=turned, width=width,
                             compiled=compiled)
    return Launcher(_codes_kernel).bound(constants, num_warps=warps)


@cache
def _amax(compiled: bool) -> BoundLauncher:
    return Launcher(_amax_kernel).bound({"BLOCK": _BLOCK, "ASM": compiled}, num_warps=4)


@cache
def _close() -> BoundLauncher:
    return Launcher(_close_kernel).bound({"BLOCK": _PARTIALS}, num_warps=4)
