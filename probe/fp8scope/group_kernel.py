"""Triton twin of `roundtrip.round_trip` for every format and scaling that `roundtrip_kernel` does not know.

Plain rather than quick: three passes, of which two read x.

    _amax_kernel      the bits of the largest |x| of every group, by atomic maxima of integers
    _pieces_kernel    elements by fate and sums over pieces (see grouping.py), [ROWS, W] of x a program
    _groups_kernel    sums over the pieces of each group: bad blocks and the spread of scales

An atomic maximum gives the same in any order, and all sums are partial results that are added up in fixed
order (`partials_kernel`), so the same input gives the same bits. Where the rows of a program share a group
(FOLD: blocks, the whole tensor) their pieces are handed on as one.

Codes come from arithmetic (`code_kernel`), so that all formats share one kernel. A flat scaling is a matrix
of n columns, of which the last row ends where the tensor does. A program of either of the last two passes
fills a column of the partial results; what it does not know is neutral there.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.code_kernel import RULES, group_scale, round_to_code
from fp8scope.grouping import Grouping
from fp8scope.partials_kernel import BINS, COUNTS, NOT_MEASURED, Partials
from fp8scope.quantize_kernel import INFINITY, magnitude_bits
from fp8scope.roundtrip import SATURATION_SLACK, bad_block_error, check_input
from fp8scope.slab_kernel import reciprocal, staleness, unit_of
from fp8scope.sums import MAX_COLUMNS, SUM_COLUMNS, RowSums
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import Format, Scaling, check_pair, parse_scaling
from fp8scope_protocol.metrics import HISTOGRAM_FIRST_EXPONENT

_FIRST_EXPONENT = tl.constexpr(HISTOGRAM_FIRST_EXPONENT)
_SLACK = tl.constexpr(SATURATION_SLACK)
_SUMS = tl.constexpr(SUM_COLUMNS.index("scale_log2_sq") + 1)
_MAXES = tl.constexpr(MAX_COLUMNS.index("channel_outlier"))
_ELEMENT_COUNTS = tl.constexpr(7)  # of the counts; the others are of groups
_ELEMENT_SUMS = tl.constexpr(6)

_PROGRAM = 4096  # elements of x a program
_PIECES = 1024  # that a program of the last pass reads at a time, all of one group
_FEW = 64  # pieces of a group that one thread adds up by itself
_GROUPS = 128  # a program then

@triton.jit
def load_pieces(ptr: tl.tensor, first: tl.tensor, t: tl.tensor, R: tl.tensor, C: tl.tensor, N: tl.tensor,
                stride_r: tl.tensor, stride_c: tl.tensor, FLAT: tl.constexpr, ROWS: tl.constexpr,
                W: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Column t of pieces from row `first` on, [ROWS, W], zeros outside; their rows; their elements."""
    rows = first + tl.arange(0, ROWS)
    columns = t * W + tl.arange(0, W)
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    width = tl.where(rows < R, tl.minimum(C - t * W, W), 0)
    if FLAT:
        inside = inside & (rows[:, None] * C + columns[None, :] < N)
        width = tl.minimum(tl.maximum(N - rows * C - t * W, 0), width)
    x = tl.load(ptr + rows[:, None] * stride_r + columns[None, :] * stride_c, mask=inside, other=0)
    return x, rows, width.to(tl.int32)


