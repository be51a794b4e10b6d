"""Triton twin of `roundtrip.round_trip` for tiles and blocks: one read of x, two launches, no waiting.

Counts are equal to the reference's, sums agree to the rounding of fp32 (about 1e-7 of each tile's sum).

How it works. Each program takes a [32,128] piece of x (a [128,128] block under block scaling), quantizes it
in registers exactly as `quantize_kernel` does, and writes one column of partial results: ints [51, programs]
(eleven counts, forty bins of the histogram) and reals [13, programs] (eight sums, five maxes). A second
launch, one program a row, adds them up in a fixed order and merges them into the caller's row. Nothing is
added atomically, so the same input gives the same bits every time.

Ranges. As in the reference, each [1,128] tile is summed on u = y / unit, |u| < 2, and its fp32 sums are
multiplied by (scale unit)^k in float64. `unit` is a power of two whose reciprocal is one too, so here u is a
product and still exact.

Rejected: float atomics (other bits in every run); both orientations from one read (compiled for sm_90 it
spills 1.7 kB a thread, and arithmetic bounds this kernel, not memory: pass x.t() in a call of its own); log2
of scales in float64 (a hundred instructions a tile for digits that nobody reads).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.quantize import DTYPES
from fp8scope.quantize_kernel import (
    CODE_TYPES,
    INFINITY,
    TILE,
    check_matrix,
    load_tile,
    magnitude_bits,
    scale_of,
)
from fp8scope.roundtrip import BAD_BLOCK_FACTOR, SATURATION_SLACK
from fp8scope.sums import COUNT_COLUMNS, MAX_COLUMNS, SUM_COLUMNS, RowSums
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import TILE as TILE_EDGE
from fp8scope_protocol.formats import Format
from fp8scope_protocol.metrics import HISTOGRAM_BINS, HISTOGRAM_FIRST_EXPONENT

SCALINGS = ("tile 1x128", "block 128x128")
"""What the kernel groups by; the reference knows more."""

# The kernels write their columns in the order of `sums`: after `elements` and `calls`, which need no kernel,
# every count; every sum; of the maxes the five that come before `channel_outlier`.
_HOST_COUNTS = tl.constexpr(COUNT_COLUMNS.index("nonzero"))
_COUNTS = tl.constexpr(len(COUNT_COLUMNS) - COUNT_COLUMNS.index("nonzero"))
_SUMS = tl.constexpr(len(SUM_COLUMNS))
_MAXES = tl.constexpr(MAX_COLUMNS.index("channel_outlier"))
_BINS = tl.constexpr(HISTOGRAM_BINS)
_FIRST_EXPONENT = tl.constexpr(HISTOGRAM_FIRST_EXPONENT)
_SLACK = tl.constexpr(SATURATION_SLACK)
_NOT_MEASURED = tl.constexpr(-math.inf)

_TILE_ROWS = 32
_CHUNK = 4096  # partial results a thread block of the second launch reads at a time


@triton.jit
def _unit(amax: tl.tensor) -> tl.tensor:
    """The power of two just above `amax` as fp32, at most 2^126; 1 for 0."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits >> 23) + 1, 2), 253)
    return (tl.where(bits == 0, 127, exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal(unit: tl.tensor) -> tl.tensor:
    """1 / unit, exactly, for a power of two between 2^-125 and 2^126."""
    return ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _group_max(tiles: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The maximum over the tiles that share a scale, at each of them."""
    return tl.zeros_like(tiles) + tl.max(tiles, axis=0) if BLOCK else tiles


@triton.jit
def _group_sum(tiles: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    return tl.zeros_like(tiles) + tl.sum(tiles, axis=0) if BLOCK else tiles


@triton.jit
def _count_two(first: tl.tensor, second: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """How many of each of two tensors of booleans are true (at most 2^14), from one reduction."""
    both = tl.sum(first.to(tl.int32) + (second.to(tl.int32) << 16))
    return both & 0xFFFF, both >> 16


@triton.jit
def _store_counts(ptr: tl.tensor, slots: tl.tensor, bits: tl.tensor, magnitude: tl.tensor, q: tl.tensor,
                  whole: tl.tensor, n_coded: tl.tensor, LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr,
                  STOCHASTIC: tl.constexpr) -> tl.tensor:
    """Elements by fate, and the histogram of |y|; returns how many are NaN or Inf."""
    nonzero = (bits > 0) & (bits < INFINITY)
    lost = magnitude < SUBNORMAL / 2 if STOCHASTIC else q == 0.0
    n_nan, n_inf = _count_two(bits > INFINITY, bits == INFINITY)
    n_nonzero, n_nonzero_codes = _count_two(nonzero, q != 0.0)
    saturated = magnitude > LARGEST * _SLACK
    n_lost, n_saturated = _count_two(nonzero & lost & whole[:, None], saturated & whole[:, None])
    tl.store(ptr, n_nonzero)
    tl.store(ptr + slots, n_nan)
    tl.store(ptr + slots * 2, n_inf)
    tl.store(ptr + slots * 3, n_coded)
    tl.store(ptr + slots * 4, n_coded - n_nonzero_codes)
    tl.store(ptr + slots * 5, n_lost)
    tl.store(ptr + slots * 6, n_saturated)
    exponent = (magnitude.to(tl.int32, bitcast=True) >> 23) - 127 - _FIRST_EXPONENT
    bins = tl.minimum(tl.maximum(exponent, 0), _BINS - 1)
    bins = tl.where((magnitude > 0.0) & whole[:, None], bins, 63)  # the last of 64 bins is not kept
    column = tl.arange(0, 64)
    counts = tl.histogram(tl.ravel(bins, can_reorder=True), 64)
    tl.store(ptr + slots * (_COUNTS + column), counts, mask=column < _BINS)
    return n_nan + n_inf


@triton.jit
def _account(x: tl.tensor, y: tl.tensor, q: tl.tensor, scale: tl.tensor, amax_bits: tl.tensor,
             present: tl.tensor, width: tl.tensor, ints_ptr: tl.tensor, reals_ptr: tl.tensor,
             LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, BAD: tl.constexpr,
             BLOCK: tl.constexpr, GIVEN: tl.constexpr, STOCHASTIC: tl.constexpr) -> None:
    """Writes the partial results of x [ROWS, 128]. amax_bits [ROWS] has NaN and Inf in sight."""
    slot, slots = tl.program_id(0), tl.num_programs(0)
    ints_ptr += slot
    reals_ptr += slot
    bits = magnitude_bits(x)
    whole = present & (amax_bits < INFINITY)  # tiles that have codes
    q = tl.where(whole[:, None], q, 0.0)
    n_wrong = _store_counts(ints_ptr, slots, bits, tl.abs(y), q, whole, tl.sum(tl.where(whole, width, 0)),
                            LARGEST, SUBNORMAL, STOCHASTIC)

    # Moments and errors: fp32 within a tile, float64 from there on.
    finite_bits = tl.max(tl.where(bits < INFINITY, bits, 0), axis=1)
    unit = _unit(tl.div_rn(finite_bits.to(tl.float32, bitcast=True), scale))
    u = y * _reciprocal(unit)[:, None]
    e = u - q * _reciprocal(unit)[:, None]
    square = u * u
    weight = scale.to(tl.float64) * unit.to(tl.float64)
    x2 = tl.sum(square, axis=1).to(tl.float64) * (weight * weight)
    x4 = tl.sum(square * square, axis=1).to(tl.float64) * (weight * weight) * (weight * weight)
    e2 = tl.where(whole, tl.sum(e * e, axis=1).to(tl.float64) * (weight * weight), 0.0)
    xe = tl.where(whole, tl.sum(u * e, axis=1).to(tl.float64) * (weight * weight), 0.0)
    tl.store(reals_ptr, tl.sum(x2))
    tl.store(reals_ptr + slots, tl.sum(tl.sum(tl.abs(u), axis=1).to(tl.float64) * weight))
    tl.store(reals_ptr + slots * 2, tl.sum(x4))
    tl.store(reals_ptr + slots * 3, tl.sum(tl.where(whole, x2, 0.0)))
    tl.store(reals_ptr + slots * 4, tl.sum(e2))
    tl.store(reals_ptr + slots * 5, tl.sum(xe))
    largest = tl.max(finite_bits, axis=0).to(tl.float32, bitcast=True)
    least = tl.min(tl.where((bits > 0) & (bits < INFINITY), bits, INFINITY)).to(tl.float32, bitcast=True)
    some = tl.sum(tl.where(present, width, 0)) > n_wrong
    tl.store(reals_ptr + slots * 8, tl.where(some, largest, _NOT_MEASURED))
    tl.store(reals_ptr + slots * 9, -least)

    # Blocks: one tile, the first, stands for all that share a scale.
    head = present & (tl.arange(0, x.shape[0]) == 0) if BLOCK else present
    amax = _group_max(finite_bits, BLOCK)
    scaled = head & whole & (amax > 0)
    bad = head & ((amax_bits >= INFINITY) | (_group_sum(e2, BLOCK) > BAD * _group_sum(x2, BLOCK)))
    n_blocks, n_zero = _count_two(head, head & whole & (amax == 0))
    n_scaled, n_bad = _count_two(scaled, bad)
    tl.store(ints_ptr + slots * 7, n_blocks)
    tl.store(ints_ptr + slots * 8, n_zero)
    tl.store(ints_ptr + slots * 9, n_scaled)
    tl.store(ints_ptr + slots * 10, n_bad)
    log2_scale = tl.where(scaled, tl.log2(scale), 0.0).to(tl.float64)
    tl.store(reals_ptr + slots * 6, tl.sum(log2_scale))
    tl.store(reals_ptr + slots * 7, tl.sum(log2_scale * log2_scale))
    tl.store(reals_ptr + slots * 10, tl.max(tl.where(scaled, -scale, _NOT_MEASURED), axis=0))
    tl.store(reals_ptr + slots * 11, tl.max(tl.where(scaled, scale, _NOT_MEASURED), axis=0))
    stale = _NOT_MEASURED
    if GIVEN:
        excess = amax.to(tl.float32, bitcast=True).to(tl.float64) / (scale.to(tl.float64) * LARGEST)
        stale = tl.max(tl.where(scaled, tl.log2(tl.where(scaled, excess, 1.0)), _NOT_MEASURED), axis=0)
    tl.store(reals_ptr + slots * 12, stale)


@triton.jit(do_not_specialize=["scale_r", "scale_c"])
def _round_trip_kernel(x_ptr: tl.tensor, scales_ptr: tl.tensor, codes_ptr: tl.tensor,
                       ints_ptr: tl.tensor, reals_ptr: tl.tensor, R: tl.tensor, C: tl.tensor,
                       stride_r: tl.tensor, stride_c: tl.tensor, scale_r: tl.tensor, scale_c: tl.tensor,
                       code_r: tl.tensor, code_c: tl.tensor,
                       LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, BAD: tl.constexpr, CODE: tl.constexpr,
                       BLOCK: tl.constexpr, GIVEN: tl.constexpr, CODED: tl.constexpr,
                       STOCHASTIC: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr) -> None:
    tiles = tl.cdiv(C, TILE)
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tile * TILE + tl.arange(0, TILE)
    x = load_tile(x_ptr, rows, columns, R, C, stride_r, stride_c)
    bits = magnitude_bits(x)
    amax_bits = _group_max(tl.max(bits, axis=1), BLOCK)
    if GIVEN:
        group = rows // TILE if BLOCK else rows
        scale = tl.load(scales_ptr + group * scale_r + tile * scale_c, mask=rows < R, other=1.0)
    else:
        scale = scale_of(amax_bits, LARGEST, POWER_OF_TWO)
    y = tl.div_rn(tl.where(bits < INFINITY, x, 0.0), scale[:, None])
    if CODED:
        inside = (rows[:, None] < R) & (columns[None, :] < C)
        places = rows[:, None] * code_r + columns[None, :] * code_c
        q = tl.load(codes_ptr + places, mask=inside, other=0).to(CODE, bitcast=True).to(tl.float32)
    else:
        q = tl.clamp(y, -LARGEST, LARGEST).to(CODE).to(tl.float32)
    _account(x, y, q, scale, amax_bits, rows < R, tl.minimum(C - tile * TILE, TILE), ints_ptr, reals_ptr,
             LARGEST, SUBNORMAL, BAD, BLOCK, GIVEN, STOCHASTIC)


@triton.jit(do_not_specialize=["slots", "elements"])
def _merge_kernel(ints_ptr: tl.tensor, reals_ptr: tl.tensor, counts_ptr: tl.tensor, sums_ptr: tl.tensor,
                  maxes_ptr: tl.tensor, histogram_ptr: tl.tensor, slots: tl.tensor, elements: tl.tensor,
                  CHUNK: tl.constexpr) -> None:
    """Program k adds up row k of the partial results, always in the same order, and merges it."""
    k = tl.program_id(0)
    if k < _COUNTS + _BINS:
        count = tl.zeros([CHUNK], tl.int64)
        for start in range(0, slots, CHUNK):
            at = start + tl.arange(0, CHUNK)
            count += tl.load(ints_ptr + k.to(tl.int64) * slots + at, mask=at < slots, other=0).to(tl.int64)
        target = counts_ptr + _HOST_COUNTS + k if k < _COUNTS else histogram_ptr + k - _COUNTS
        tl.store(target, tl.load(target) + tl.sum(count, axis=0))
    elif k < _COUNTS + _BINS + _SUMS:
        row = k - _COUNTS - _BINS
        total = tl.zeros([CHUNK], tl.float64)
        for start in range(0, slots, CHUNK):
            at = start + tl.arange(0, CHUNK)
            total += tl.load(reals_ptr + row.to(tl.int64) * slots + at, mask=at < slots, other=0.0)
        tl.store(sums_ptr + row, tl.load(sums_ptr + row) + tl.sum(total, axis=0))
    else:
        row = k - _COUNTS - _BINS
        worst = tl.full([CHUNK], _NOT_MEASURED, tl.float64)
        for start in range(0, slots, CHUNK):
            at = start + tl.arange(0, CHUNK)
            here = tl.load(reals_ptr + row.to(tl.int64) * slots + at, mask=at < slots, other=_NOT_MEASURED)
            worst = tl.maximum(worst, here)
        target = maxes_ptr + row - _SUMS
        tl.store(target, tl.maximum(tl.load(target), tl.max(worst, axis=0)))
    if k == 0:
        tl.store(counts_ptr, tl.load(counts_ptr) + elements)
        tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + 1)


def round_trip(
    x: Tensor,
    element: Format,
    scaling: str,
    *,
    scales: Tensor | None = None,
    codes: Tensor | None = None,
    rounding: str = "nearest",
    power_of_two: bool = False,
    out: RowSums | None = None,
) -> RowSums:
    """Twin of `roundtrip.round_trip` for `SCALINGS`; `codes` must have the format's own dtype."""
    check_matrix(x)
    if scaling not in SCALINGS:
        raise Invalid("scaling", scaling, f"the kernel takes {' or '.join(SCALINGS)}")
    if codes is not None and codes.dtype != DTYPES[element.name]:
        raise Invalid("codes.dtype", codes.dtype, f"must be {DTYPES[element.name]}, as quantize returns them")
    row = RowSums.zeros(x.device) if out is None else out
    block = scaling == "block 128x128"
    size = TILE_EDGE if block else _TILE_ROWS
    tiles = triton.cdiv(x.shape[1], TILE_EDGE)
    slots = triton.cdiv(x.shape[0], size) * tiles
    partial = _Partial(x, slots)
    if slots:
        groups = triton.cdiv(x.shape[0], TILE_EDGE) if block else x.shape[0]
        used = x if scales is None else scales.float().expand(groups, tiles)
        given = x if codes is None else codes.view(torch.uint8)
        with torch.cuda.device_of(x):
            _round_trip_kernel[(slots,)](
                x, used, given, partial.ints, partial.reals, *x.shape, *x.stride(), *used.stride(),
                *given.stride(), LARGEST=element.largest, SUBNORMAL=element.smallest_subnormal,
                BAD=_bad(element), CODE=CODE_TYPES[element.name], BLOCK=block, GIVEN=scales is not None,
                CODED=codes is not None, STOCHASTIC=rounding == "stochastic", POWER_OF_TWO=power_of_two,
                ROWS=size, num_warps=16 if block else 4,
            )
    partial.merge_into(row, x)
    return row


class _Partial:
    """Results of every program: ints [51, slots], reals [13, slots], uninitialised."""

    def __init__(self, x: Tensor, slots: int) -> None:
        self.slots = slots
        self.ints = x.new_empty((_COUNTS.value + _BINS.value, slots), dtype=torch.int32)
        self.reals = x.new_empty((_SUMS.value + _MAXES.value, slots), dtype=torch.float64)

    def merge_into(self, row: RowSums, x: Tensor) -> None:
        """Adds everything, one call and the elements of x to `row`, in place."""
        with torch.cuda.device_of(x):
            _merge_kernel[(len(self.ints) + len(self.reals),)](
                self.ints, self.reals, *row, self.slots, x.numel(), CHUNK=_CHUNK, num_warps=8)


def _bad(element: Format) -> float:
    return BAD_BLOCK_FACTOR * float(10.0 ** (-element.sqnr_floor_db / 10.0))
