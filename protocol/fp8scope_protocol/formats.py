"""Number formats and how tensors are scaled into them.

A quantizer divides a tensor by a scale and rounds the quotient to a code: y = x / s, q = round(y),
d = q s. The scale is a *dequantization* factor everywhere in fp8scope. Dividing matters: multiplying
by 1/s yields other codes for about 7 elements in 10 million.

A *format* says which codes exist. E4M3 ("fn": no infinities, one NaN pattern) reaches 448 and its
smallest subnormal is 2^-9; E5M2 reaches 57344 with 2 bits of mantissa. INT8 and INT4 are written in the
same terms: every code is subnormal, 1 apart. They are symmetric, -127 .. 127 and -7 .. 7: the code -128 has
no positive twin, so using it would give -x another magnitude than x and make abs(-128) a trap (in int8 it
is -128). MXFP8 is E4M3 under scales of E8M0, powers of two from 2^-127 to 2^127.

A *scaling* says which elements share a scale: a [1,128] tile along a row, a [128,128] block, a row, the
whole tensor, n consecutive elements of the flattened tensor. `mx 1x32` also says how the largest magnitude
of 32 becomes a power of two: `floor` (OCP MX 1.0: 2^(floor(log2 amax) - 8)) saturates the largest of every
block with a significand above 1.75, `rceil` (amax / 448 rounded up) saturates nothing.

`sqnr_floor_db` is what a well-scaled Gaussian tensor reads; it is the value that a healthy series is
compared with, so that colours show excess over the unavoidable. E4M3's 31.8 dB does not depend on the
distribution as long as values stay normal; an integer's depends on how far the largest of a group is out.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from fp8scope_protocol.errors import Invalid, UnknownName


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One element format: the largest code, the smallest subnormal, and its unavoidable error."""

    name: str
    largest: float
    smallest_subnormal: float
    smallest_normal: float
    """Of an integer beyond `largest`: between -2^bits and 2^bits codes are `smallest_subnormal` apart."""
    mantissa_bits: int
    sqnr_floor_db: float
    """Of a Gaussian tensor in tiles of 128, rounded to nearest; in E8M0 groups of 32 for `mxfp8`."""
    stored_only: bool = False
    """Read where an optimizer has stored it; not offered as a what-if."""

    @property
    def is_integer(self) -> bool:
        """Whether codes are equally far apart. Such a format has no NaN."""
        return self.smallest_normal > self.largest

    @property
    def distortion_floor(self) -> float:
        """1 - cosine that corresponds to `sqnr_floor_db`."""
        return distortion_of(self.sqnr_floor_db)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Which elements of a matrix share a scale: groups of `rows` x `columns`, None for all there are."""

    name: str
    rows: int | None = 1
    columns: int | None = None
    flat: bool = False
    """Groups of `columns` follow one another through the flattened tensor and cross its rows."""
    e8m0: Literal["", "floor", "rceil"] = ""
    """How a scale of E8M0 comes from an amax; "" for scales in fp32."""


E4M3 = Format(name="e4m3", largest=448.0, smallest_subnormal=2.0**-9, smallest_normal=2.0**-6,
              mantissa_bits=3, sqnr_floor_db=31.8)
E5M2 = Format(name="e5m2", largest=57344.0, smallest_subnormal=2.0**-16, smallest_normal=2.0**-14,
              mantissa_bits=2, sqnr_floor_db=25.7)
INT8 = Format(name="int8", largest=127.0, smallest_subnormal=1.0, smallest_normal=2.0**7,
              mantissa_bits=7, sqnr_floor_db=43.8)
INT4 = Format(name="int4", largest=7.0, smallest_subnormal=1.0, smallest_normal=2.0**3,
              mantissa_bits=3, sqnr_floor_db=18.6)
MXFP8 = Format(name="mxfp8", largest=448.0, smallest_subnormal=2.0**-9, smallest_normal=2.0**-6,
               mantissa_bits=3, sqnr_floor_db=31.5)
BF16 = Format(name="bf16", largest=3.3895313892515355e38, smallest_subnormal=2.0**-133,
              smallest_normal=2.0**-126, mantissa_bits=7, sqnr_floor_db=55.9)

DYNAMIC8 = Format(name="dynamic8", largest=1.0, smallest_subnormal=5.5e-7, smallest_normal=5.5e-7,
                  mantissa_bits=6, sqnr_floor_db=39.8, stored_only=True)
"""The dynamic map of 8-bit optimizers (arXiv 2110.02861): seven decades, more steps in the higher ones."""
DYNAMIC4 = Format(name="dynamic4", largest=1.0, smallest_subnormal=5.5e-3, smallest_normal=5.5e-3,
                  mantissa_bits=2, sqnr_floor_db=16.6, stored_only=True)
"""The dynamic map of 4-bit optimizers (arXiv 2309.01507), for the first moment."""
LINEAR4 = Format(name="linear4", largest=1.0, smallest_subnormal=2.0**-4, smallest_normal=2.0**-4,
                 mantissa_bits=3, sqnr_floor_db=24.2, stored_only=True)
"""Sixteen even steps without zero, for the second; the floor is that of a Gaussian's magnitude."""

UINT8 = Format(name="uint8", largest=255.0, smallest_subnormal=1.0, smallest_normal=2.0**8,
               mantissa_bits=8, sqnr_floor_db=49.8, stored_only=True)
UINT4 = Format(name="uint4", largest=15.0, smallest_subnormal=1.0, smallest_normal=2.0**4,
               mantissa_bits=4, sqnr_floor_db=25.2, stored_only=True)
