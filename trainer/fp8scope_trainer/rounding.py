"""Stochastic rounding to E4M3 that can be repeated, on any mesh.

y lies between two codes a <= y < b and becomes b with probability (y - a) / (b - a), so that its mean is y.
The random number of an element is a hash of (seed, step, stream, index of the element in the whole tensor):
no generator state, the same codes for one rank or eight, and again after a restart.

Rejected: torch's generators, whose numbers depend on how a tensor is sharded; rounding to nearest, under
which a moment that changes by less than half a code in a step never changes at all.
"""

import torch
from torch import Tensor

from fp8scope_protocol.formats import E4M3

_MASK = 0xFFFFFFFF


def uniform(indices: Tensor, *, seed: int, step: int, stream: int) -> Tensor:
    """fp32 in [0, 1) with 24 random bits for each element index (int64, any shape)."""
    key = _mix_int(_mix_int(_mix_int(seed) ^ (step & _MASK)) ^ (stream & _MASK))
    bits = _mix(_mix((indices & _MASK) ^ key) ^ (indices >> 32))
    return (bits >> 8).float() * 2.0**-24


def round_e4m3(y: Tensor, random: Tensor, *, keep_nonzero: bool = False) -> Tensor:
    """Codes (float8_e4m3fn) of y (fp32), away from zero or towards it by chance; NaN stays NaN.

    With `keep_nonzero` what is not zero gets at least the smallest code.
    """
    size = y.abs()
    power = (size.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^floor(log2 size)
    quantum = (power * 0.125).clamp_min(E4M3.smallest_subnormal)  # distance of neighbours: 3 bits of mantissa
    quotient = size / quantum
    below = quotient.floor()
    rounded = ((below + (random < quotient - below)) * quantum).clamp(max=E4M3.largest)
    if keep_nonzero:
        rounded = torch.where(size > 0, rounded.clamp_min(E4M3.smallest_subnormal), rounded)
    return rounded.copysign(y).to(torch.float8_e4m3fn)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit values, held in int64, in which every input bit reaches every output bit."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
