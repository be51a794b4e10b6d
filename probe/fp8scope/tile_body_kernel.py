"""Device code of `tile_kernel` and `batch_kernel`: slabs of bf16 tiles, read once and summed.

What it does and what it costs is told in `tile_kernel`.
"""

import triton
import triton.language as tl

from fp8scope.pair_kernel import (
    MAGNITUDES,
    extremes,
    log2,
    pair_max,
    pair_min,
    round_pair,
    upper,
    widen,
)
from fp8scope.partials_kernel import NOT_MEASURED
from fp8scope.quantize_kernel import INFINITY, TILE, magnitude_bits, scale_of
from fp8scope.slab_kernel import reciprocal, sign, spread, unit_of

_HUGE = tl.constexpr(0x71800000)  # the bits of 2^100
_SHRINK = tl.constexpr(2.0**-64)  # of x and s alike, where 1 / s would be denormal
_NAN_CODES = tl.constexpr(0x7F7F)


@triton.jit
def _add_pairs(x: tl.tensor, z: tl.tensor, divisor: tl.tensor, r: tl.tensor, tail: tl.tensor,
               codes: tl.tensor, x1: tl.tensor, x2: tl.tensor, x4: tl.tensor, e2: tl.tensor, xe: tl.tensor,
               LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr,
               CODE: tl.constexpr, COUNTED: tl.constexpr, ZEROS: tl.constexpr,
               ASM: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Sums over x and z [ROWS, LANES, VECTOR] added to those of the same shape; how many codes are not zero,
    if COUNTED; and the pairs of codes. ZEROS: x may be 0, whose sign its code keeps."""
    first, second = x, z
    if ASM:
        y = tl.fma(x, spread(r), x * spread(tail))
        z = tl.fma(z, spread(r), z * spread(tail))
    else:  # the interpreter's fma rounds twice
        y, z = tl.div_rn(x, spread(divisor)), tl.div_rn(z, spread(divisor))
    if ZEROS:  # -0 r + 0 is 0
        y, z = tl.where(first == 0.0, first, y), tl.where(second == 0.0, second, z)
    p, q, both = round_pair(y, z, LARGEST, MANTISSA, NORMAL, CODE, ASM)
    if COUNTED:  # a tie is rounded to even, to 0
        half = tl.full([1, 1, 1], SUBNORMAL / 2, tl.float32)
        codes += sign(half - tl.abs(y)) + sign(half - tl.abs(z))
    d, e = y - p, z - q
    y2, z2 = y * y, z * z
    x1 = (x1 + tl.abs(y)) + tl.abs(z)
    x2 = (x2 + y2) + z2
    x4 = tl.fma(z2, z2, tl.fma(y2, y2, x4))
    e2 = tl.fma(e, e, tl.fma(d, d, e2))
    xe = tl.fma(z, e, tl.fma(y, d, xe))
    return codes, x1, x2, x4, e2, xe, both


@triton.jit
def _sums_of(pairs: tl.tuple, codes_ptr: tl.tensor, nothing: tl.tensor, divisor: tl.tensor, r: tl.tensor,
             tail: tl.tensor, LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, MANTISSA: tl.constexpr,
             NORMAL: tl.constexpr, CODE: tl.constexpr, COUNTED: tl.constexpr, CODES: tl.constexpr,
             CHUNKS: tl.constexpr, ASM: tl.constexpr) -> tuple[tl.tensor, ...]:
    """What `_add_pairs` adds up over the pairs of a slab without NaN, Inf and zeros; codes are stored."""
    n = tl.zeros_like(pairs[0])
    sums = n.to(tl.float32)
    s1, s2, s4, f2, fx = sums, sums, sums, sums, sums
    for k in tl.static_range(CHUNKS):
        x, z = widen(pairs[k])
        n, s1, s2, s4, f2, fx, both = _add_pairs(x, z, divisor, r, tail, n, s1, s2, s4, f2, fx, LARGEST,
                                                 SUBNORMAL, MANTISSA, NORMAL, CODE, COUNTED, False, ASM)
        if CODES:
            tl.store(codes_ptr + k * (pairs[0].shape[1] * pairs[0].shape[2]), both ^ nothing)
    s1, s2, s4 = tl.sum(s1, axis=2), tl.sum(s2, axis=2), tl.sum(s4, axis=2)
    return n, s1, s2, s4, tl.sum(f2, axis=2), tl.sum(fx, axis=2)


@triton.jit
def _count(pairs: tl.tensor, zeros: tl.tensor, nan: tl.tensor, inf: tl.tensor, most: tl.tensor,
           least: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Pairs by fate, place by place: counts, the greatest magnitude that is finite, the least but zero."""
    pairs = pairs & MAGNITUDES
    a, b = upper(pairs) << 16, pairs << 16
    zeros += (a == 0).to(tl.int32) + (b == 0).to(tl.int32)
    nan += (a > INFINITY).to(tl.int32) + (b > INFINITY).to(tl.int32)
    inf += (a == INFINITY).to(tl.int32) + (b == INFINITY).to(tl.int32)
    most = tl.maximum(most, tl.maximum(tl.where(a < INFINITY, a, 0), tl.where(b < INFINITY, b, 0)))
    a, b = tl.where(a > 0, a, INFINITY), tl.where(b > 0, b, INFINITY)
    return zeros, nan, inf, most, tl.minimum(least, tl.minimum(a, b))


@triton.jit
def _per_row(counts: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(counts, axis=2), axis=1)


@triton.jit
def measure_tiles(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, ints_ptr: tl.tensor,
                  reals_ptr: tl.tensor, program: tl.tensor, slot: tl.tensor, slots: tl.tensor, R: tl.tensor,
                  tiles: tl.tensor, stride: tl.tensor, slabs: tl.tensor, nothing: tl.tensor,
                  LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, BAD: tl.constexpr, MANTISSA: tl.constexpr,
                  NORMAL: tl.constexpr, CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr, CODES: tl.constexpr,
                  ASM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
                  VECTOR: tl.constexpr) -> None:
    """What one `program` of those of x [R, 128 tiles] does, `stride` pairs from row to row; its sums go to
    column `slot` of partial results with `slots` columns.

    nothing: 0, which ptxas does not know: codes that are stored as they are it packs in place, and unpacks
    them before they are written (12.8, and 12.9)."""
    CHUNK: tl.constexpr = VECTOR * LANES  # pairs of a row and load
    CHUNKS: tl.constexpr = TILE // 2 // CHUNK
    GROUP: tl.constexpr = ROWS if BLOCK else 1  # rows that share a scale
    tile = (program % tiles).to(tl.int64)
    first = (program // tiles).to(tl.int64) * slabs * ROWS
    lane = tl.arange(0, ROWS)
    first_of_group = lane % GROUP == 0
    column = tile * (TILE // 2) + (tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :])
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int16))
    nothing = nothing.to(tl.int16)

    none, zero = tl.zeros([ROWS, LANES], tl.float64), tl.zeros([ROWS], tl.int32)
    x1, x2, x4, e2, xe, uncoded_x2 = none, none, none, none, none, none
    spread1 = tl.zeros([ROWS], tl.float64)
    spread2 = spread1
    n_zeros, n_zeros_coded, n_zero_codes, n_nan, n_inf = zero, zero, zero, zero, zero
    n_uncoded, n_zero_blocks, n_bad = zero, zero, zero
    largest, highest, lowest, smallest = zero, zero, zero + INFINITY, zero + INFINITY

    here = tl.minimum(slabs, tl.cdiv(R - first, ROWS)).to(tl.int32)
    for i in range(here):
        rows = first + i * ROWS + lane
        at = spread(rows) * stride + column[None, :, :]
        pairs = ()
        for k in tl.static_range(CHUNKS):
            pairs += (tl.load(x_ptr + at + k * CHUNK),)  # type: ignore[assignment]
        high = pairs[0] & MAGNITUDES  # type: ignore[misc]
        low = high
        for k in tl.static_range(1, CHUNKS):
            high = pair_max(high, pairs[k] & MAGNITUDES, ASM)
            low = pair_min(low, pairs[k] & MAGNITUDES, ASM)
        most, least = extremes(high, low, ASM)
        amax_bits, least = most << 16, least << 16
        if BLOCK:
            amax_bits = tl.zeros_like(amax_bits) + tl.max(amax_bits, axis=0)
        scale = scale_of(amax_bits, LARGEST, POWER_OF_TWO)
        whole = amax_bits < INFINITY
        carry = tl.full([ROWS], 1.0, tl.float32)
        divisor, finite = scale, amax_bits
        r = tl.div_rn(1.0, divisor)
        tail = tl.fma(-divisor, r, 1.0) * r
        tiny = least.to(tl.float32, bitcast=True) < scale * (SUBNORMAL * 0.5078125)
        rare = tl.max((tiny | (amax_bits >= _HUGE)).to(tl.int32), axis=0) > 0
        to = codes_ptr + (spread(rows) * (tiles * (TILE // 2)) + column[None, :, :])
        n_codes = tl.full([ROWS], TILE, tl.int32)
        if rare:
            odd = tl.max(amax_bits, axis=0) >= _HUGE
            if odd | (tl.min(least, axis=0) == 0):
                zeros = tl.zeros([ROWS, LANES, VECTOR], tl.int32)
                nan, inf, top, some = zeros, zeros, zeros, zeros + INFINITY
                for j in range(CHUNKS):
                    again = tl.load(x_ptr + at + j * CHUNK)
                    zeros, nan, inf, top, some = _count(again, zeros, nan, inf, top, some)
                n_zero = _per_row(zeros)
                n_zeros += n_zero
                n_zeros_coded += tl.where(whole, n_zero, 0)
                n_nan += _per_row(nan)
                n_inf += _per_row(inf)
                n_uncoded += tl.where(whole, 0, TILE)
                n_zero_blocks += ((amax_bits == 0) & first_of_group).to(tl.int32)
                finite = tl.max(tl.max(top, axis=2), axis=1)
                least = tl.min(tl.min(some, axis=2), axis=1)
                unit = unit_of(finite.to(tl.float32, bitcast=True))
                shrink = tl.where(whole, tl.where(scale > 2.0**90, _SHRINK, 1.0), reciprocal(unit))
                carry = tl.where(whole, 1.0, unit)
                divisor = tl.where(whole, scale * shrink, 1.0)
                r = tl.div_rn(1.0, divisor)
                tail = tl.fma(-divisor, r, 1.0) * r
                sums = tl.zeros([ROWS, LANES, VECTOR], tl.float32)
                s1, s2, s4, f2, fx = sums, sums, sums, sums, sums
                n = tl.zeros([ROWS, LANES, VECTOR], tl.int32)
                for j in range(CHUNKS):
                    x, z = widen(tl.load(x_ptr + at + j * CHUNK))
                    x = tl.where(magnitude_bits(x) < INFINITY, x * spread(shrink), 0.0)
                    z = tl.where(magnitude_bits(z) < INFINITY, z * spread(shrink), 0.0)
                    n, s1, s2, s4, f2, fx, both = _add_pairs(
                        x, z, divisor, r, tail, n, s1, s2, s4, f2, fx, LARGEST, SUBNORMAL, MANTISSA, NORMAL,
                        CODE, True, CODES, ASM)
                    if CODES:
                        tl.store(to + j * CHUNK, tl.where(spread(whole), both ^ nothing, _NAN_CODES))
                t1, t2, t4 = tl.sum(s1, axis=2), tl.sum(s2, axis=2), tl.sum(s4, axis=2)
                g2, gx = tl.sum(f2, axis=2), tl.sum(fx, axis=2)
            else:
                n, t1, t2, t4, g2, gx = _sums_of(
                    pairs, to, nothing, divisor, r, tail, LARGEST, SUBNORMAL, MANTISSA, NORMAL, CODE, True,
                    CODES, CHUNKS, ASM)
            n_codes = _per_row(n)
        else:
            n, t1, t2, t4, g2, gx = _sums_of(
                pairs, to, nothing, divisor, r, tail, LARGEST, SUBNORMAL, MANTISSA, NORMAL, CODE, False,
                CODES, CHUNKS, ASM)
        largest = tl.maximum(largest, finite)
        smallest = tl.minimum(smallest, least)
        highest = tl.maximum(highest, tl.where(whole, amax_bits, 0))
        lowest = tl.minimum(lowest, tl.where(whole & (amax_bits > 0), amax_bits, INFINITY))

        if CODES:
            tl.store(scales_ptr + tile * R + rows, scale)
        weight = (scale.to(tl.float64) * carry.to(tl.float64))[:, None]
        square = weight * weight
        tile_x2 = t2.to(tl.float64) * square
        x1 += t1.to(tl.float64) * weight
        x4 += t4.to(tl.float64) * (square * square)
        tile_e2, tile_xe = g2.to(tl.float64) * square, gx.to(tl.float64) * square
        excess = tl.sum(g2 - BAD * t2, axis=1)
        if BLOCK:
            excess = tl.zeros_like(excess) + tl.sum(excess, axis=0)
        n_bad += (((excess > 0.0) | (whole == 0)) & first_of_group).to(tl.int32)
        bits = tl.where(first_of_group, log2(scale, ASM), 0.0)
        if rare:
            n_zero_codes += tl.where(whole, TILE - n_codes, 0)
            uncoded_x2 += tl.where(whole[:, None], 0.0, tile_x2)
            tile_x2 = tl.where(whole[:, None], tile_x2, 0.0)
            tile_e2 = tl.where(whole[:, None], tile_e2, 0.0)
            tile_xe = tl.where(whole[:, None], tile_xe, 0.0)
            bits = tl.where(whole & (amax_bits > 0), bits, 0.0)
        x2 += tile_x2
        e2 += tile_e2
        xe += tile_xe
        wide = bits.to(tl.float64)
        spread1 += wide
        spread2 += wide * wide

    slot, slots = slot.to(tl.int64), slots.to(tl.int64)
    elements = here * (ROWS * TILE)
    zeros, nan, inf = tl.sum(n_zeros, axis=0), tl.sum(n_nan, axis=0), tl.sum(n_inf, axis=0)
    zero_codes, uncoded = tl.sum(n_zero_codes, axis=0), tl.sum(n_uncoded, axis=0)
    zero_blocks = tl.sum(n_zero_blocks, axis=0)
    ints_ptr += slot
    tl.store(ints_ptr, elements - zeros - nan - inf)
    tl.store(ints_ptr + slots, nan)
    tl.store(ints_ptr + slots * 2, inf)
    tl.store(ints_ptr + slots * 3, elements - uncoded)
    tl.store(ints_ptr + slots * 4, zero_codes)
    tl.store(ints_ptr + slots * 5, zero_codes - tl.sum(n_zeros_coded, axis=0))
    tl.store(ints_ptr + slots * 6, 0)
    blocks = here * (ROWS // GROUP)
    tl.store(ints_ptr + slots * 7, blocks)
    tl.store(ints_ptr + slots * 8, zero_blocks)
    tl.store(ints_ptr + slots * 9, blocks - zero_blocks - uncoded // (GROUP * TILE))
    tl.store(ints_ptr + slots * 10, tl.sum(n_bad, axis=0))
    reals_ptr += slot
    coded_x2 = tl.sum(tl.sum(x2, axis=1), axis=0)
    tl.store(reals_ptr, coded_x2 + tl.sum(tl.sum(uncoded_x2, axis=1), axis=0))
    tl.store(reals_ptr + slots, tl.sum(tl.sum(x1, axis=1), axis=0))
    tl.store(reals_ptr + slots * 2, tl.sum(tl.sum(x4, axis=1), axis=0))
    tl.store(reals_ptr + slots * 3, coded_x2)
    tl.store(reals_ptr + slots * 4, tl.sum(tl.sum(e2, axis=1), axis=0))
    tl.store(reals_ptr + slots * 5, tl.sum(tl.sum(xe, axis=1), axis=0))
    tl.store(reals_ptr + slots * 6, tl.sum(spread1, axis=0))
    tl.store(reals_ptr + slots * 7, tl.sum(spread2, axis=0))
    low, high = tl.min(lowest, axis=0), tl.max(highest, axis=0)
    scaled = low < INFINITY
    amax = tl.max(largest, axis=0).to(tl.float32, bitcast=True)
    tl.store(reals_ptr + slots * 8, tl.where(elements > nan + inf, amax, NOT_MEASURED))
    tl.store(reals_ptr + slots * 9, -tl.min(smallest, axis=0).to(tl.float32, bitcast=True))
    low, high = scale_of(low, LARGEST, POWER_OF_TWO), scale_of(high, LARGEST, POWER_OF_TWO)
    tl.store(reals_ptr + slots * 10, tl.where(scaled, -low, NOT_MEASURED))
    tl.store(reals_ptr + slots * 11, tl.where(scaled, high, NOT_MEASURED))
    tl.store(reals_ptr + slots * 12, NOT_MEASURED)