"""What has no sign, the root of a second moment, in all codes from 0 up."""
INT16 = Format(name="int16", largest=32767.0, smallest_subnormal=1.0, smallest_normal=2.0**15,
               mantissa_bits=15, sqnr_floor_db=92.0, stored_only=True)

FORMATS: dict[str, Format] = {f.name: f for f in (
    E4M3, E5M2, INT8, INT4, MXFP8, BF16, DYNAMIC8, DYNAMIC4, LINEAR4, UINT8, UINT4, INT16)}

TILE = 128
"""Edge of tiles and blocks, in elements."""

MX_GROUP = 32
"""Elements that share a scale of E8M0."""

SMALLEST_FLAT, LARGEST_FLAT = 32, 4096
"""Range of n in `flat n`."""

SCALINGS: dict[str, Scaling] = {one.name: one for one in (
    Scaling(name="tensorwise", rows=None),
    Scaling(name="rowwise"),
    Scaling(name="tile 1x128", columns=TILE),
    Scaling(name="block 128x128", rows=TILE, columns=TILE),
    Scaling(name="mx 1x32 floor", columns=MX_GROUP, e8m0="floor"),
    Scaling(name="mx 1x32 rceil", columns=MX_GROUP, e8m0="rceil"),
    Scaling(name="none", rows=None),
)}
"""Every scaling by name, but for `flat n`. `none` is a plain cast: the scale is 1."""

SCALE_POLICIES = ("current", "delayed")
"""`current` takes the scale from the tensor itself; `delayed` from a history of earlier amaxes."""

SMALLEST_SCALE = 2.0**-126
"""Floor of a scale. A floor on *amax* of 1e-4, as some codebases use, hurts once gradients are near 1e-8."""

SMALLEST_E8M0 = 2.0**-127
"""Floor of an E8M0 scale. The other end, 2^127, is out of reach: the largest float gives 2^120."""

_MX_FLOOR_LOSS_DB = 0.9  # of saturated maxima
_STOCHASTIC_LOSS_DB = 10.0 * math.log10(2.0)  # E f(1 - f) = 1/6 of a squared step, against 1/12
_TYPICAL_ROW = 4096  # elements
_TYPICAL_TENSOR = 2**22


def parse_format(name: str) -> Format:
    """The format called `name`, or `UnknownName` naming near misses."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnknownName("format", name, FORMATS) from None


def parse_scaling(name: str) -> Scaling:
    """The scaling called `name`; `UnknownName` naming near misses, `Invalid` for a `flat n` out of range."""
    if name in SCALINGS:
        return SCALINGS[name]
    flat = re.fullmatch(r"flat ([0-9]{1,9})", name)
    if flat is None:
        raise UnknownName("scaling", name, [*SCALINGS, f"flat {2 * TILE}"])
    n = int(flat[1])
    if not SMALLEST_FLAT <= n <= LARGEST_FLAT or str(n) != flat[1]:
        raise Invalid("scaling", name, f"flat n needs n from {SMALLEST_FLAT} to {LARGEST_FLAT}")
    return Scaling(name=name, columns=n, flat=True)


def is_scaling(name: str) -> bool:
    """Whether `parse_scaling` knows `name`."""
    try:
        parse_scaling(name)
    except Invalid:
        return False
    return True


def check_pair(element: Format, scaling: Scaling) -> None:
    """`Invalid` where `element` cannot be scaled so."""
    pair = f"{element.name}/{scaling.name}"
    if (element is MXFP8) != bool(scaling.e8m0):
        raise Invalid("scaling", pair, "mx 1x32 floor and mx 1x32 rceil go with mxfp8, and mxfp8 with them")
    if element is BF16 and scaling.name != "none":
        raise Invalid("scaling", pair, "bf16 is not scaled; it goes with none")
    if element.is_integer and scaling.name == "none":
        raise Invalid("scaling", pair, "an integer format needs scales")


def sqnr_floor_db(element: Format, scaling: Scaling, rounding: str = "nearest") -> float:
    """SQNR of a well-scaled Gaussian tensor, dB: what `element` cannot do better than.

    Floats: measured (`benchmarks/format_floors.py`), the same for all groups within 0.6 dB. Integers: errors
    are uniform, but for the largest of a group, which is exact: 12 largest^2 / E[amax^2] n / (n - 1), where
    amax is the largest of n unit Gaussians. A row is taken as 4096 elements and a tensor as 4 Mi.
    """
    if element.is_integer:
        n = _group_size(scaling)
        floor = 10.0 * math.log10(12.0 * element.largest**2 / _gaussian_amax_square(n) * n / (n - 1))
    else:
        floor = element.sqnr_floor_db - (_MX_FLOOR_LOSS_DB if scaling.e8m0 == "floor" else 0.0)
    return floor - (_STOCHASTIC_LOSS_DB if rounding == "stochastic" else 0.0)


def distortion_of(sqnr_db: float) -> float:
    """1 - cosine at `sqnr_db`, for an error uncorrelated with the code."""
    return 0.5 * float(10.0 ** (-sqnr_db / 10.0))


def _group_size(scaling: Scaling) -> int:
    if scaling.rows is None:
        return _TYPICAL_TENSOR
    return scaling.rows * (scaling.columns or _TYPICAL_ROW)


@cache
def _gaussian_amax_square(n: int) -> float:
    """E[amax^2] of n unit Gaussians: the integral of 2 m P(amax > m)."""
    step = 0.01
    middles = (step * (i + 0.5) for i in range(1000))
    return sum(2.0 * m * (1.0 - math.erf(m / math.sqrt(2.0)) ** n) * step for m in middles)
