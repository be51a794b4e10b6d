"""What quantization does to one tensor, as sums that merge: the readable reference and the CPU path.

The maths. y = x / s is rounded to a code q (quantize.py decides s and q); d = q s; e = x - d. One call adds
to one row of `sums.SumTables`: counts of elements by fate, sums of powers of x and e, extremes of x and s.
Everything else (cosine, SQNR, ratios) is derived from merged rows, by `sums.derive`.

Ranges. Sums of x^2 in fp32 are 0 at 1e-30 and Inf at 1e22, so pieces (grouping.py: up to 128 elements that
share a scale) are summed on u = y / p, where p is the power of two with |u| < 1 at the piece's largest
element: exact to divide by, and s p carries the magnitude. The sums, [R, T], are multiplied by (s p)^2 in
float64 and added there. Counts are int64 (fp32 sticks at 2^24). A value below 1e-38 of its piece's largest
vanishes in x^2, as it does in any sum.

Layout. x is [R, C], any strides, any floating dtype; it is read as fp32. Tiles run along a row and never
cross into the next, short ones are padded with zeros that enter no count. Columnwise: pass x.t(). `flat n`
reads x as its contiguous copy lies in memory.

NaN and Inf. Finite elements of a group with NaN or Inf count in the moments of x; its codes are NaN, so it is
left out of everything about codes and counts as a bad block. See `sums`. So does a group whose given scale is
NaN, Inf or negative. A given scale of 0, which some quantizers store for groups of zeros, makes d = 0.

The device is never waited for: no .item(), no boolean-mask indexing, no shape that depends on values. Rows
are worked through in slices, so that temporaries stay small (`tensorwise`: all at once).

Rejected: float64 throughout (4x the memory traffic for the same seven digits); one scale-free pass on x
(needs a range reduction per piece anyway); keeping sum d^2 as well (follows from the three that are kept).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope.grouping import Grouping, as_rows
from fp8scope.quantize import decode, quantize, split_scales
from fp8scope.sums import COUNT_COLUMNS, MAX_COLUMNS, SUM_COLUMNS, RowSums
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import Format, Scaling, check_pair, parse_scaling, sqnr_floor_db
from fp8scope_protocol.metrics import HISTOGRAM_BINS, HISTOGRAM_FIRST_EXPONENT

CPU_SLICE, GPU_SLICE = 2**17, 2**24
"""Elements per slice: temporaries that stay in a core's cache; launches that fill a GPU."""

SATURATION_SLACK = 1.0 + 2.0**-20
"""|y| counts as saturated beyond largest x this: under current scaling the largest |y| is `largest` itself,
up to rounding."""

BAD_BLOCK_FACTOR = 4.0
"""A block is bad when sum e^2 / sum x^2 exceeds the floor of nearest rounding by this factor."""


def round_trip(
    x: Tensor,
    element: Format,
    scaling: str,
    *,
    scales: Tensor | None = None,
    codes: Tensor | None = None,
    rounding: str = "nearest",
    power_of_two: bool = False,
    histogram: bool = True,
    out: RowSums | None = None,
) -> RowSums:
    """Adds the round trip of x [R, C] to `out` (a fresh row if None), in place, and returns it.

    This signature is shared with the Triton twins; `backend.round_trip` chooses.

    x: floating, on any device; `out` lives on the same one. Empty tensors count as one call, 0 elements.
    scaling: any that `formats.parse_scaling` knows and the format goes with.
    scales: the fp32 scales that were really used, as in `quantize.Quantized` or, [GR], flattened; None takes
        current ones. Only with given scales is staleness measured.
    codes: [R, C], the codes that were really produced (stochastic rounding), as dtype of the format, or as
        any other whose values are q = d / s, such as fp32; None takes the nearest ones.
    rounding: `stochastic` counts underflow as 0 < |y| < half the smallest subnormal, since a code of 0 is
        then a matter of luck; `nearest` counts x != 0 with code 0.
    power_of_two: current scales are rounded up to powers of two.
    histogram: False leaves the row's histogram as it is, which saves 25 to 40 % of the kernel's time.
    """
    groups = parse_scaling(scaling)
    check_pair(element, groups)
    check_input(x)
    row = RowSums.zeros(x.device) if out is None else out
    row.counts[COUNT_COLUMNS.index("calls")] += 1
    row.counts[COUNT_COLUMNS.index("elements")] += x.numel()
    if x.numel() == 0:
        return row
    how = _How(element, groups, scales is not None, rounding == "stochastic", power_of_two, histogram)
    parts = as_rows(x, groups)
    given_codes = [None] * len(parts) if codes is None else as_rows(codes, groups)
    for part, used, q in zip(parts, split_scales(x, groups, scales), given_codes, strict=True):
        at_once = _rows_at_once(part, groups)
        for start in range(0, len(part), at_once):
            cut = _slice_of(
                part[start:start + at_once].float().contiguous(), how,
                None if used is None else _rows_of(used, groups, start, at_once),
                None if q is None else q[start:start + at_once])
            _add_slice(row, cut, how)
    return row


