"""Scales and codes by arithmetic: device code that serves every format on any device.

Casts to FP8 need compute capability 8.9 and lose carries in Triton's interpreter; casts to integers truncate.
With m = 1.5 x 2^23 quanta, (y + m) - m is y rounded half to even to a multiple of the quantum, the distance
of codes near y: a power of two that follows from the exponent of y, or is fixed below the smallest normal,
which for an integer format is everywhere. It equals the hardware's cast of clamped values to E4M3 and E5M2.
"""

import triton
import triton.language as tl

from fp8scope.quantize_kernel import INFINITY, magnitude_bits, scale_of
from fp8scope_protocol.formats import SMALLEST_E8M0

_SMALLEST_E8M0 = tl.constexpr(SMALLEST_E8M0)

RULES = {"": 0, "floor": 1, "rceil": 2}
"""RULE of `group_scale`, by `Scaling.e8m0`."""


@triton.jit
def group_scale(amax_bits: tl.tensor, LARGEST: tl.constexpr, RULE: tl.constexpr,
                POWER_OF_TWO: tl.constexpr) -> tl.tensor:
    """Twin of `quantize.scale_of` and `quantize.e8m0_scale_of`, from the bits of amax."""
    if RULE == 0:
        scale = scale_of(amax_bits, LARGEST, POWER_OF_TWO)
    elif RULE == 1:
        exponent = (amax_bits >> 23) - 8
        scale = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), LARGEST)
        up = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & INFINITY).to(tl.float32, bitcast=True)
        scale = tl.where(scale > _SMALLEST_E8M0, up, _SMALLEST_E8M0)
    return tl.where((amax_bits > 0) & (amax_bits < INFINITY), scale, 1.0)


@triton.jit
def round_to_code(y: tl.tensor, LARGEST: tl.constexpr, MANTISSA: tl.constexpr,
                  NORMAL: tl.constexpr) -> tl.tensor:
    """The code nearest to y, half to even. NORMAL: the biased exponent of the smallest normal."""
    y = tl.clamp(y, -LARGEST, LARGEST)
    exponent = tl.maximum(magnitude_bits(y) >> 23, NORMAL)
    m = (((exponent + (23 - MANTISSA)) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (y + m) - m
