"""Device code of `roundtrip_kernel` and `batch_kernel`: slabs of x, passed over twice.

What it does and what was rejected is told in `roundtrip_kernel`.
"""

import triton
import triton.language as tl

from fp8scope.histogram_kernel import ALIASED, add_exponents, store_planes
from fp8scope.partials_kernel import BINS, COUNTS, NOT_MEASURED
from fp8scope.quantize_kernel import INFINITY, TILE, magnitude_bits, scale_of
from fp8scope.roundtrip import SATURATION_SLACK
from fp8scope.slab_kernel import (
    folded,
    folded_max,
    load_bits,
    load_chunk,
    reciprocal,
    scan,
    scan_bits,
    sign,
    spread,
    staleness,
    unit_of,
    widen,
)
from fp8scope_protocol.metrics import HISTOGRAM_FIRST_EXPONENT

_FIRST_EXPONENT = tl.constexpr(HISTOGRAM_FIRST_EXPONENT)
_SLACK = tl.constexpr(SATURATION_SLACK)
_HUGE = tl.constexpr(0x71800000)  # the bits of 2^100: beyond, the reciprocal's tail would be denormal
_SHRINK = tl.constexpr(2.0**-64)  # of x and s alike, where 1 / s would be denormal


@triton.jit
def measure_slabs(x_ptr: tl.tensor, scales_ptr: tl.tensor, codes_ptr: tl.tensor, ints_ptr: tl.tensor,
                  reals_ptr: tl.tensor, program: tl.tensor, slot: tl.tensor, slots: tl.tensor, R: tl.tensor,
                  C: tl.tensor, stride_r: tl.tensor, stride_c: tl.tensor, scale_r: tl.tensor,
                  scale_c: tl.tensor, code_r: tl.tensor, code_c: tl.tensor, slabs: tl.tensor,
                  LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, BAD: tl.constexpr, CODE: tl.constexpr,
                  BLOCK: tl.constexpr, GIVEN: tl.constexpr, CODED: tl.constexpr, STOCHASTIC: tl.constexpr,
                  POWER_OF_TWO: tl.constexpr, HISTOGRAM: tl.constexpr, EVEN: tl.constexpr,
                  PACKED: tl.constexpr, ROOT: tl.constexpr, SCAN: tl.constexpr, UNROLL: tl.constexpr,
                  ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr) -> None:
    """What one `program` of those of x [R, C] does; its sums go to column `slot` of partial results with
    `slots` columns. ROOT: of the square root of x."""
    AXIS: tl.constexpr = 2 if VECTOR == 8 else 1  # of a chunk, along which a thread holds 8 elements
    CHUNK: tl.constexpr = 8 * LANES
    SHAPE: tl.constexpr = (ROWS, LANES, 8) if AXIS == 2 else (ROWS, 8, LANES)
    COUNTED: tl.constexpr = HISTOGRAM and not GIVEN and LARGEST < 512.0
    NARROW: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not ROOT
    FAST: tl.constexpr = NARROW and not GIVEN and LARGEST < 512.0
    tiles = tl.cdiv(C, TILE)
    tile = (program % tiles).to(tl.int64)
    first = (program // tiles).to(tl.int64) * slabs * ROWS
    if AXIS == 2:
        columns = tile * TILE + tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
        lane = tl.arange(0, ROWS)
    else:
        columns = tile * TILE + tl.arange(0, LANES)[None, :] + tl.arange(0, 8)[:, None] * LANES
        lane = tl.max_contiguous(tl.arange(0, ROWS), VECTOR)
    width = tl.minimum(C - tile * TILE, TILE).to(tl.int32)

    block_bits = tl.zeros([ROWS], tl.int32)
    if BLOCK:
        for i in range(slabs):
            rows = first + i * ROWS + lane
            most = tl.zeros([ROWS, LANES], tl.int32)
            for k in tl.static_range(0, TILE, CHUNK):
                bits = load_bits(x_ptr, rows, columns, k, R, C, stride_r, stride_c, EVEN, ROOT)
                most = tl.maximum(most, tl.max(bits, axis=AXIS))
            block_bits = tl.maximum(block_bits, tl.max(most, axis=1))
        block_bits = tl.zeros_like(block_bits) + tl.max(block_bits, axis=0)

    FOLD: tl.constexpr = VECTOR if AXIS == 1 else 1
    zero = tl.zeros([ROWS // FOLD], tl.int32)
    none = tl.zeros([ROWS // FOLD], tl.float64)
    n_nonzero, n_nan, n_inf, n_coded, n_codes, n_lost, n_saturated = zero, zero, zero, zero, zero, zero, zero
    n_blocks, n_zero_blocks, n_scaled, n_bad, n_present = zero, zero, zero, zero, zero
    x2, x1, x4, coded_x2, e2, xe, log2, log2_sq = none, none, none, none, none, none, none, none
    largest_bits, most_not = zero, tl.zeros([ROWS // FOLD], tl.uint32)
    neg_scale = tl.full([ROWS // FOLD], NOT_MEASURED, tl.float32)
    scale_high = tl.full([ROWS // FOLD], NOT_MEASURED, tl.float32)
    stale = tl.full([ROWS // FOLD], NOT_MEASURED, tl.float64)
    p0 = tl.zeros([ROWS, LANES], tl.int32)
    p1, p2, p3, p4, p5, p6, p7, p8, p9, p10 = p0, p0, p0, p0, p0, p0, p0, p0, p0, p0
    n_small, n_below, bins = zero, zero, tl.zeros([64], tl.int32)

    here_slabs = tl.minimum(slabs, tl.cdiv(R - first, ROWS)).to(tl.int32)
    for i in range(here_slabs):
        rows = first + i * ROWS + lane
        present = rows < R
        most = tl.zeros([ROWS, LANES], tl.int32)
        least = tl.full([ROWS, LANES], 0xFFFFFFFF, tl.uint32)
        zeros = tl.zeros([ROWS, LANES], tl.int32)
        if PACKED:
            one = tl.zeros(SHAPE, tl.uint16)
            high, low = one, tl.full(SHAPE, 0xFFFF, tl.uint16)
            for k in tl.range(0, TILE, CHUNK, loop_unroll_factor=SCAN):
                raw = load_chunk(x_ptr, rows, columns, k, R, C, stride_r, stride_c, EVEN, ROOT)
                high, low, one = scan(raw.to(tl.uint16, bitcast=True), high, low, one)
            most = tl.max(high.to(tl.int32), axis=AXIS) << 16
            least = ((tl.min(low.to(tl.uint32), axis=AXIS) + 1) << 16) - 1
            zeros = TILE // LANES - tl.sum(one.to(tl.int32), axis=AXIS)
        for k in tl.static_range(0, 0 if PACKED else TILE, CHUNK):
            bits = load_bits(x_ptr, rows, columns, k, R, C, stride_r, stride_c, EVEN, ROOT)
            most, least, zeros = scan_bits(bits, most, least, zeros, AXIS)
        amax_bits = tl.max(most, axis=1)
        group_bits = block_bits if BLOCK else amax_bits
        if GIVEN:
            group = rows // TILE if BLOCK else rows
            scale = tl.load(scales_ptr + group * scale_r + tile * scale_c, mask=present, other=1.0)
        else:
            scale = scale_of(group_bits, LARGEST, POWER_OF_TWO)
        whole = group_bits < INFINITY
        finite_bits, divisor, carry = amax_bits, scale, tl.full([ROWS], 1.0, tl.float32)
        shrink = carry
        odd = tl.max(tl.maximum(amax_bits, group_bits), axis=0) >= _HUGE  # NaN and Inf too
        if odd:
            nan, inf = tl.zeros([ROWS, LANES], tl.int32), tl.zeros([ROWS, LANES], tl.int32)
            most, zeros = nan, nan
            least = tl.full([ROWS, LANES], 0xFFFFFFFF, tl.uint32)
            for j in range(0, TILE, CHUNK):
                bits = load_bits(x_ptr, rows, columns, j, R, C, stride_r, stride_c, EVEN, ROOT)
                nan += tl.sum((bits > INFINITY).to(tl.int32), axis=AXIS)
                inf += tl.sum((bits == INFINITY).to(tl.int32), axis=AXIS)
                bits = tl.where(bits < INFINITY, bits, 0)
                most, least, zeros = scan_bits(bits, most, least, zeros, AXIS)
            n_nan += folded(tl.sum(nan, axis=1), FOLD)
            n_inf += folded(tl.sum(inf, axis=1), FOLD)
            finite_bits = tl.max(most, axis=1)
            if not GIVEN:
                unit = unit_of(finite_bits.to(tl.float32, bitcast=True))
                shrink = tl.where((scale > 2.0**90) & FAST, _SHRINK, 1.0)
                shrink = tl.where(whole, shrink, reciprocal(unit))
                carry = tl.where(whole, 1.0, unit)
                divisor = tl.where(whole, scale * shrink, 1.0)
        if GIVEN:
            carry = unit_of(tl.div_rn(finite_bits.to(tl.float32, bitcast=True), scale))
        if COUNTED:
            smallest = (tl.min(least, axis=1) + 1).to(tl.int32).to(tl.float32, bitcast=True)
            tiny = (smallest > 0.0) & (smallest < scale * (2.0 * ALIASED))
            rare = odd | (tl.max(tiny.to(tl.int32), axis=0) > 0)
            if not rare:
                n_small += folded(tl.sum(zeros, axis=1), FOLD)
        sum_x2 = tl.zeros([ROWS, LANES], tl.float32)
        sum_x1, sum_x4, sum_e2, sum_xe = sum_x2, sum_x2, sum_x2, sum_x2
        codes = tl.zeros([ROWS, LANES], tl.int32)
        lost, saturated = codes, codes
        half = tl.full([1, 1, 1], SUBNORMAL / 2, tl.float32)
        beyond = tl.full([1, 1, 1], LARGEST * _SLACK, tl.float32)
        r = tl.div_rn(1.0, divisor)
        tail = tl.fma(-divisor, r, 1.0) * r
        for g in range(0, TILE, CHUNK * UNROLL):
            for h in tl.static_range(UNROLL):
                x = load_chunk(x_ptr, rows, columns, g + h * CHUNK, R, C, stride_r, stride_c, EVEN, ROOT)
                x = widen(x.to(tl.uint16, bitcast=True)) if PACKED else x.to(tl.float32)
                if odd:
                    x = tl.where(magnitude_bits(x) < INFINITY, x * spread(shrink), 0.0)
                y = tl.fma(x, spread(r), x * spread(tail)) if FAST else tl.div_rn(x, spread(divisor))
                if CODED:
                    q = load_chunk(codes_ptr, rows, columns, g + h * CHUNK, R, C, code_r, code_c, EVEN, False)
                    q = tl.where(spread(whole), q.to(CODE, bitcast=True).to(tl.float32), 0.0)
                else:
                    q = (tl.clamp(y, -LARGEST, LARGEST) if GIVEN else y).to(CODE).to(tl.float32)
                magnitude = tl.abs(y)
                if CODED or STOCHASTIC:
                    codes += tl.sum((q != 0.0).to(tl.int32), axis=AXIS)
                    few = magnitude < SUBNORMAL / 2 if STOCHASTIC else q == 0.0
                    lost += tl.sum(((x != 0.0) & few).to(tl.int32), axis=AXIS)
                else:
                    codes += tl.sum(sign(half - magnitude), axis=AXIS)  # a tie is rounded to even, to 0
                if GIVEN:
                    saturated += tl.sum(sign(beyond - magnitude), axis=AXIS)
                if COUNTED:
                    exponent = y.to(tl.int32, bitcast=True) >> 23
                    if rare:  # divided: the quick quotient rounds a tie, |y| of 2^-150, up
                        magnitude = tl.abs(tl.div_rn(x, spread(divisor)))
                        magnitude = tl.where(spread(whole), magnitude, 0.0)
                        small = magnitude < ALIASED
                        below = small & (magnitude > 0.0)
                        n_small += folded(tl.sum(tl.sum(small.to(tl.int32), axis=AXIS), axis=1), FOLD)
                        n_below += folded(tl.sum(tl.sum(below.to(tl.int32), axis=AXIS), axis=1), FOLD)
                        exponent = tl.where(small, 0, magnitude.to(tl.int32, bitcast=True) >> 23)
                    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10 = add_exponents(
                        exponent, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, AXIS)
                elif HISTOGRAM:
                    exponent = (magnitude.to(tl.int32, bitcast=True) >> 23) - 127 - _FIRST_EXPONENT
                    bin = tl.minimum(tl.maximum(exponent, 0), BINS - 1)
                    bin = tl.where((magnitude > 0.0) & spread(whole), bin, 63)  # the last of 64 is not kept
                    bins += tl.histogram(tl.ravel(bin, can_reorder=True), 64)
                if GIVEN:
                    q = q * spread(reciprocal(carry))
                    y = y * spread(reciprocal(carry))
                e = y - q
                y2 = y * y
                sum_x2 += tl.sum(y2, axis=AXIS)
                sum_x1 += tl.sum(tl.abs(y), axis=AXIS)
                sum_x4 += tl.sum(y2 * y2, axis=AXIS)
                sum_e2 += tl.sum(e * e, axis=AXIS)
                sum_xe += tl.sum(y * e, axis=AXIS)

        # Elements by fate.
        nonzero = TILE - tl.sum(zeros, axis=1)
        here = tl.where(present, width, 0)
        n_present += folded(here, FOLD)
        n_nonzero += folded(nonzero, FOLD)
        n_coded += folded(tl.where(whole, here, 0), FOLD)
        tile_codes = tl.sum(codes, axis=1)
        n_codes += folded(tl.where(whole, tile_codes, 0), FOLD)
        if CODED or STOCHASTIC:
            n_lost += folded(tl.where(whole, tl.sum(lost, axis=1), 0), FOLD)
        else:
            n_lost += folded(tl.where(whole, nonzero - tile_codes, 0), FOLD)
        if GIVEN:
            n_saturated += folded(tl.where(whole, tl.sum(saturated, axis=1), 0), FOLD)
        largest_bits = tl.maximum(largest_bits, folded_max(finite_bits, FOLD))
        most_not = tl.maximum(most_not, folded_max(tl.min(least, axis=1) ^ 0xFFFFFFFF, FOLD))

        # Moments and errors: fp32 within a tile, float64 from there on.
        weight = scale.to(tl.float64) * carry.to(tl.float64)
        square = weight * weight
        tile_x2 = tl.sum(sum_x2, axis=1).to(tl.float64) * square
        tile_e2 = tl.where(whole, tl.sum(sum_e2, axis=1).to(tl.float64) * square, 0.0)
        x2 += folded(tile_x2, FOLD)
        x1 += folded(tl.sum(sum_x1, axis=1).to(tl.float64) * weight, FOLD)
        x4 += folded(tl.sum(sum_x4, axis=1).to(tl.float64) * (square * square), FOLD)
        coded_x2 += folded(tl.where(whole, tile_x2, 0.0), FOLD)
        e2 += folded(tile_e2, FOLD)
        xe += folded(tl.where(whole, tl.sum(sum_xe, axis=1).to(tl.float64) * square, 0.0), FOLD)

        # Blocks: each tile is one, or all of this program's are.
        if not BLOCK:
            scaled = present & whole & (amax_bits > 0)
            n_blocks += folded(present.to(tl.int32), FOLD)
            n_zero_blocks += folded((present & (amax_bits == 0)).to(tl.int32), FOLD)
            n_scaled += folded(scaled.to(tl.int32), FOLD)
            bad = (tile_e2 > BAD * tile_x2) | (amax_bits >= INFINITY)
            n_bad += folded((present & bad).to(tl.int32), FOLD)
            bits_of_scale = tl.where(scaled, tl.log2(scale), 0.0).to(tl.float64)
            log2 += folded(bits_of_scale, FOLD)
            log2_sq += folded(bits_of_scale * bits_of_scale, FOLD)
            neg_scale = tl.maximum(neg_scale, folded_max(tl.where(scaled, -scale, NOT_MEASURED), FOLD))
            scale_high = tl.maximum(scale_high, folded_max(tl.where(scaled, scale, NOT_MEASURED), FOLD))
            if GIVEN:
                excess = tl.where(scaled, staleness(amax_bits, scale, LARGEST), NOT_MEASURED)
                stale = tl.maximum(stale, folded_max(excess, FOLD))

    if BLOCK:
        head = lane == 0
        whole = head & (block_bits < INFINITY)
        if GIVEN:
            scale = tl.load(scales_ptr + first // TILE * scale_r + tile * scale_c)
        else:
            scale = tl.max(scale_of(block_bits, LARGEST, POWER_OF_TWO), axis=0)
        scales = tl.zeros([ROWS], tl.float32) + scale
        scaled = whole & (block_bits > 0)
        n_blocks = head.to(tl.int32)
        n_zero_blocks = (whole & (block_bits == 0)).to(tl.int32)
        n_scaled = scaled.to(tl.int32)
        bad = (tl.zeros([ROWS], tl.float64) + tl.sum(e2, axis=0) > BAD * tl.sum(x2, axis=0))
        n_bad = (head & (bad | (block_bits >= INFINITY))).to(tl.int32)
        log2 = tl.where(scaled, tl.log2(scales), 0.0).to(tl.float64)
        log2_sq = log2 * log2
        neg_scale = tl.where(scaled, -scales, NOT_MEASURED)
        scale_high = tl.where(scaled, scales, NOT_MEASURED)
        if GIVEN:
            stale = tl.where(scaled, staleness(block_bits, scales, LARGEST), NOT_MEASURED)

    slot, slots = slot.to(tl.int64), slots.to(tl.int64)
    ints_ptr += slot
    tl.store(ints_ptr, tl.sum(n_nonzero, axis=0))
    tl.store(ints_ptr + slots, tl.sum(n_nan, axis=0))
    tl.store(ints_ptr + slots * 2, tl.sum(n_inf, axis=0))
    tl.store(ints_ptr + slots * 3, tl.sum(n_coded, axis=0))
    tl.store(ints_ptr + slots * 4, tl.sum(n_coded - n_codes, axis=0))
    tl.store(ints_ptr + slots * 5, tl.sum(n_lost, axis=0))
    tl.store(ints_ptr + slots * 6, tl.sum(n_saturated, axis=0))
    tl.store(ints_ptr + slots * 7, tl.sum(n_blocks, axis=0))
    tl.store(ints_ptr + slots * 8, tl.sum(n_zero_blocks, axis=0))
    tl.store(ints_ptr + slots * 9, tl.sum(n_scaled, axis=0))
    tl.store(ints_ptr + slots * 10, tl.sum(n_bad, axis=0))
    if COUNTED:
        store_planes(ints_ptr + slots * COUNTS, slots, tl.sum(n_small, axis=0), tl.sum(n_below, axis=0),
                     p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, BINS)
    elif HISTOGRAM:
        column = tl.arange(0, 64)
        tl.store(ints_ptr + slots * (COUNTS + column), bins, mask=column < BINS)
    reals_ptr += slot
    tl.store(reals_ptr, tl.sum(x2, axis=0))
    tl.store(reals_ptr + slots, tl.sum(x1, axis=0))
    tl.store(reals_ptr + slots * 2, tl.sum(x4, axis=0))
    tl.store(reals_ptr + slots * 3, tl.sum(coded_x2, axis=0))
    tl.store(reals_ptr + slots * 4, tl.sum(e2, axis=0))
    tl.store(reals_ptr + slots * 5, tl.sum(xe, axis=0))
    tl.store(reals_ptr + slots * 6, tl.sum(log2, axis=0))
    tl.store(reals_ptr + slots * 7, tl.sum(log2_sq, axis=0))
    some = tl.sum(n_present - n_nan - n_inf, axis=0) > 0
    largest = tl.max(largest_bits, axis=0).to(tl.float32, bitcast=True)
    before = tl.max(most_not, axis=0) ^ 0xFFFFFFFF
    least = tl.where(before < INFINITY, before + 1, INFINITY).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(reals_ptr + slots * 8, tl.where(some, largest, NOT_MEASURED))
    tl.store(reals_ptr + slots * 9, -least)
    tl.store(reals_ptr + slots * 10, tl.max(neg_scale, axis=0))
    tl.store(reals_ptr + slots * 11, tl.max(scale_high, axis=0))
    tl.store(reals_ptr + slots * 12, tl.max(stale, axis=0))
