"""Device code of rounding by chance: the twin of `rounding`, sixteen random bits for each number.

One hash of an element's index serves both of its moments, upper half and lower half. COMPILED chooses what
the hardware does in one instruction and Triton's interpreter cannot do.

E4M3: to the bits of |y|, which order like |y|, sixteen random bits are added below the three of mantissa that
stay; the carry rounds up in proportion. Where codes are equally far apart, below 2^-6, |y| + 2^-6 is rounded
instead. Integers: floor(y + u), by adding 1.5 x 2^23, rounded downwards: the code is then in the lowest bits.
"""

import triton
import triton.language as tl

_NORMAL = tl.constexpr(2.0**-6)  # the smallest normal of E4M3
_NORMAL_BITS = tl.constexpr(0x3C800000)
_KEPT = tl.constexpr(-0x100000)  # sign, exponent and three bits of mantissa
_UPPER = tl.constexpr(-0x10000)
_SIGN = tl.constexpr(-0x80000000)
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def least(x: tl.tensor) -> tl.tensor:
    """Of a tile [CHUNKS, ROWS, WIDTH] of integers: across a warp in one instruction."""
    return tl.min(tl.min(tl.min(x, axis=0), axis=0), axis=0)


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """Twin of `rounding._mix`, of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hashes(key: tl.tensor, first: tl.tensor, offset: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """32 random bits for each element `first` + `offset`; the scalar first is int64, offsets are below 2^31.

    WIDE: indices may have more than 32 bits."""
    low = first.to(tl.uint32)
    at = low + offset.to(tl.uint32)
    if WIDE:
        high = (first >> 32).to(tl.uint32)
        at = at ^ tl.where(at < low, mix(key ^ (high + 1)), mix(key ^ high))
    else:
        at = at ^ mix(key)
    return mix(at)


@triton.jit
def to_integer(y: tl.tensor, random: tl.tensor, LEAST: tl.constexpr, LARGEST: tl.constexpr,
               keep: tl.tensor, COMPILED: tl.constexpr) -> tl.tensor:
    """floor(y + u) as int32 within [LEAST, LARGEST], at least 1 where `keep`; random: 16 bits, as uint32."""
    y = tl.fma(random.to(tl.uint16).to(tl.float32), 2.0**-16, y)
    y = tl.minimum(tl.maximum(y, tl.where(keep, 1.0, LEAST)), LARGEST)
    if COMPILED:
        code = tl.inline_asm_elementwise("add.rm.f32 $0, $1, 0f4B400000;", "=r,f", [y], dtype=tl.int32,
                                         is_pure=True, pack=1)
    else:
        code = tl.floor(y).to(tl.int32)
    return code


@triton.jit
def _raised(bits: tl.tensor, random: tl.tensor, SIGNED: tl.constexpr, COMPILED: tl.constexpr) -> tl.tensor:
    """Bits of |y| plus 16 random ones, cut after three of mantissa: the upper half of `random` if SIGNED,
    else the lower. Masks come before shifts: there are instructions that shift and add."""
    if COMPILED and SIGNED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            and.b32 t, $2, 0xFFFF0000;
            shr.u32 t, t, 12;
            add.s32 t, t, $1;
            and.b32 $0, t, 0xFFF00000;
            }
            """, "=r,r,r", [bits, random], dtype=tl.int32, is_pure=True, pack=1)
    elif COMPILED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            and.b32 t, $2, 0xFFFF;
            shl.b32 t, t, 4;
            add.s32 t, t, $1;
            and.b32 $0, t, 0xFFF00000;
            }
            """, "=r,r,r", [bits, random], dtype=tl.int32, is_pure=True, pack=1)
    else:
        half = random >> 16 if SIGNED else random & 0xFFFF
        return (bits + (half << 4).to(tl.int32)) & _KEPT


@triton.jit
def to_e4m3(y: tl.tensor, random: tl.tensor, keep: tl.tensor, SIGNED: tl.constexpr,
            COMPILED: tl.constexpr) -> tl.tensor:
    """Codes of a tile as float8e4nv, at least 2^-9 where `keep`; random: the upper half is used if SIGNED.

    What normal codes do not need is left out where a whole tile has no other, as nearly all have."""
    size = tl.abs(y)
    bits = size.to(tl.int32, bitcast=True)
    if least(bits) < _NORMAL_BITS:
        base = tl.where(size < _NORMAL, _NORMAL, 0.0)
        size = _raised((size + base).to(tl.int32, bitcast=True), random, SIGNED, COMPILED
                       ).to(tl.float32, bitcast=True) - base
        size = tl.maximum(size, tl.where(keep, 2.0**-9, 0.0))
    else:
        size = _raised(bits, random, SIGNED, COMPILED).to(tl.float32, bitcast=True)
    if not COMPILED:  # the hardware's cast saturates
        size = tl.minimum(size, 448.0)
    if SIGNED:
        bits = size.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & _SIGN)
        size = bits.to(tl.float32, bitcast=True)
    return size.to(tl.float8e4nv)


@triton.jit
def to_bf16(x: tl.tensor, random: tl.tensor) -> tl.tensor:
    """x as bf16; NaN and infinities stay. random: 16 bits, as uint32."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & _MAGNITUDE) < _INFINITY
    bits = (bits + tl.where(finite, random.to(tl.int32, bitcast=True), 0)) & _UPPER
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
