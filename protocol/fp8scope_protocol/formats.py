"""Number formats and how tensors are scaled into them.

A quantizer divides a tensor by a scale and rounds the quotient to a code: y = x / s, q = round(y),
d = q s. The scale is a *dequantization* factor everywhere in fp8scope. Dividing matters: multiplying
by 1/s yields other codes for about 7 elements in 10 million.

A *format* says which codes exist. E4M3 ("fn": no infinities, one NaN pattern) reaches 448 and its
smallest subnormal is 2^-9; E5M2 reaches 57344 with 2 bits of mantissa. A *scaling* says which elements
share a scale: a [1,128] tile along a row, a [128,128] block, the whole tensor.

`sqnr_floor_db` is what a well-scaled Gaussian tensor reads under nearest rounding; it is the value that
a healthy series is compared with, so that colours show excess over the unavoidable. E4M3's 31.8 dB
(28.8 dB under stochastic rounding) does not depend on the distribution as long as values stay normal.
"""

from dataclasses import dataclass

from fp8scope_protocol.errors import Invalid, UnknownName


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One element format: the largest code, the smallest subnormal, and its unavoidable error."""

    name: str
    largest: float
    smallest_subnormal: float
    smallest_normal: float
    mantissa_bits: int
    sqnr_floor_db: float

    @property
    def distortion_floor(self) -> float:
        """1 - cosine that corresponds to `sqnr_floor_db`, for an error uncorrelated with the signal."""
        return 0.5 * float(10.0 ** (-self.sqnr_floor_db / 10.0))


E4M3 = Format(name="e4m3", largest=448.0, smallest_subnormal=2.0**-9, smallest_normal=2.0**-6,
              mantissa_bits=3, sqnr_floor_db=31.8)
E5M2 = Format(name="e5m2", largest=57344.0, smallest_subnormal=2.0**-16, smallest_normal=2.0**-14,
              mantissa_bits=2, sqnr_floor_db=25.7)
BF16 = Format(name="bf16", largest=3.3895313892515355e38, smallest_subnormal=2.0**-133,
              smallest_normal=2.0**-126, mantissa_bits=7, sqnr_floor_db=55.9)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, BF16)}

SCALINGS = ("tensorwise", "tile 1x128", "block 128x128", "none")
"""Which elements share one scale. `none` is a tensor that is not quantized."""

SCALE_POLICIES = ("current", "delayed")
"""`current` takes the scale from the tensor itself; `delayed` from a history of earlier amaxes."""

TILE = 128
"""Edge of tiles and blocks, in elements."""

SMALLEST_SCALE = 2.0**-126
"""Floor of a scale. A floor on *amax* of 1e-4, as some codebases use, hurts once gradients are near 1e-8."""


def parse_format(name: str) -> Format:
    """The format called `name`, or `UnknownName` naming near misses."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnknownName("format", name, FORMATS) from None


def check_scaling(name: str) -> str:
    """`name` if it is a known scaling, else `Invalid`."""
    if name not in SCALINGS:
        raise Invalid("scaling", name, f"must be one of {', '.join(SCALINGS)}")
    return name
