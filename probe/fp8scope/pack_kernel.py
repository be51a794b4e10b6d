"""Codes of row-major bf16 at nearly the speed of a copy: tiles of x, tiles of x.t(), blocks.

The twin of `quantize.quantize_tiles` and `quantize.quantize_blocks` with current scales, for what `fits`;
the rest goes to `quantize_kernel`. Nothing is measured: codes with the sums of their round trip come from
`tile_kernel`.

How it works. x is read once, as pairs (`pair_kernel`), and kept in registers. An element costs 3.5
instructions: half of one to find amax, one to widen, two for the quotient, half of one for the code.

The quotient. y = fma(x, r, x tail), with r = 1 / s rounded *down* and tail = (1 - s r) r >= 0, is the IEEE
quotient x / s for s = amax / 448 of bf16 (all 128 x 128 pairs of significands tried) and for powers of two. r
rounded to nearest does as well, but a tail below 0 makes +0 of -0, which takes an instruction more to undo.
Tiles that hold NaN, Inf or 2^100 and more, where 1 / s could be denormal, are divided.

Tiles of x.t(). A program has a block of [128, 64]: rows 4 r + j are loaded as four tensors, j = 0..3, so
that a thread holds four neighbours along a column and packs their codes into a word. Words are then exchanged
between threads, a quarter of the accesses to shared memory that bytes would take, and leave in whole lines.
Blocks of x.t() come from the same kernel with [128, 128] a program and one scale.

Measured on an H200, share of the bandwidth of a copy, 256 MiB: tiles 99 %, tiles of x.t() 91 %, blocks of
8192 x 8192 97 %; `quantize_kernel` 60, 42 and 49 %. Both orientations at once: `both_kernel`. Rejected: a
store for each half of a pair instead of a joined one (79 %); hints of eviction (76 %), caps on registers
(72 % and less).
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.launch_kernel import BoundLauncher, Launcher
from fp8scope.pair_kernel import (
    LOW,
    MAGNITUDES,
    code_of,
    four_codes,
    max_of_pairs,
    packs,
    pair_max,
    upper,
    widen,
)
from fp8scope.quantize import DTYPES, Quantized
from fp8scope.quantize_kernel import CODE_TYPES, INFINITY, TILE, scale_of
from fp8scope_protocol.formats import TILE as TILE_EDGE
from fp8scope_protocol.formats import Format

_ROWS = 16  # of a program for tiles of x
WIDTH = 64  # columns of x of a program for tiles of x.t()

_HUGE = tl.constexpr(0x71800000)  # the bits of 2^100
_NAN_CODES = tl.constexpr(0x7F7F7F7F)


@triton.jit
def inverse(scale: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """r and tail."""
    r = tl.div_rn(1.0, scale)
    above = (tl.fma(-scale, r, 1.0) < 0).to(tl.int32)
    r = (r.to(tl.int32, bitcast=True) - above).to(tl.float32, bitcast=True)
    return r, tl.fma(-scale, r, 1.0) * r


@triton.jit
def over(x: tl.tensor, scale: tl.tensor, r: tl.tensor, tail: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    return tl.div_rn(x, scale) if PLAIN else tl.fma(x, r, x * tail)


@triton.jit
def _two_codes(y: tl.tensor, z: tl.tensor, LARGEST: tl.constexpr, MANTISSA: tl.constexpr,
               NORMAL: tl.constexpr, CODE: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """The codes of y and z as int16, z's in the upper byte."""
    if ASM:
        return tl.inline_asm_elementwise("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [y, z],
                                         dtype=tl.int16, is_pure=True, pack=1)
    else:
        return (code_of(y, LARGEST, MANTISSA, NORMAL, CODE)
                | (code_of(z, LARGEST, MANTISSA, NORMAL, CODE) << 8))


