"""Exponent histograms in bit planes: device code of `roundtrip_kernel`, some six instructions an element.

An element sets bit (exponent mod 32) of a word, `1 << (exponent & 31)`. Thirty-two bins are then counted at
once, as binary numbers that stand upright: plane k holds bit k of every count. Words are added by a tree of
carry-save adders (Harley and Seal's population count): an adder turns three words into a sum and a carry in a
few logic instructions. Eleven planes hold counts below 2048; `roundtrip_kernel` bounds the slabs of a program
so that no count exceeds 1920.

Unique mod 32 are the exponents -23 .. 8. Current scales of E4M3 keep |y| at 448 and below, so only values
2^-31 below their tile's largest fall outside. Zeros land in the bin of exponent 1 (their biased exponent is 0
mod 32) and are subtracted at the end. A slab with smaller values takes another branch: there they go to the
same bin as zeros, are subtracted with them and counted for bin 0 one by one.
"""

import triton
import triton.language as tl

ALIASED = tl.constexpr(2.0**-23)
"""Magnitudes from here on, below 512, have a bin of their own."""


@triton.jit
def add_exponents(exponent: tl.tensor, p0: tl.tensor, p1: tl.tensor, p2: tl.tensor, p3: tl.tensor,
                  p4: tl.tensor, p5: tl.tensor, p6: tl.tensor, p7: tl.tensor, p8: tl.tensor, p9: tl.tensor,
                  p10: tl.tensor, AXIS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The planes [ROWS, LANES] with a chunk of biased exponents, 8 a thread along AXIS, counted in."""
    b0, b1 = _pair(1 << (exponent & 31), AXIS)
    b0, b2 = _pair(b0, 2)
    b1, b3 = _pair(b1, 2)
    b0, b4 = tl.split(b0)
    b1, b5 = tl.split(b1)
    b2, b6 = tl.split(b2)
    b3, b7 = tl.split(b3)
    p0, b0 = _carry_save(p0, b0, b1)
    p0, b1 = _carry_save(p0, b2, b3)
    p0, b2 = _carry_save(p0, b4, b5)
    p0, b3 = _carry_save(p0, b6, b7)
    p1, b0 = _carry_save(p1, b0, b1)
    p1, b1 = _carry_save(p1, b2, b3)
    p2, b0 = _carry_save(p2, b0, b1)
    p3, b0 = p3 ^ b0, p3 & b0
    p4, b0 = p4 ^ b0, p4 & b0
    p5, b0 = p5 ^ b0, p5 & b0
    p6, b0 = p6 ^ b0, p6 & b0
    p7, b0 = p7 ^ b0, p7 & b0
    p8, b0 = p8 ^ b0, p8 & b0
    p9, b0 = p9 ^ b0, p9 & b0
    return p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10 ^ b0


@triton.jit
def store_planes(ptr: tl.tensor, slots: tl.tensor, small: tl.tensor, below: tl.tensor, p0: tl.tensor,
                 p1: tl.tensor, p2: tl.tensor, p3: tl.tensor, p4: tl.tensor, p5: tl.tensor, p6: tl.tensor,
                 p7: tl.tensor, p8: tl.tensor, p9: tl.tensor, p10: tl.tensor, BINS: tl.constexpr) -> None:
    """The counts of all threads, by bin, at ptr + bin slots.

    small: how many elements below `ALIASED`, zeros too, went to the bin of exponent 1; below: without zeros.
    """
    bit = tl.arange(0, 32)
    counts = _bits(p0, bit) + (_bits(p1, bit) << 1) + (_bits(p2, bit) << 2) + (_bits(p3, bit) << 3)
    counts += (_bits(p4, bit) << 4) + (_bits(p5, bit) << 5) + (_bits(p6, bit) << 6) + (_bits(p7, bit) << 7)
    counts += (_bits(p8, bit) << 8) + (_bits(p9, bit) << 9) + (_bits(p10, bit) << 10)
    totals = tl.sum(counts, axis=0) - tl.where(bit == 0, small, 0)
    tl.store(ptr, below)
    tl.store(ptr + slots * tl.where(bit >= 8, bit - 7, bit + 25), totals)  # bin 1 is of exponent -23
    rest = 33 + tl.arange(0, 8)
    tl.store(ptr + slots * rest, tl.zeros([8], tl.int32), mask=rest < BINS)


@triton.jit
def _pair(x: tl.tensor, AXIS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The two halves of the values that each thread holds along AXIS."""
    if AXIS == 1:
        x = tl.permute(x, (0, 2, 1))
    first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
    return first, second


@triton.jit
def _carry_save(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """a + b + c of single bits, 32 at a time: the bits of weight 1 and of weight 2."""
    return a ^ b ^ c, (a & b) | (c & (a ^ b))


@triton.jit
def _bits(plane: tl.tensor, bit: tl.tensor) -> tl.tensor:
    """[threads' words, 32] single bits."""
    return (tl.reshape(plane, (plane.shape[0] * plane.shape[1], 1)) >> bit[None, :]) & 1
