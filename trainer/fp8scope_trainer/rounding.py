"""Rounding by chance that can be repeated, on any mesh.

y lies between two codes a <= y < b and becomes b with probability (y - a) / (b - a), so that its mean is y.
The random bits of an element are a hash of (seed, step, stream, index of the element in the whole tensor):
no generator state, the same codes for one rank or eight, and again after a restart.

    key  = mix(mix(mix(seed) ^ step) ^ stream)               stream: the parameter's number
    hash = mix(low 32 bits of index ^ mix(key ^ high 32 bits of index))

One hash serves an element of a parameter: its upper 16 bits round the first moment, its lower 16 the second.
Sixteen bits are enough: a probability is off by 2^-16 at most. A weight that is rounded has a key of its own.

    integers    floor(y + U / 2^16)
    E4M3        20 bits of an fp32 mantissa go: the bits plus 16 U, then cut. Below 2^-6, where codes are 2^-9
                apart, 2^-6 is added first and taken away after: there fp32 has the same binades as the codes.
    bf16        16 bits go: the bits plus U, then cut

Adding to the bits of a float moves it along its codes, carries into the exponent included; so there is no
division, and nothing depends on how a device computes a logarithm.

Rejected: torch's generators, whose numbers depend on how a tensor is sharded; two hashes an element (a third
of the arithmetic of a fused step); rounding to nearest, under which a moment that changes by less than half a
code in a step never changes at all.
"""

import torch
from torch import Tensor

from fp8scope_protocol.formats import E4M3

BITS = 16
"""Random bits of one rounding."""

WEIGHT_KEY = 0x9E3779B9
"""Sets the key of a weight's rounding apart from that of its moments."""

_MASK = 0xFFFFFFFF
_INT32_INFINITY = 0x7F800000


def key_of(*, seed: int, step: int, stream: int, weight: bool = False) -> int:
    """32 bits that name the random numbers of one parameter in one step."""
    key = _mix_int(key_of_step(seed, step) ^ (stream & _MASK))
    return _mix_int(key ^ WEIGHT_KEY) if weight else key


def key_of_step(seed: int, step: int) -> int:
    """32 bits from which those of each parameter follow."""
    return _mix_int(_mix_int(seed) ^ (step & _MASK))


def hashed(indices: Tensor, key: int) -> Tensor:
    """32 random bits for each element index (int64, any shape), held in int64."""
    return _mix((indices & _MASK) ^ _mix(key ^ (indices >> 32)))


def upper(bits: Tensor) -> Tensor:
    """U of the first moment, or of a weight: int64 in 0 .. 2^16 - 1."""
    return bits >> BITS


def lower(bits: Tensor) -> Tensor:
    """U of the second moment."""
    return bits & 0xFFFF


def round_integer(y: Tensor, u: Tensor, *, largest: float, smallest: float = 0.0) -> Tensor:
    """Integers (fp32) of y (fp32), at most `largest` in size; what is above zero gets at least `smallest`."""
    found = (y.clamp(-largest, largest) + u.float() * 2.0**-BITS).floor().clamp(max=largest)
    return torch.where(y > 0, found.clamp(min=smallest), found) if smallest else found


def round_e4m3(y: Tensor, u: Tensor, *, keep_nonzero: bool = False) -> Tensor:
    """Codes (float8_e4m3fn) of y (fp32), at most 448 in size; NaN stays NaN.

    With `keep_nonzero` what is not zero gets at least the smallest code.
    """
    size = y.abs().clamp(max=E4M3.largest)
    lift = torch.where(size < E4M3.smallest_normal, E4M3.smallest_normal, 0.0)
    bits = (size + lift).view(torch.int32)
    rounded = (bits + (u.int() << 4) & -(1 << 20)).view(torch.float32) - lift
    rounded = torch.where(y.isnan(), y, rounded.clamp(max=E4M3.largest))
    if keep_nonzero:
        rounded = torch.where(size > 0, rounded.clamp(min=E4M3.smallest_subnormal), rounded)
    return rounded.copysign(y).to(torch.float8_e4m3fn)


def round_bf16(x: Tensor, u: Tensor) -> Tensor:
    """x (fp32) as bf16; NaN and Inf stay."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + u.int() & -(1 << 16)).view(torch.float32)
    finite = (bits & _INT32_INFINITY) != _INT32_INFINITY
    return torch.where(finite, rounded, x).to(torch.bfloat16)


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
