"""Device code of optimizer states: what a block of codes says, and a block of numbers as codes.

Twin of `state_format`. A tile is [CHUNKS, ROWS, WIDTH]: ROWS blocks of CHUNKS x WIDTH elements, with a scale
each. Each warp reads 128 elements of one block at a time, so that amax is one instruction across it; chunks
are loads one after the other. int4 lies two to a byte.
"""

import triton
import triton.language as tl

from fp8scope_trainer.chance_kernel import to_bf16, to_e4m3, to_integer

_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def read(pointer: tl.tensor, offset: tl.tensor, inside: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """Without a mask accesses are wide. What is not inside reads as 0."""
    return tl.load(pointer + offset, mask=inside, other=0.0) if MASKED else tl.load(pointer + offset)


@triton.jit
def write(pointer: tl.tensor, offset: tl.tensor, value: tl.tensor, inside: tl.tensor,
          MASKED: tl.constexpr) -> None:
    """The counterpart of `read`."""
    if MASKED:
        tl.store(pointer + offset, value, mask=inside)
    else:
        tl.store(pointer + offset, value)


@triton.jit
def decoded(codes: tl.tensor, scale: tl.tensor, FORMAT: tl.constexpr, SIGNED: tl.constexpr) -> tl.tensor:
    """fp32 of codes as `read`; scale [ROWS] fp32."""
    if FORMAT == "int4":
        low, high = (codes & 15).to(tl.int32), (codes >> 4).to(tl.int32)
        if SIGNED:
            low, high = (low ^ 8) - 8, (high ^ 8) - 8
        both = tl.join(low, high)
        x = tl.reshape(both, (both.shape[0], both.shape[1], 2 * both.shape[2])).to(tl.float32)
    else:
        x = codes.to(tl.float32)
    if FORMAT != "fp32" and FORMAT != "bf16":
        x *= scale[None, :, None]
    return x


@triton.jit
def top_of(x: tl.tensor, SIGNED: tl.constexpr) -> tl.tensor:
    """The bits of the largest |x| of each row, [ROWS]; those of NaN and infinities are _INFINITY and more."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.max(tl.max(bits & 0x7FFFFFFF if SIGNED else bits, axis=0), axis=1)


@triton.jit
def scale_of(top: tl.tensor, LARGEST: tl.constexpr, COMPILED: tl.constexpr) -> tl.tensor:
    """Scales [ROWS] of `top_of` rows, 1 where a row is all zero or not all finite."""
    amax = top.to(tl.float32, bitcast=True)
    if COMPILED:  # the quotient, to the bit where no remainder is subnormal
        over = amax * (1.0 / LARGEST)
        scale = tl.fma(tl.fma(over, -LARGEST, amax), 1.0 / LARGEST, over)
    else:
        scale = tl.div_rn(amax, LARGEST)
    return tl.where((top == 0) | (top >= _INFINITY), 1.0, tl.maximum(scale, _SMALLEST))


@triton.jit
def inverse(x: tl.tensor, COMPILED: tl.constexpr) -> tl.tensor:
    """1 / x, to the bit, of x in [2^-126, 2^126]."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 r, e;
            rcp.approx.ftz.f32 r, $1;
            neg.f32 e, $1;
            fma.rn.f32 e, e, r, 0f3F800000;
            fma.rn.f32 $0, e, r, r;
            }
            """, "=&f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def coded(y: tl.tensor, random: tl.tensor, x: tl.tensor, FORMAT: tl.constexpr, SIGNED: tl.constexpr,
          LARGEST: tl.constexpr, COMPILED: tl.constexpr) -> tl.tensor:
    """Codes of y = x / scale as they are stored. random: the upper half for a signed moment, else the lower.
    """
    keep = (x > 0.0) & (not SIGNED)
    if FORMAT == "fp8":
        codes = to_e4m3(y, random, keep, SIGNED, COMPILED)
    else:
        half = random >> 16 if SIGNED else random & 0xFFFF
        codes = to_integer(y, half, -LARGEST if SIGNED else 0.0, LARGEST, keep, COMPILED)
        if FORMAT == "int4":
            low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1], codes.shape[2] // 2, 2)))
            codes = ((low & 15) | ((high & 15) << 4)).to(tl.uint8)
        elif FORMAT == "int16":
            codes = codes.to(tl.int16)
        else:
            codes = codes.to(tl.int8) if SIGNED else codes.to(tl.uint8)
    return codes


@triton.jit
def put(pointer: tl.tensor, scale_ptr: tl.tensor, offset: tl.tensor, place: tl.tensor, x: tl.tensor,
        top: tl.tensor, random: tl.tensor, inside: tl.tensor, there: tl.tensor, FORMAT: tl.constexpr,
        SIGNED: tl.constexpr, LARGEST: tl.constexpr, MASKED: tl.constexpr, COMPILED: tl.constexpr) -> None:
    """Stores a tile x, of which `top` is `top_of`; offset and inside are those of the codes, place and there
    of the scales."""
    if FORMAT == "fp32":
        write(pointer, offset, x, inside, MASKED)
    elif FORMAT == "bf16":
        write(pointer, offset, to_bf16(x, random >> 16 if SIGNED else random & 0xFFFF), inside, MASKED)
    else:
        odd, scale = top >= _INFINITY, scale_of(top, LARGEST, COMPILED)
        y = x * inverse(scale, COMPILED)[None, :, None]
        write(pointer, offset, coded(y, random, x, FORMAT, SIGNED, LARGEST, COMPILED), inside, MASKED)
        if FORMAT != "fp8":
            scale = tl.where(odd, _NAN, scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        write(scale_ptr, place, scale, there, MASKED)
        if tl.max(odd.to(tl.int32), axis=0) > 0:  # seldom: the codes of such a block are NaN, or 0
            mask = odd[None, :, None] & (inside if MASKED else offset >= 0)
            if FORMAT == "fp8":
                tl.store(pointer.to(tl.pointer_type(tl.uint8)) + offset,
                         tl.full(offset.shape, 0x7F, tl.uint8), mask=mask)
            else:
                tl.store(pointer + offset, tl.zeros(offset.shape, pointer.dtype.element_ty), mask=mask)
