"""Device code of `roundtrip_kernel` that knows how a slab of x lies in registers.

A slab is [ROWS, 128] of x, read in chunks of 8 elements a thread: [ROWS, LANES, 8] where rows are contiguous,
[ROWS, 8, LANES] where columns are (x.t()). AXIS is the one of eight: reducing along it costs no shuffle, so
whatever is kept from chunk to chunk is [ROWS, LANES], one register a thread and row.

Two bf16 share a 32-bit register. `scan` compares both with one instruction (bits of |x| order like |x|, as in
`quantize_kernel`), `widen` makes fp32 of each with one.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from fp8scope.quantize_kernel import magnitude_bits


@triton.jit
def unit_of(amax: tl.tensor) -> tl.tensor:
    """The power of two just above `amax` as fp32, at most 2^126; 1 for 0."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits >> 23) + 1, 2), 253)
    return (tl.where(bits == 0, 127, exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(unit: tl.tensor) -> tl.tensor:
    """1 / unit, exactly, for a power of two between 2^-125 and 2^126."""
    return ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def sign(x: tl.tensor) -> tl.tensor:
    """1 where the sign bit is set, else 0: as a count, one instruction."""
    return (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def spread(tiles: tl.tensor) -> tl.tensor:
    """[ROWS] broadcasts against a chunk."""
    return tiles[:, None, None]


@triton.jit
def folded(tiles: tl.tensor, FOLD: tl.constexpr) -> tl.tensor:
    """[ROWS] as [ROWS / FOLD], the sum over neighbours, which one thread holds."""
    return tl.sum(tl.reshape(tiles, (tiles.shape[0] // FOLD, FOLD)), axis=1) if FOLD > 1 else tiles


@triton.jit
def folded_max(tiles: tl.tensor, FOLD: tl.constexpr) -> tl.tensor:
    """`folded` with the maximum for the sum."""
    return tl.max(tl.reshape(tiles, (tiles.shape[0] // FOLD, FOLD)), axis=1) if FOLD > 1 else tiles


@triton.jit
def load_chunk(ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor, k: tl.tensor, R: tl.tensor, C: tl.tensor,
               stride_r: tl.tensor, stride_c: tl.tensor, EVEN: tl.constexpr, ROOT: tl.constexpr) -> tl.tensor:
    """Columns k + `columns` of some rows, [ROWS, ., .]; zeros outside of the matrix. ROOT: their square
    roots, fp32."""
    at = columns[None, :, :] + k
    ptrs = ptr + spread(rows) * stride_r + at * stride_c
    x = tl.load(ptrs) if EVEN else tl.load(ptrs, mask=(spread(rows) < R) & (at < C), other=0)
    return tl.sqrt_rn(x.to(tl.float32)) if ROOT else x


@triton.jit
def load_bits(ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor, k: tl.tensor, R: tl.tensor, C: tl.tensor,
              stride_r: tl.tensor, stride_c: tl.tensor, EVEN: tl.constexpr, ROOT: tl.constexpr) -> tl.tensor:
    """The bits of |x| as fp32 of a chunk."""
    x = load_chunk(ptr, rows, columns, k, R, C, stride_r, stride_c, EVEN, ROOT)
    return magnitude_bits(x.to(tl.float32))


@cache
def packs(device: torch.device) -> bool:
    """Whether `device` computes on two 16-bit integers at once, as `scan` does: from Hopper on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def scan(x: tl.tensor, most: tl.tensor, least: tl.tensor,
         nonzero: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Two bf16 at a time, uint16 per place: the greatest |x|, the least |x| - 1 (wrapping, so that zero is
    the greatest), and how many are not zero."""
    most, least, nonzero = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, ones;
        and.b32 a, $6, 0x7fff7fff;
        max.u16x2 $0, $3, a;
        mov.b32 ones, 0xffffffff;
        add.u16x2 b, a, ones;
        min.u16x2 $1, $4, b;
        mov.b32 ones, 0x00010001;
        min.u16x2 b, a, ones;
        add.u32 $2, $5, b;
        }
        """, "=&r,=&r,=&r,r,r,r,r", [most, least, nonzero, x],
        dtype=(tl.uint16, tl.uint16, tl.uint16), is_pure=True, pack=2)
    return most, least, nonzero


@triton.jit
def scan_bits(bits: tl.tensor, most: tl.tensor, least: tl.tensor, zeros: tl.tensor,
              AXIS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`scan` for what is not packed, with bits of fp32, [ROWS, LANES] results and zeros counted."""
    before = (bits - 1).to(tl.uint32, bitcast=True)  # of zero: the greatest there is
    most = tl.maximum(most, tl.max(bits, axis=AXIS))
    return most, tl.minimum(least, tl.min(before, axis=AXIS)), zeros + tl.sum(sign(before), axis=AXIS)


@triton.jit
def widen(x: tl.tensor) -> tl.tensor:
    """The bits of two bf16 as two fp32, an instruction each."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=&r,=&r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def staleness(amax_bits: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """log2(amax / (scale largest)), for blocks with an amax."""
    amax = tl.where(amax_bits > 0, amax_bits, 0x3F800000).to(tl.float32, bitcast=True)
    return tl.log2(amax.to(tl.float64) / (scale.to(tl.float64) * LARGEST))