def check_input(x: Tensor) -> None:
    """`Invalid` unless x is a matrix of floats."""
    if x.dim() != 2 or not x.is_floating_point():
        raise Invalid("x", f"{x.dim()}-D {x.dtype}", "must be 2-D and floating; flatten leading dimensions")


def bad_block_error(element: Format, scaling: Scaling) -> float:
    """sum e^2 / sum x^2 beyond which a block is bad."""
    return BAD_BLOCK_FACTOR * float(10.0 ** (-sqnr_floor_db(element, scaling) / 10.0))


def channel_outlier_ratio(x: Tensor) -> Tensor:
    """Largest column norm / median column norm of x [R, C] -> float64 []; -inf where that says nothing.

    Columns with NaN or Inf are left out.
    """
    if x.numel() == 0:
        return torch.full((), -math.inf, dtype=torch.float64, device=x.device)
    wide = torch.float32 if x.is_cuda else torch.float64  # on CUDA float64 would copy x, four times its size
    norms = torch.linalg.vector_norm(x, dim=0, dtype=wide).double()
    norms = torch.where(torch.isfinite(norms), norms, math.nan)
    median = norms.nanmedian()
    return torch.where(median > 0, norms.nan_to_num(-math.inf).amax() / median, -math.inf)


class _How(NamedTuple):
    """What is asked of a call."""

    element: Format
    scaling: Scaling
    given: bool  # scales are not the tensor's own
    stochastic: bool
    power_of_two: bool
    histogram: bool

    @property
    def may_saturate(self) -> bool:
        """Whether |y| may exceed the largest code: other current scales see to it that it does not."""
        return self.given or self.scaling.e8m0 == "floor" or self.scaling.name == "none"


class _Slice(NamedTuple):
    """Rows of x and what became of them. [R, T, W] are elements by piece (padding 0), [R, T] are pieces."""

    x: Tensor  # [R, T, W]
    values: Tensor  # x with 0 for NaN and Inf [R, T, W]
    y: Tensor  # values / scale [R, T, W]
    q: Tensor  # codes; 0 throughout a broken group [R, T, W]
    amax: Tensor  # of values [R, T]
    scale: Tensor  # [R, T]; a power of two near amax where broken
    broken: Tensor  # in a group that was not encoded [R, T]
    columns: int
    groups: Grouping
    group_scales: Tensor  # as in quantize.Quantized