@triton.jit(do_not_specialize=["high", "wide"])
def _amax_kernel(x_ptr: tl.tensor, bits_ptr: tl.tensor, flag_ptr: tl.tensor, R: tl.tensor, C: tl.tensor,
                 N: tl.tensor, stride_r: tl.tensor, stride_c: tl.tensor, high: tl.tensor, wide: tl.tensor,
                 FLAT: tl.constexpr, FOLD: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr,
                 FLAGGED: tl.constexpr) -> None:
    if FLAGGED:
        flag = tl.load(flag_ptr)
        if flag == 0:
            return
    pieces = tl.cdiv(C, W)
    t = (tl.program_id(0) % pieces).to(tl.int64)
    first = (tl.program_id(0) // pieces).to(tl.int64) * ROWS
    x, rows, _ = load_pieces(x_ptr, first, t, R, C, N, stride_r, stride_c, FLAT, ROWS, W)
    bits = tl.max(magnitude_bits(x.to(tl.float32)), axis=1)
    bits_ptr += t // wide
    if FOLD:
        tl.atomic_max(bits_ptr + first // high * tl.cdiv(pieces, wide), tl.max(bits, axis=0))
    else:
        tl.atomic_max(bits_ptr + rows // high * tl.cdiv(pieces, wide), bits, mask=rows < R)


@triton.jit(do_not_specialize=["slots", "high", "wide", "scale_r", "scale_c"])
def _pieces_kernel(x_ptr: tl.tensor, bits_ptr: tl.tensor, scales_ptr: tl.tensor, codes_ptr: tl.tensor,
                   ints_ptr: tl.tensor, reals_ptr: tl.tensor, squares_ptr: tl.tensor, flag_ptr: tl.tensor,
                   slots: tl.tensor, R: tl.tensor, C: tl.tensor, N: tl.tensor, stride_r: tl.tensor,
                   stride_c: tl.tensor, scale_r: tl.tensor, scale_c: tl.tensor, code_r: tl.tensor,
                   code_c: tl.tensor, high: tl.tensor, wide: tl.tensor,
                   LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, MANTISSA: tl.constexpr,
                   NORMAL: tl.constexpr, RULE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                   GIVEN: tl.constexpr, CODED: tl.constexpr, STOCHASTIC: tl.constexpr,
                   HISTOGRAM: tl.constexpr, FLAT: tl.constexpr, FOLD: tl.constexpr, ROWS: tl.constexpr,
                   W: tl.constexpr, FLAGGED: tl.constexpr) -> None:
    if FLAGGED:
        flag = tl.load(flag_ptr)
        if flag == 0:
            return
    LOOSE: tl.constexpr = GIVEN or RULE == 1  # |y| may exceed the largest code
    pieces = tl.cdiv(C, W)
    t = (tl.program_id(0) % pieces).to(tl.int64)
    first = (tl.program_id(0) // pieces).to(tl.int64) * ROWS
    x, rows, width = load_pieces(x_ptr, first, t, R, C, N, stride_r, stride_c, FLAT, ROWS, W)
    x = x.to(tl.float32)
    group = rows // high
    group_bits = tl.load(bits_ptr + group * tl.cdiv(pieces, wide) + t // wide, mask=rows < R, other=0)
    whole = group_bits < INFINITY
    if GIVEN:
        scale = tl.load(scales_ptr + group * scale_r + t // wide * scale_c, mask=rows < R, other=1.0)
        whole = whole & (scale >= 0.0) & (scale < float("inf"))
    else:
        scale = group_scale(group_bits, LARGEST, RULE, POWER_OF_TWO)
    live = whole & (scale > 0.0)
    bits = magnitude_bits(x)
    n_nan = tl.sum((bits > INFINITY).to(tl.int32), axis=1)
    n_inf = tl.sum((bits == INFINITY).to(tl.int32), axis=1)
    x = tl.where(bits < INFINITY, x, 0.0)
    bits = tl.where(bits < INFINITY, bits, 0)
    amax = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    scale = tl.where(live, scale, tl.where(whole, 1.0, unit_of(amax)))

    y = tl.div_rn(x, scale[:, None])
    if CODED:
        q, _, _ = load_pieces(codes_ptr, first, t, R, C, N, code_r, code_c, FLAT, ROWS, W)
        q = q.to(tl.float32)
        q = tl.where(q == q, q, 0.0)
    else:
        q = round_to_code(y, LARGEST, MANTISSA, NORMAL)
    q = tl.where(live[:, None], q, 0.0)
    magnitude, encoded = tl.abs(y), whole[:, None]
    lost = magnitude < SUBNORMAL / 2 if STOCHASTIC else q == 0.0
    lost = lost & (x != 0.0) & encoded
    coded = tl.where(whole, width, 0)
    codes = tl.sum((q != 0.0).to(tl.int32), axis=1)
    over = tl.sum(((magnitude > LARGEST * _SLACK) & encoded).to(tl.int32), axis=1) if LOOSE else n_nan * 0
    least = tl.min(tl.min((bits - 1).to(tl.uint32, bitcast=True), axis=1), axis=0)

    unit = tl.full([ROWS], 1.0, tl.float32)
    u = y
    if LOOSE:
        unit = unit_of(tl.div_rn(amax, scale))
        u, q = y * reciprocal(unit)[:, None], q * reciprocal(unit)[:, None]
    e, u2 = u - q, u * u
    weight = scale.to(tl.float64) * unit.to(tl.float64)
    square = weight * weight
    x2 = tl.sum(u2, axis=1).to(tl.float64) * square
    e2 = tl.where(whole, tl.sum(e * e, axis=1).to(tl.float64) * square, 0.0)
    xe = tl.where(whole, tl.sum(u * e, axis=1).to(tl.float64) * square, 0.0)
    x1 = tl.sum(tl.abs(u), axis=1).to(tl.float64) * weight
    x4 = tl.sum(u2 * u2, axis=1).to(tl.float64) * (square * square)

    if FOLD:
        tl.store(squares_ptr + first // ROWS * pieces + t, tl.sum(x2, axis=0))
        tl.store(squares_ptr + (first // ROWS + tl.cdiv(R, ROWS)) * pieces + t, tl.sum(e2, axis=0))
    else:
        tl.store(squares_ptr + rows * pieces + t, x2, mask=rows < R)
        tl.store(squares_ptr + (rows + R) * pieces + t, e2, mask=rows < R)
    slot = tl.program_id(0).to(tl.int64)
    slots = slots.to(tl.int64)
    ints_ptr += slot
    tl.store(ints_ptr, tl.sum(tl.sum((bits > 0).to(tl.int32), axis=1), axis=0))
    tl.store(ints_ptr + slots, tl.sum(n_nan, axis=0))
    tl.store(ints_ptr + slots * 2, tl.sum(n_inf, axis=0))
    tl.store(ints_ptr + slots * 3, tl.sum(coded, axis=0))
    tl.store(ints_ptr + slots * 4, tl.sum(coded - codes, axis=0))
    tl.store(ints_ptr + slots * 5, tl.sum(tl.sum(lost.to(tl.int32), axis=1), axis=0))
    tl.store(ints_ptr + slots * 6, tl.sum(over, axis=0))
    for k in tl.static_range(_ELEMENT_COUNTS, COUNTS):
        tl.store(ints_ptr + slots * k, 0)
    if HISTOGRAM:
        bin = tl.minimum(tl.maximum((magnitude_bits(y) >> 23) - 127 - _FIRST_EXPONENT, 0), BINS - 1)
        bin = tl.where((magnitude > 0.0) & encoded, bin, 63)  # the last of 64 is not kept
        column = tl.arange(0, 64)
        bins = tl.histogram(tl.ravel(bin, can_reorder=True), 64)
        tl.store(ints_ptr + slots * (COUNTS + column), bins, mask=column < BINS)
    reals_ptr += slot
    tl.store(reals_ptr, tl.sum(x2, axis=0))
    tl.store(reals_ptr + slots, tl.sum(x1, axis=0))
    tl.store(reals_ptr + slots * 2, tl.sum(x4, axis=0))
    tl.store(reals_ptr + slots * 3, tl.sum(tl.where(whole, x2, 0.0), axis=0))
    tl.store(reals_ptr + slots * 4, tl.sum(e2, axis=0))
    tl.store(reals_ptr + slots * 5, tl.sum(xe, axis=0))
    for k in tl.static_range(_ELEMENT_SUMS, _SUMS):
        tl.store(reals_ptr + slots * k, 0.0)
    some = tl.sum(width - n_nan - n_inf, axis=0) > 0
    least = tl.where(least < INFINITY, least + 1, INFINITY).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(reals_ptr + slots * _SUMS, tl.where(some, tl.max(amax, axis=0), NOT_MEASURED))
    tl.store(reals_ptr + slots * (_SUMS + 1), -least)
    for k in tl.static_range(_SUMS + 2, _SUMS + _MAXES):
        tl.store(reals_ptr + slots * k, NOT_MEASURED)


@triton.jit(do_not_specialize=["slots", "before", "R", "T", "groups", "scale_r", "scale_c", "high", "wide"])
def _groups_kernel(bits_ptr: tl.tensor, scales_ptr: tl.tensor, squares_ptr: tl.tensor, ints_ptr: tl.tensor,
                   reals_ptr: tl.tensor, flag_ptr: tl.tensor, slots: tl.tensor, before: tl.tensor,
                   R: tl.tensor, T: tl.tensor, groups: tl.tensor, scale_r: tl.tensor, scale_c: tl.tensor,
                   high: tl.tensor, wide: tl.tensor,
                   LARGEST: tl.constexpr, BAD: tl.constexpr, RULE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                   GIVEN: tl.constexpr, HISTOGRAM: tl.constexpr, GROUPS: tl.constexpr,
                   PIECES: tl.constexpr, FLAGGED: tl.constexpr) -> None:
    """R x T pieces, of which high x wide are a group."""
    if FLAGGED:
        flag = tl.load(flag_ptr)
        if flag == 0:
            return
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    across = tl.cdiv(T, wide)
    group_r, group_c = g // across, g % across
    x2 = tl.zeros([GROUPS], tl.float64)
    e2 = tl.zeros([GROUPS], tl.float64)
    if GROUPS == 1:
        many_x2, many_e2 = tl.zeros([PIECES], tl.float64), tl.zeros([PIECES], tl.float64)
        top, left = tl.program_id(0).to(tl.int64) // across * high, tl.program_id(0) % across * wide
        for start in range(0, high * wide, PIECES):
            piece = start + tl.arange(0, PIECES)
            at = (top + piece // wide) * T + left + piece % wide
            inside = (piece < high * wide) & (top + piece // wide < R)
            many_x2 += tl.load(squares_ptr + at, mask=inside, other=0.0)
            many_e2 += tl.load(squares_ptr + R.to(tl.int64) * T + at, mask=inside, other=0.0)
        x2 += tl.sum(many_x2, axis=0)
        e2 += tl.sum(many_e2, axis=0)
    else:
        for k in range(0, high * wide):
            r = group_r * high + k // wide
            at = r * T + group_c * wide + k % wide
            inside = (g < groups) & (r < R)
            x2 += tl.load(squares_ptr + at, mask=inside, other=0.0)
            e2 += tl.load(squares_ptr + R.to(tl.int64) * T + at, mask=inside, other=0.0)
    present = g < groups
    bits = tl.load(bits_ptr + g, mask=present, other=0)
    whole = bits < INFINITY
    if GIVEN:
        scale = tl.load(scales_ptr + group_r * scale_r + group_c * scale_c, mask=present, other=1.0)
        whole = whole & (scale >= 0.0) & (scale < float("inf"))
    else:
        scale = group_scale(bits, LARGEST, RULE, POWER_OF_TWO)
    scaled = present & whole & (bits > 0) & (scale > 0.0)
    log2 = tl.where(scaled, tl.log2(tl.where(scaled, scale, 1.0).to(tl.float64)), 0.0)
    bad = present & ((whole == 0) | (e2 > BAD * x2))
    slots = slots.to(tl.int64)
    ints_ptr += before + tl.program_id(0)
    for k in tl.static_range(_ELEMENT_COUNTS):
        tl.store(ints_ptr + slots * k, 0)
    tl.store(ints_ptr + slots * 7, tl.sum(present.to(tl.int32), axis=0))
    tl.store(ints_ptr + slots * 8, tl.sum((present & whole & (bits == 0)).to(tl.int32), axis=0))
    tl.store(ints_ptr + slots * 9, tl.sum(scaled.to(tl.int32), axis=0))
    tl.store(ints_ptr + slots * 10, tl.sum(bad.to(tl.int32), axis=0))
    if HISTOGRAM:
        column = tl.arange(0, 64)
        tl.store(ints_ptr + slots * (COUNTS + column), column * 0, mask=column < BINS)
    reals_ptr += before + tl.program_id(0)
    for k in tl.static_range(_ELEMENT_SUMS):
        tl.store(reals_ptr + slots * k, 0.0)
    tl.store(reals_ptr + slots * 6, tl.sum(log2, axis=0))
    tl.store(reals_ptr + slots * 7, tl.sum(log2 * log2, axis=0))
    reals_ptr += slots * _SUMS
    stale = tl.full([GROUPS], NOT_MEASURED, tl.float64)
    if GIVEN:
        stale = tl.where(scaled, staleness(bits, tl.where(scaled, scale, 1.0), LARGEST), NOT_MEASURED)
    tl.store(reals_ptr, NOT_MEASURED)
    tl.store(reals_ptr + slots, NOT_MEASURED)
    tl.store(reals_ptr + slots * 2, tl.max(tl.where(scaled, -scale, NOT_MEASURED), axis=0))
    tl.store(reals_ptr + slots * 3, tl.max(tl.where(scaled, scale, NOT_MEASURED), axis=0))
    tl.store(reals_ptr + slots * 4, tl.max(stale, axis=0))


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
    flag: Tensor | None = None,
) -> RowSums:
    """Twin of `roundtrip.round_trip` for every format and scaling but BF16 and `none`.

    flag: int32 [1] on the device; if it holds 0 when the kernels run, they add nothing.
    """
    groups = parse_scaling(scaling)
    check_pair(element, groups)
    check_input(x)
    if scaling == "none":
        raise Invalid("scaling", scaling, "the kernel takes what has scales")
    row = RowSums.zeros(x.device) if out is None else out
    source, shape, strides = _matrix(x, groups)
    plan = _Plan(groups, shape)
    slots = plan.slots if x.numel() else (0, 0)
    partials = Partials(x, sum(slots), histogram=histogram)
    if x.numel():
        bits = x.new_zeros(plan.groups.shape, dtype=torch.int32)
        squares = x.new_empty((2, *plan.handed_on), dtype=torch.float64)
        used = bits if scales is None else _table(scales, groups).float().expand(plan.groups.shape)
        given, _, code_strides = _matrix(x if codes is None else _loadable(codes), groups)
        sizes, spans = (*shape, x.numel(), *strides), (plan.groups.high, plan.groups.wide)
        when = bits if flag is None else flag
        tile = {"FLAT": groups.flat, "FOLD": plan.fold, "ROWS": plan.rows, "W": plan.width, "num_warps": 4,
                "FLAGGED": flag is not None}
        how = {"LARGEST": element.largest, "RULE": RULES[groups.e8m0], "POWER_OF_TWO": power_of_two,
               "GIVEN": scales is not None, "HISTOGRAM": histogram, "num_warps": 4,
               "FLAGGED": flag is not None}
        with torch.cuda.device_of(x):
            _amax_kernel[slots[:1]](source, bits, when, *sizes, *spans, **tile)
            _pieces_kernel[slots[:1]](
                source, bits, used, given, partials.ints, partials.reals, squares, when, sum(slots), *sizes,
                *used.stride(), *code_strides, *spans, SUBNORMAL=element.smallest_subnormal,
                MANTISSA=element.mantissa_bits, NORMAL=127 + int(math.log2(element.smallest_normal)),
                CODED=codes is not None, STOCHASTIC=rounding == "stochastic", **how | tile)
            _groups_kernel[slots[1:]](
                bits, used, squares, partials.ints, partials.reals, when, sum(slots), slots[0],
                *plan.handed_on, bits.numel(), *used.stride(), plan.high, plan.groups.wide,
                BAD=bad_block_error(element, groups), GROUPS=plan.at_once, PIECES=_PIECES,
                **how)
    partials.merge_into(row, x, flag)
    return row


class _Plan:
    """How a matrix is cut into programs."""

    def __init__(self, scaling: Scaling, shape: torch.Size) -> None:
        self.groups = groups = Grouping(scaling, shape)
        self.width = triton.next_power_of_2(groups.width)
        self.rows = _PROGRAM // self.width
        self.fold = scaling.rows is None or scaling.rows % self.rows == 0
        steps = triton.cdiv(shape[0], self.rows)
        self.handed_on = (steps if self.fold else shape[0], groups.pieces[1])
        """Rows and columns of what the last pass reads."""
        self.high = triton.cdiv(groups.high, self.rows) if self.fold else groups.high
        """Rows of a group there."""
        self.at_once = _GROUPS if self.high * groups.wide <= _FEW else 1
        """Groups that a program of the last pass looks at."""
        n_groups = groups.shape[0] * groups.shape[1]
        self.slots = (steps * groups.pieces[1], triton.cdiv(n_groups, self.at_once))
        """Programs of the last two passes."""


def _matrix(x: Tensor, groups: Scaling) -> tuple[Tensor, torch.Size, tuple[int, int]]:
    """What holds the elements, and the shape and strides in which rows are those of `Grouping`."""
    if not groups.flat or groups.columns is None:
        return x, x.shape, (x.stride(0), x.stride(1))
    n = groups.columns
    return x.reshape(-1), torch.Size((triton.cdiv(x.numel(), n), n)), (n, 1)


def _loadable(codes: Tensor) -> Tensor:
    return codes if codes.dtype == torch.int8 else codes.float()


def _table(scales: Tensor, groups: Scaling) -> Tensor:
    """As [GR, GT], or what broadcasts to it."""
    return scales.reshape(-1, 1) if groups.flat or scales.dim() < 2 else scales
