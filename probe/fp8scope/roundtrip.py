"""What quantization does to one tensor, as sums that merge: the readable reference and the CPU path.

The maths. y = x / s is rounded to a code q (quantize.py decides s and q); d = q s; e = x - d. One call adds
to one row of `sums.SumTables`: counts of elements by fate, sums of powers of x and e, extremes of x and s.
Everything else (cosine, SQNR, ratios) is derived from merged rows, by `sums.derive`.

Ranges. Sums of x^2 in fp32 are 0 at 1e-30 and Inf at 1e22, so tiles are summed on u = y / p, where p is the
power of two with |u| < 1 at the tile's largest element: exact to divide by, and s p carries the magnitude.
The [R, ceil(C / 128)] tile sums are multiplied by (s p)^2 in float64 and added there. Counts are int64
(fp32 sticks at 2^24). A value below 1e-38 of its tile's largest vanishes in x^2, as it does in any sum.

Layout. x is [R, C], any strides, any floating dtype; it is read as fp32. Tiles run along a row and never
cross into the next, short ones are padded with zeros that enter no count. Columnwise: pass x.t().

NaN and Inf. Finite elements of a tile with NaN or Inf count in the moments of x; its codes are NaN, so it is
left out of everything about codes and counts as a bad block. See `sums`.

The device is never waited for: no .item(), no boolean-mask indexing, no shape that depends on values. Rows
are worked through in slices, so that temporaries stay small (`tensorwise`: all at once).

Rejected: float64 throughout (4x the memory traffic for the same seven digits); one scale-free pass on x
(needs a range reduction per tile anyway); keeping sum d^2 as well (follows from the three that are kept).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8scope.quantize import Quantized, decode, quantize_blocks, quantize_tensor, quantize_tiles
from fp8scope.sums import COUNT_COLUMNS, MAX_COLUMNS, SUM_COLUMNS, RowSums
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import TILE, Format, check_scaling
from fp8scope_protocol.metrics import HISTOGRAM_BINS, HISTOGRAM_FIRST_EXPONENT

CPU_SLICE, GPU_SLICE = 2**17, 2**24
"""Elements per slice: temporaries that stay in a core's cache; launches that fill a GPU."""

SATURATION_SLACK = 1.0 + 2.0**-20
"""|y| counts as saturated beyond largest x this: under current scaling the largest |y| is `largest` itself,
up to rounding."""

