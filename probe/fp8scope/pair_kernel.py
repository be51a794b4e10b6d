"""Device code on pairs: two bf16 in the 32 bits of one register, the lower half first in memory.

The bits of |x| order like |x|, so halves are compared as integers, two in one instruction (from Hopper on;
see `packs`). ASM chooses PTX; without it the same is computed half by half, for Triton's interpreter.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from fp8scope.code_kernel import round_to_code

LOW = tl.constexpr(0xFFFF)
HIGH = tl.constexpr(-0x10000)  # the upper half, as an int32
MAGNITUDES = tl.constexpr(0x7FFF7FFF)  # all bits of both but the signs


@cache
def packs(device: torch.device) -> bool:
    """Whether `device` computes on two 16-bit integers at once: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _max_asm(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32,
                                     is_pure=True, pack=1)


@triton.jit
def _min_asm(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32,
                                     is_pure=True, pack=1)


@triton.jit
def _max_plain(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return (tl.maximum(upper(a), upper(b)) << 16) | tl.maximum(a & LOW, b & LOW)


@triton.jit
def _min_plain(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return (tl.minimum(upper(a), upper(b)) << 16) | tl.minimum(a & LOW, b & LOW)


@triton.jit
def upper(pair: tl.tensor) -> tl.tensor:
    """The upper half, as a number."""
    return (pair >> 16) & LOW


@triton.jit
def pair_max(a: tl.tensor, b: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """The greater of either half."""
    return _max_asm(a, b) if ASM else _max_plain(a, b)


@triton.jit
def pair_min(a: tl.tensor, b: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """The lesser of either half."""
    return _min_asm(a, b) if ASM else _min_plain(a, b)


@triton.jit
def max_of_pairs(pairs: tl.tensor, axis: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """The greater of either half along an axis."""
    if ASM:
        most = tl.reduce(pairs, axis, _max_asm)
    else:  # the interpreter reduces by a function of ours element by element
        most = (tl.max(upper(pairs), axis=axis) << 16) | tl.max(pairs & LOW, axis=axis)
    return most


@triton.jit
def extremes(high: tl.tensor, low: tl.tensor, ASM: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Maxima and minima [ROWS, LANES, n] of pairs of magnitudes -> the greatest and the least a row, [ROWS].

    Across lanes both travel in one pair: the greatest above, what the least lacks to 0x7FFF below.
    """
    high = tl.reduce(high, 2, _max_asm) if ASM else tl.reduce(high, 2, _max_plain)
    low = tl.reduce(low, 2, _min_asm) if ASM else tl.reduce(low, 2, _min_plain)
    greatest = tl.maximum(upper(high), high & LOW)
    least = tl.minimum(upper(low), low & LOW)
    both = (greatest << 16) | (0x7FFF - least)
    both = tl.reduce(both, 1, _max_asm) if ASM else tl.reduce(both, 1, _max_plain)
    return upper(both), 0x7FFF - (both & LOW)


@triton.jit
def widen(pair: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Both as fp32."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & HIGH).to(tl.float32, bitcast=True)


@triton.jit
def round_pair(y: tl.tensor, z: tl.tensor, LARGEST: tl.constexpr, MANTISSA: tl.constexpr,
               NORMAL: tl.constexpr, CODE: tl.constexpr,
               ASM: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What y and z, within the range of E4M3, are rounded to, and both codes, z's in the upper byte."""
    if ASM:
        p, q, both = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 a, b;
            .reg .b32 both;
            cvt.rn.satfinite.e4m3x2.f32 $2, $4, $3;
            cvt.rn.f16x2.e4m3x2 both, $2;
            mov.b32 {a, b}, both;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            }
            """, "=&f,=&f,=&h,f,f", [y, z], dtype=(tl.float32, tl.float32, tl.int16), is_pure=True, pack=1)
    else:
        p, q = round_to_code(y, LARGEST, MANTISSA, NORMAL), round_to_code(z, LARGEST, MANTISSA, NORMAL)
        both = _code(p, y, CODE) | (_code(q, z, CODE) << 8)
    return p, q, both


@triton.jit
def code_of(y: tl.tensor, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr,
            CODE: tl.constexpr) -> tl.tensor:
    """The code of y, within the range of the format, as int16; for Triton's interpreter."""
    return _code(round_to_code(y, LARGEST, MANTISSA, NORMAL), y, CODE)


@triton.jit
def _code(value: tl.tensor, y: tl.tensor, CODE: tl.constexpr) -> tl.tensor:
    """The code of a value that is one, with the sign of y where it is 0."""
    code = tl.abs(value).to(CODE).to(tl.uint8, bitcast=True).to(tl.int16)
    return code | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.int16)


@triton.jit
def four_codes(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, LARGEST: tl.constexpr,
               MANTISSA: tl.constexpr, NORMAL: tl.constexpr, CODE: tl.constexpr,
               ASM: tl.constexpr) -> tl.tensor:
    """The codes of a to d as int32, d's in the uppermost byte."""
    if ASM and MANTISSA == 3:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    elif ASM:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low = (code_of(a, LARGEST, MANTISSA, NORMAL, CODE).to(tl.int32) & 0xFF) | (
            (code_of(b, LARGEST, MANTISSA, NORMAL, CODE).to(tl.int32) & 0xFF) << 8)
        high = (code_of(c, LARGEST, MANTISSA, NORMAL, CODE).to(tl.int32) & 0xFF) | (
            (code_of(d, LARGEST, MANTISSA, NORMAL, CODE).to(tl.int32) & 0xFF) << 8)
        return low | (high << 16)


@triton.jit
def log2(x: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """log2 of a normal fp32, to 2^-22."""
    if ASM:
        found = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32,
                                          is_pure=True, pack=1)
    else:
        found = tl.log2(x)
    return found