@triton.jit
def _codes_of(pairs: tl.tensor, scale: tl.tensor, bits: tl.tensor, odd: tl.tensor, LARGEST: tl.constexpr,
              MANTISSA: tl.constexpr, NORMAL: tl.constexpr, CODE: tl.constexpr,
              ASM: tl.constexpr) -> tl.tensor:
    """Codes of pairs as int16. odd, a scalar: whether any of `bits`, of amax, is _HUGE; the other three
    broadcast against the pairs."""
    x, z = widen(pairs)
    if odd:
        y, z = tl.div_rn(x, scale), tl.div_rn(z, scale)
        codes = _two_codes(y, z, LARGEST, MANTISSA, NORMAL, CODE, ASM)
        codes = tl.where(bits >= INFINITY, _NAN_CODES, codes.to(tl.int32)).to(tl.int16)
    else:
        r, tail = inverse(scale)
        y, z = over(x, scale, r, tail, not ASM), over(z, scale, r, tail, not ASM)
        codes = _two_codes(y, z, LARGEST, MANTISSA, NORMAL, CODE, ASM)
    return codes


@triton.jit
def _words_of(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, bits: tl.tensor, scale: tl.tensor,
              odd: tl.tensor, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr,
              CODE: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """Codes of four rows [32, n], of columns with amax `bits` and `scale` [n], as int32."""
    s = scale[None, :]
    if odd:
        word = four_codes(tl.div_rn(a, s), tl.div_rn(b, s), tl.div_rn(c, s), tl.div_rn(d, s),
                          LARGEST, MANTISSA, NORMAL, CODE, ASM)
        word = tl.where(bits[None, :] >= INFINITY, _NAN_CODES, word)
    else:
        r, tail = inverse(scale)
        r, tail = r[None, :], tail[None, :]
        word = four_codes(over(a, s, r, tail, not ASM), over(b, s, r, tail, not ASM),
                          over(c, s, r, tail, not ASM), over(d, s, r, tail, not ASM),
                          LARGEST, MANTISSA, NORMAL, CODE, ASM)
    return word


@triton.jit
def pack_rows(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, first: tl.tensor,
              tile: tl.tensor, R: tl.tensor, C: tl.tensor, stride: tl.tensor, LARGEST: tl.constexpr,
              MANTISSA: tl.constexpr, NORMAL: tl.constexpr, CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
              ASM: tl.constexpr, ROWS: tl.constexpr) -> None:
    """ROWS rows of x [R, C] from `first` on, `stride` pairs from row to row, of the 128 columns of `tile`;
    scales [C / 128, R]."""
    rows = first + tl.arange(0, ROWS)
    columns = tile * (TILE // 2) + tl.arange(0, TILE // 2)
    pairs = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * stride + columns[None, :])
    most = max_of_pairs(pairs & MAGNITUDES, 1, ASM)
    bits = tl.maximum(upper(most), most & LOW) << 16
    scale = scale_of(bits, LARGEST, POWER_OF_TWO)
    tl.store(scales_ptr + tile * R + rows, scale)
    codes = _codes_of(pairs, scale[:, None], bits[:, None], tl.max(bits, axis=0) >= _HUGE, LARGEST, MANTISSA,
                      NORMAL, CODE, ASM)
    to = codes_ptr.to(tl.pointer_type(tl.int16)) + rows[:, None] * (C // 2) + columns[None, :]
    tl.store(to, codes)


@triton.jit(do_not_specialize=["R"])
def _tiles_kernel(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, R: tl.tensor, C: tl.tensor,
                  stride: tl.tensor, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr,
                  CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr, ASM: tl.constexpr,
                  ROWS: tl.constexpr) -> None:
    tiles = C // TILE
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    first = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    pack_rows(x_ptr, codes_ptr, scales_ptr, first, tile, R, C, stride, LARGEST, MANTISSA, NORMAL, CODE,
              POWER_OF_TWO, ASM, ROWS)


@triton.jit
def pack_columns(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, band: tl.tensor,
                 tile: tl.tensor, R: tl.tensor, C: tl.tensor, stride: tl.tensor, LARGEST: tl.constexpr,
                 MANTISSA: tl.constexpr, NORMAL: tl.constexpr, CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                 ASM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Codes [C, R] and scales [R / 128, C] of x.t(), of x [R, C]: the `band` of WIDTH columns of 128 rows;
    BLOCK: scales [R / 128, C / 128]."""
    bands = C // WIDTH
    four, pair = tl.arange(0, TILE // 4), tl.arange(0, WIDTH // 2)
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + (tile * TILE + 4 * four)[:, None] * stride
    x_ptr += (band * (WIDTH // 2) + pair)[None, :]
    x, y = tl.load(x_ptr), tl.load(x_ptr + stride)
    z, w = tl.load(x_ptr + 2 * stride), tl.load(x_ptr + 3 * stride)
    most = pair_max(pair_max(x & MAGNITUDES, y & MAGNITUDES, ASM),
                    pair_max(z & MAGNITUDES, w & MAGNITUDES, ASM), ASM)
    most = max_of_pairs(most, 0, ASM)
    even_bits, odd_bits = (most & LOW) << 16, upper(most) << 16
    if BLOCK:
        even_bits = tl.maximum(even_bits, odd_bits)
        even_bits = tl.zeros_like(even_bits) + tl.max(even_bits, axis=0)
        odd_bits = even_bits
    even_scale = scale_of(even_bits, LARGEST, POWER_OF_TWO)
    odd_scale = scale_of(odd_bits, LARGEST, POWER_OF_TWO)
    if BLOCK:
        tl.store(scales_ptr + tile * bands + band + 0 * pair, even_scale, mask=pair == 0)
    else:
        scales_ptr += tile * C + band * WIDTH + 2 * pair
        tl.store(scales_ptr, even_scale)
        tl.store(scales_ptr + 1, odd_scale)
    huge = tl.max(tl.maximum(even_bits, odd_bits), axis=0) >= _HUGE
    x, x1 = widen(x)
    y, y1 = widen(y)
    z, z1 = widen(z)
    w, w1 = widen(w)
    even = _words_of(x, y, z, w, even_bits, even_scale, huge, LARGEST, MANTISSA, NORMAL, CODE, ASM)
    odd = _words_of(x1, y1, z1, w1, odd_bits, odd_scale, huge, LARGEST, MANTISSA, NORMAL, CODE, ASM)
    words = tl.reshape(tl.join(even, odd), (TILE // 4, WIDTH))
    columns = band * WIDTH + tl.arange(0, WIDTH)
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + (tile * (TILE // 4) + four)[None, :]
    tl.store(codes_ptr + columns[:, None] * (R // 4), tl.trans(words))


@triton.jit
def _columns_kernel(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, R: tl.tensor,
                    C: tl.tensor, stride: tl.tensor, LARGEST: tl.constexpr, MANTISSA: tl.constexpr,
                    NORMAL: tl.constexpr, CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr, ASM: tl.constexpr,
                    WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    bands = C // WIDTH
    band, tile = (tl.program_id(0) % bands).to(tl.int64), (tl.program_id(0) // bands).to(tl.int64)
    pack_columns(x_ptr, codes_ptr, scales_ptr, band, tile, R, C, stride, LARGEST, MANTISSA, NORMAL, CODE,
                 POWER_OF_TWO, ASM, WIDTH, BLOCK)


@triton.jit
def _blocks_kernel(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, C: tl.tensor,
                   stride: tl.tensor, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr,
                   CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr, ASM: tl.constexpr) -> None:
    """A block a program."""
    blocks = C // TILE
    i, j = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    rows, columns = i * TILE + tl.arange(0, TILE), j * (TILE // 2) + tl.arange(0, TILE // 2)
    pairs = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + rows[:, None] * stride + columns[None, :])
    most = max_of_pairs(max_of_pairs(pairs & MAGNITUDES, 1, ASM), 0, ASM)
    bits = tl.maximum(upper(most), most & LOW) << 16
    scale = scale_of(bits, LARGEST, POWER_OF_TWO)
    tl.store(scales_ptr + tl.program_id(0), scale)
    codes = _codes_of(pairs, scale, bits, bits >= _HUGE, LARGEST, MANTISSA, NORMAL, CODE, ASM)
    tl.store(codes_ptr.to(tl.pointer_type(tl.int16)) + rows[:, None] * (C // 2) + columns[None, :], codes)


def fits(x: Tensor, element: Format, rows: int) -> bool:
    """Whether x [R, C] is what the kernels take: bf16 for E4M3, R a multiple of `rows` and C of 128, rows
    that begin at 16 bytes. On the CPU too, where they run in Triton's interpreter only."""
    return (
        x.dtype == torch.bfloat16 and element.name == "e4m3" and x.dim() == 2 and x.numel() > 0
        and x.shape[0] % rows == 0 and x.shape[1] % TILE_EDGE == 0
        and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        and (not x.is_cuda or packs(x.device))
    )


def quantize_tiles(x: Tensor, element: Format, *, power_of_two: bool = False) -> Quantized | None:
    """`quantize.quantize_tiles` of x [R, C]; None if neither x nor x.t() fits."""
    if fits(x, element, _ROWS):
        rows, columns = x.shape
        codes, scales = empty(x, rows, columns, element)
        _tiles(element, power_of_two, x.is_cuda)(
            (rows // _ROWS) * (columns // TILE_EDGE), x, codes.view(torch.uint8), scales, rows, columns,
            x.stride(0) // 2)
        return Quantized(codes, scales.t(), "tile 1x128")
    turned = x.t()
    if not fits(turned, element, TILE_EDGE):
        return None
    columns, rows = x.shape
    codes, scales = empty(x, columns, rows, element)
    _columns(element, power_of_two, x.is_cuda)(
        (rows // TILE_EDGE) * (columns // WIDTH), turned, codes.view(torch.uint8), scales, rows, columns,
        turned.stride(0) // 2)
    return Quantized(codes, scales.t(), "tile 1x128")


def quantize_blocks(x: Tensor, element: Format, *, power_of_two: bool = False) -> Quantized | None:
    """`quantize.quantize_blocks` of x [R, C]; None if neither x nor x.t() fits."""
    if not fits(x, element, TILE_EDGE):
        return _turned_blocks(x, element, power_of_two)
    rows, columns = x.shape
    codes = x.new_empty(x.shape, dtype=DTYPES[element.name])
    scales = x.new_empty((rows // TILE_EDGE, columns // TILE_EDGE), dtype=torch.float32)
    _blocks(element, power_of_two, x.is_cuda)(
        scales.numel(), x, codes.view(torch.uint8), scales, columns, x.stride(0) // 2)
    return Quantized(codes, scales, "block 128x128")


def _turned_blocks(x: Tensor, element: Format, power_of_two: bool) -> Quantized | None:
    """Of x [R, C] whose transpose fits."""
    turned = x.t()
    if not fits(turned, element, TILE_EDGE):
        return None
    columns, rows = x.shape
    codes = x.new_empty((columns, rows), dtype=DTYPES[element.name])
    scales = x.new_empty((rows // TILE_EDGE, columns // TILE_EDGE), dtype=torch.float32)
    _columns(element, power_of_two, x.is_cuda, block=True)(
        scales.numel(), turned, codes.view(torch.uint8), scales, rows, columns, turned.stride(0) // 2)
    return Quantized(codes, scales.t(), "block 128x128")


def empty(x: Tensor, rows: int, columns: int, element: Format) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] and scales [columns / 128, rows]."""
    return (x.new_empty((rows, columns), dtype=DTYPES[element.name]),
            x.new_empty((columns // TILE_EDGE, rows), dtype=torch.float32))


@cache
def _tiles(element: Format, power_of_two: bool, compiled: bool) -> BoundLauncher:
    constants = constants_of(element, power_of_two, compiled) | {"ROWS": _ROWS}
    return Launcher(_tiles_kernel).bound(constants, num_warps=1)


@cache
def _columns(element: Format, power_of_two: bool, compiled: bool, *, block: bool = False) -> BoundLauncher:
    constants = constants_of(element, power_of_two, compiled)
    constants |= {"WIDTH": TILE_EDGE if block else WIDTH, "BLOCK": block}
    return Launcher(_columns_kernel).bound(constants, num_warps=4 if block else 2)


@cache
def _blocks(element: Format, power_of_two: bool, compiled: bool) -> BoundLauncher:
    return Launcher(_blocks_kernel).bound(constants_of(element, power_of_two, compiled), num_warps=4)


def constants_of(element: Format, power_of_two: bool, compiled: bool) -> dict[str, Any]:
    return {
        "LARGEST": element.largest, "MANTISSA": element.mantissa_bits,
        "NORMAL": 127 + int(math.log2(element.smallest_normal)), "CODE": CODE_TYPES[element.name],
        "POWER_OF_TWO": power_of_two, "ASM": compiled,
    }