def _rows_of(scales: Tensor, scaling: Scaling, start: int, rows: int) -> Tensor:
    """The scales of rows start..start + rows. A single scale serves every row."""
    if scales.shape[0] == 1 or scaling.rows is None:
        return scales
    return scales[start // scaling.rows:-(-(start + rows) // scaling.rows)]


def _rows_at_once(x: Tensor, scaling: Scaling) -> int:
    if scaling.rows is None:
        return x.shape[0]
    rows = max(1, (GPU_SLICE if x.is_cuda else CPU_SLICE) // x.shape[1])
    return -(-rows // scaling.rows) * scaling.rows


def _slice_of(x: Tensor, how: _How, scales: Tensor | None, codes: Tensor | None) -> _Slice:
    groups = Grouping(how.scaling, x.shape)
    quantized = quantize(x, how.element, how.scaling.name, scales=scales, power_of_two=how.power_of_two)
    pieces = groups.split(x)
    values = torch.nan_to_num(pieces, nan=0.0, posinf=0.0, neginf=0.0)
    amax = values.abs().amax(dim=-1)
    used = groups.spread(quantized.scales)
    broken = groups.spread(groups.any(~torch.isfinite(pieces.abs().amax(dim=-1))))
    q = groups.split(decode(quantized.codes if codes is None else codes)).nan_to_num(0.0)
    if how.given or codes is not None:
        broken = broken | ~((used >= 0) & (used < math.inf))
        q = q * ((used > 0) & ~broken).float().unsqueeze(-1)
    scale = torch.where(broken, _power_of_two(amax), torch.where(used == 0, 1.0, used))
    return _Slice(
        x=pieces, values=values, y=values / scale.unsqueeze(-1), q=q, amax=amax, scale=scale, broken=broken,
        columns=x.shape[1], groups=groups, group_scales=quantized.scales,
    )


def _add_slice(row: RowSums, part: _Slice, how: _How) -> None:
    unit = _power_of_two(part.amax / part.scale) if how.may_saturate else torch.ones_like(part.scale)
    u, v = part.y, part.q
    if how.may_saturate:  # else |y| <= largest
        u, v = u / unit.unsqueeze(-1), v / unit.unsqueeze(-1)
    e, square = u - v, u.square()
    weight = (part.scale.double() * unit.double()).square()
    coded = (~part.broken).double()
    x2, e2 = _dot(u, u) * weight, _dot(e, e) * weight * coded
    sums = {
        "x2": x2.sum(),
        "abs": (u.abs().sum(dim=-1).double() * weight.sqrt()).sum(),
        "x4": (_dot(square, square) * weight.square()).sum(),
        "coded_x2": (x2 * coded).sum(),
        "e2": e2.sum(),
        "xe": (_dot(u, e) * weight * coded).sum(),
    }
    counts, maxes = _fates(part, how)
    block_counts, block_sums, block_maxes = _blocks(part, x2, e2, how)
    row.counts.add_(packed(COUNT_COLUMNS, counts | block_counts, row.counts.new_zeros(())))
    row.sums.add_(packed(SUM_COLUMNS, sums | block_sums, row.sums.new_zeros(())))
    least = row.maxes.new_full((), -math.inf)
    torch.maximum(row.maxes, packed(MAX_COLUMNS, maxes | block_maxes, least), out=row.maxes)
    if how.histogram:
        row.histogram.add_(exponent_counts(part.y * coded.float().unsqueeze(-1)))


Cells = dict[str, Tensor]


def _fates(part: _Slice, how: _How) -> tuple[Cells, Cells]:
    """Elements by fate (counts) and extremes (maxes). Padding is zero: it is in no count but those of zeros,
    which are taken by difference. A select or a sum over booleans costs 10 times a product; hence the forms.
    """
    element, width = how.element, part.groups.width
    widths = torch.full(part.x.shape[1:2], width, device=part.y.device)
    widths[-1] = part.columns - width * (part.x.shape[1] - 1)
    n_coded = torch.where(part.broken, 0, widths).sum()
    coded = ~part.broken.unsqueeze(-1)
    magnitude = part.y.abs()
    lost = magnitude < element.smallest_subnormal / 2 if how.stochastic else part.q == 0
    nan = torch.count_nonzero(part.x != part.x)
    inf = torch.count_nonzero(part.x.abs() == math.inf)
    counts = {
        "nonzero": torch.count_nonzero(part.values),
        "nan": nan,
        "inf": inf,
        "coded": n_coded,
        "zero_codes": n_coded - torch.count_nonzero(part.q),
        "underflow": torch.count_nonzero((part.values != 0) & lost & coded),
    }
    if how.may_saturate:
        over = magnitude > element.largest * SATURATION_SLACK
        counts["saturated"] = torch.count_nonzero(over & coded)
    some = nan + inf < part.x.shape[0] * part.columns
    maxes = {
        "amax": torch.where(some, part.amax.amax(), -math.inf).double(),
        "neg_amin_nonzero": -_smallest_nonzero(part.values).double(),
    }
    return counts, maxes


def _blocks(part: _Slice, x2: Tensor, e2: Tensor, how: _How) -> tuple[Cells, Cells, Cells]:
    """Scales and errors of groups. x2, e2: [R, T] as summed over pieces."""
    groups = part.groups
    amax, broken = groups.amax(part.amax), groups.any(part.broken)
    scales = part.group_scales.double()
    scaled = (amax > 0) & ~broken & (scales > 0)
    bits = torch.where(scaled, torch.log2(scales), 0.0)
    bad = groups.sum(e2) > bad_block_error(how.element, how.scaling) * groups.sum(x2)
    counts = {
        "blocks": amax.new_full((), amax.numel(), dtype=torch.int64),
        "zero_blocks": torch.count_nonzero((amax == 0) & ~broken),
        "scaled_blocks": torch.count_nonzero(scaled),
        "bad_blocks": torch.count_nonzero(broken | bad),
    }
    maxes = {
        "neg_scale_min": torch.where(scaled, -scales, -math.inf).amax(),
        "scale_max": torch.where(scaled, scales, -math.inf).amax(),
    }
    if how.given:
        stale = torch.log2(amax.double()) - bits - math.log2(how.element.largest)
        maxes["staleness_bits"] = torch.where(scaled, stale, -math.inf).amax()
    return counts, {"scale_log2": bits.sum(), "scale_log2_sq": bits.square().sum()}, maxes


def _power_of_two(x: Tensor) -> Tensor:
    """The power of two next above |x|, 1 for 0: x over it is below 1, exactly."""
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent.clamp(-125, 127))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sums of a b over pieces, [R, T], in fp32, widened for what follows."""
    dots: Tensor = torch.linalg.vecdot(a, b)
    return dots.double()


def _smallest_nonzero(x: Tensor) -> Tensor:
    """Smallest nonzero |x|, inf if there is none. Bits order like the floats; those of 0 wrap to the top."""
    bits = ((x.view(torch.int32) & 0x7FFFFFFF) - 1 & 0x7FFFFFFF).amin()
    return torch.where(bits == 0x7FFFFFFF, math.inf, (bits + 1).view(torch.float32))


def exponent_counts(y: Tensor) -> Tensor:
    """Counts of floor(log2 |y|) over nonzero y, int64 [40], both ends open."""
    exponents = (y.view(torch.int32) >> 23 & 0xFF).flatten()  # biased by 127; 0 for zeros and subnormals
    if y.is_cuda:  # bincount would wait for the device
        wide = torch.zeros(256, dtype=torch.int64, device=y.device)
        wide.scatter_add_(0, exponents.long(), torch.ones_like(exponents, dtype=torch.int64))
    else:
        wide = torch.bincount(exponents, minlength=256)
    wide[0] -= (y == 0).sum()
    first = HISTOGRAM_FIRST_EXPONENT + 127
    counts = wide[first:first + HISTOGRAM_BINS].clone()
    counts[0] += wide[:first].sum()
    counts[-1] += wide[first + HISTOGRAM_BINS:].sum()
    return counts


def packed(columns: tuple[str, ...], cells: Cells, absent: Tensor) -> Tensor:
    """One value per column, [len(columns)]; `absent` where `cells` has none."""
    return torch.stack([cells.get(name, absent) for name in columns])