BAD_BLOCK_FACTOR = 4.0
"""A block is bad when sum e^2 / sum x^2 exceeds the format's floor by this factor."""


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

    This signature is shared with the Triton twin in `roundtrip_kernel`; `backend.round_trip` chooses.

    x: floating, on any device; `out` lives on the same one. Empty tensors count as one call, 0 elements.
    scaling: `tile 1x128`, `block 128x128`, `tensorwise` or `none` (a plain cast; scale 1).
    scales: the fp32 scales that were really used, as in `quantize.Quantized`; None takes current ones.
        Only with given scales is staleness measured.
    codes: [R, C], the codes that were really produced (stochastic rounding); None takes the nearest ones.
    rounding: `stochastic` counts underflow as 0 < |y| < half the smallest subnormal, since a code of 0 is
        then a matter of luck; `nearest` counts x != 0 with code 0.
    power_of_two: current scales are rounded up to powers of two.
    histogram: False leaves the row's histogram as it is, which saves 25 to 40 % of the kernel's time.
    """
    check_scaling(scaling)
    if x.dim() != 2 or not x.is_floating_point():
        raise Invalid("x", f"{x.dim()}-D {x.dtype}", "must be 2-D and floating; flatten leading dimensions")
    row = RowSums.zeros(x.device) if out is None else out
    row.counts[COUNT_COLUMNS.index("calls")] += 1
    row.counts[COUNT_COLUMNS.index("elements")] += x.numel()
    if x.numel() == 0:
        return row
    if scaling == "none":
        scales = torch.ones((1, 1), device=x.device)
    rows = _rows_at_once(x, scaling)
    for start in range(0, x.shape[0], rows):
        part = x[start:start + rows].float().contiguous()
        used = None if scales is None else _rows_of(scales, scaling, start, rows)
        quantized = _quantize(part, element, scaling, used, power_of_two)
        if codes is not None:
            quantized = quantized._replace(codes=codes[start:start + rows])
        given = scales is not None and scaling != "none"
        cut = _slice_of(part, quantized, given=given)
        _add_slice(row, cut, element, stochastic=rounding == "stochastic", histogram=histogram)
    return row


def channel_outlier_ratio(x: Tensor) -> Tensor:
    """Largest column norm / median column norm of x [R, C] -> float64 []; -inf where that says nothing.

    Columns with NaN or Inf are left out.
    """
    if x.numel() == 0:
        return torch.full((), -math.inf, dtype=torch.float64, device=x.device)
    norms = torch.linalg.vector_norm(x, dim=0, dtype=torch.float64)
    norms = torch.where(torch.isfinite(norms), norms, math.nan)
    median = norms.nanmedian()
    return torch.where(median > 0, norms.nan_to_num(-math.inf).amax() / median, -math.inf)


def _quantize(
    x: Tensor, element: Format, scaling: str, scales: Tensor | None, power_of_two: bool
) -> Quantized:
    if scaling == "tile 1x128":
        return quantize_tiles(x, element, scales=scales, power_of_two=power_of_two)
    if scaling == "block 128x128":
        return quantize_blocks(x, element, scales=scales, power_of_two=power_of_two)
    return quantize_tensor(x, element, scales=scales, power_of_two=power_of_two)


def _rows_of(scales: Tensor, scaling: str, start: int, rows: int) -> Tensor:
    """The scales of rows start..start + rows. A single scale serves every row."""
    if scales.shape[0] == 1:
        return scales
    if scaling == "block 128x128":
        return scales[start // TILE:-(-(start + rows) // TILE)]
    return scales[start:start + rows]


def _rows_at_once(x: Tensor, scaling: str) -> int:
    if scaling == "tensorwise":
        return x.shape[0]
    rows = max(1, (GPU_SLICE if x.is_cuda else CPU_SLICE) // x.shape[1])
    return -(-rows // TILE) * TILE if scaling == "block 128x128" else rows


class _Slice(NamedTuple):
    """Rows of x and what became of them. [R, T, 128] are elements by tile (padding 0), [R, T] are tiles."""

    tiles: Tensor  # x [R, T, 128]
    values: Tensor  # x with 0 for NaN and Inf [R, T, 128]
    y: Tensor  # values / scale [R, T, 128]
    q: Tensor  # codes; 0 throughout a broken tile [R, T, 128]
    amax: Tensor  # of values [R, T]
    scale: Tensor  # [R, T]
    broken: Tensor  # in a block with NaN or Inf [R, T]
    columns: int
    grid: "_Grid"
    block_scales: Tensor  # as in quantize.Quantized
    given: bool  # scales are not the tensor's own


def _slice_of(x: Tensor, quantized: Quantized, *, given: bool) -> _Slice:
    tiles = _tiled(x)
    values = torch.nan_to_num(tiles, nan=0.0, posinf=0.0, neginf=0.0)
    grid = _Grid(quantized.scaling, x.shape)
    scale = grid.spread(quantized.scales)
    return _Slice(
        tiles=tiles,
        values=values,
        y=values / scale.unsqueeze(-1),
        q=_tiled(decode(quantized.codes).nan_to_num(0.0)),
        amax=values.abs().amax(dim=-1),
        scale=scale,
        broken=grid.spread(grid.gather_any(~torch.isfinite(tiles.abs().amax(dim=-1)))),
        columns=x.shape[1],
        grid=grid,
        block_scales=quantized.scales,
        given=given,
    )


def _add_slice(
    row: RowSums, part: _Slice, element: Format, *, stochastic: bool, histogram: bool
) -> None:
    unit = _power_of_two(part.amax / part.scale) if part.given else torch.ones_like(part.scale)
    u, v = part.y, part.q
    if part.given:  # current scales leave |y| <= largest
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
    counts, maxes = _fates(part, element, stochastic=stochastic)
    block_counts, block_sums, block_maxes = _blocks(part, x2, e2, element)
    row.counts.add_(_packed(COUNT_COLUMNS, counts | block_counts, row.counts.new_zeros(())))
    row.sums.add_(_packed(SUM_COLUMNS, sums | block_sums, row.sums.new_zeros(())))
    least = row.maxes.new_full((), -math.inf)
    torch.maximum(row.maxes, _packed(MAX_COLUMNS, maxes | block_maxes, least), out=row.maxes)
    if histogram:
        row.histogram.add_(_exponents(part.y * coded.float().unsqueeze(-1)))


Cells = dict[str, Tensor]


def _fates(part: _Slice, element: Format, *, stochastic: bool) -> tuple[Cells, Cells]:
    """Elements by fate (counts) and extremes (maxes). Padding is zero: it is in no count but those of zeros,
    which are taken by difference. A select or a sum over booleans costs 10 times a product; hence the forms.
    """
    widths = torch.full((part.tiles.shape[1],), TILE, device=part.y.device)
    widths[-1] = part.columns - TILE * (part.tiles.shape[1] - 1)
    n_coded = torch.where(part.broken, 0, widths).sum()
    coded = ~part.broken.unsqueeze(-1)
    magnitude = part.y.abs()
    lost = magnitude < element.smallest_subnormal / 2 if stochastic else part.q == 0
    nan = torch.count_nonzero(part.tiles != part.tiles)
    inf = torch.count_nonzero(part.tiles.abs() == math.inf)
    counts = {
        "nonzero": torch.count_nonzero(part.values),
        "nan": nan,
        "inf": inf,
        "coded": n_coded,
        "zero_codes": n_coded - torch.count_nonzero(part.q),
        "underflow": torch.count_nonzero((part.values != 0) & lost & coded),
    }
    if part.given:  # current scales saturate nothing: s >= amax / largest, up to rounding
        over = magnitude > element.largest * SATURATION_SLACK
        counts["saturated"] = torch.count_nonzero(over & coded)
    some = nan + inf < part.tiles.shape[0] * part.columns
    maxes = {
        "amax": torch.where(some, part.amax.amax(), -math.inf).double(),
        "neg_amin_nonzero": -_smallest_nonzero(part.values).double(),
    }
    return counts, maxes


def _blocks(part: _Slice, x2: Tensor, e2: Tensor, element: Format) -> tuple[Cells, Cells, Cells]:
    """Scales and errors of blocks. x2, e2: [R, T] as summed over tiles."""
    grid = part.grid
    amax, broken = grid.gather_max(part.amax), grid.gather_any(part.broken)
    scales = part.block_scales.expand_as(amax).double()
    scaled = (amax > 0) & ~broken
    floor = BAD_BLOCK_FACTOR * 10.0 ** (-element.sqnr_floor_db / 10.0)
    bits = torch.where(scaled, torch.log2(scales), 0.0)
    counts = {
        "blocks": amax.new_full((), amax.numel(), dtype=torch.int64),
        "zero_blocks": torch.count_nonzero((amax == 0) & ~broken),
        "scaled_blocks": torch.count_nonzero(scaled),
        "bad_blocks": torch.count_nonzero(broken | (grid.gather_sum(e2) > floor * grid.gather_sum(x2))),
    }
    maxes = {
        "neg_scale_min": torch.where(scaled, -scales, -math.inf).amax(),
        "scale_max": torch.where(scaled, scales, -math.inf).amax(),
    }
    if part.given:
        stale = torch.log2(amax.double()) - bits - math.log2(element.largest)
        maxes["staleness_bits"] = torch.where(scaled, stale, -math.inf).amax()
    return counts, {"scale_log2": bits.sum(), "scale_log2_sq": bits.square().sum()}, maxes


class _Grid:
    """How the tiles [R, T] of a matrix are grouped into blocks that share a scale, and back."""

    def __init__(self, scaling: str, shape: torch.Size) -> None:
        self.rows = shape[0]
        self.shape = (shape[0], -(-shape[1] // TILE))
        self.scaling = scaling

    def spread(self, blocks: Tensor) -> Tensor:
        """The value of each tile's block, [R, T]."""
        if self.scaling == "block 128x128" and blocks.shape[0] > 1:
            blocks = blocks.repeat_interleave(TILE, dim=0)[:self.rows]
        return blocks.expand(self.shape)

    def gather_sum(self, tiles: Tensor) -> Tensor:
        return self._grouped(tiles).sum(dim=1)

    def gather_max(self, tiles: Tensor) -> Tensor:
        return self._grouped(tiles).amax(dim=1)

    def gather_any(self, tiles: Tensor) -> Tensor:
        return self._grouped(tiles).any(dim=1)

    def _grouped(self, tiles: Tensor) -> Tensor:
        """[block rows, tiles in a block, block columns]; zeros fill the last block."""
        if self.scaling == "tile 1x128":
            return tiles.unsqueeze(1)
        if self.scaling == "block 128x128":
            return pad(tiles, (0, 0, 0, -self.rows % TILE)).view(-1, TILE, self.shape[1])
        return tiles.reshape(1, -1, 1)


def _tiled(x: Tensor) -> Tensor:
    """x [R, C] as [R, ceil(C / 128), 128], short tiles filled with zeros."""
    return pad(x, (0, -x.shape[1] % TILE)).view(x.shape[0], -1, TILE)


def _power_of_two(x: Tensor) -> Tensor:
    """The power of two next above |x|, 1 for 0: x over it is below 1, exactly."""
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent.clamp(-125, 127))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Tile sums of a b, [R, T], in fp32, widened for what follows."""
    dots: Tensor = torch.linalg.vecdot(a, b)
    return dots.double()


def _smallest_nonzero(x: Tensor) -> Tensor:
    """Smallest nonzero |x|, inf if there is none. Bits order like the floats; those of 0 wrap to the top."""
    bits = ((x.view(torch.int32) & 0x7FFFFFFF) - 1 & 0x7FFFFFFF).amin()
    return torch.where(bits == 0x7FFFFFFF, math.inf, (bits + 1).view(torch.float32))


def _exponents(y: Tensor) -> Tensor:
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


def _packed(columns: tuple[str, ...], cells: Cells, absent: Tensor) -> Tensor:
    """One value per column, [len(columns)]; `absent` where `cells` has none."""
    return torch.stack([cells.get(name, absent) for name in columns])
