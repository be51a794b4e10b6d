"""One launch for a step of many parameters: states are read, decoded, moved, rounded and written in a pass.

The twin of `step.update`: codes and scales to the bit, weights but for the last bit of a few quotients. A
program takes a tile of one parameter, whose addresses it finds in a table (`step_table`). Nothing is read or
written twice: with fp8 or int8 states, fp32 weights and gradients 16 bytes an element and the scales.

At that rate an element may take some hundred instructions, so they are counted; for sm_90 and fp8 84 are
left. What most tiles do not need is in branches of a whole tile: IEEE roots and quotients of tiny or
infinite numbers, codes below 2^-6, lost moments, clipped updates, blocks that are not finite. A minimum or
maximum of the tile chooses, one instruction across a warp, as a warp reads a block at a time. A program takes
several tiles in turn: where each had its own, finding addresses and adding sums up across the warp took a
third of the instructions. Multiply-adds are not fused where the reference rounds twice. One hash serves both
moments; an element has one division.

Measured on an H200, 1.07 B parameters, times the memory floor: fp8 1.05, int8 1.05, int4 1.08, int16 1.03,
bf16 1.02, fp32 1.04. Rejected, of fp8 unless it is said: one tile a program 1.44; 64 registers a thread 1.43;
two blocks side by side in a warp, one tile a program 1.43 (int8 1.29); a block of int8 in one warp 1.19, in
one warp and four pieces, one after the other, 1.45; warps on chunks of a block instead of on parts of its
width 2.6 to 4.0; IEEE roots and quotients for all, which branch for each element.
"""

import triton
import triton.language as tl

from fp8scope_trainer.chance_kernel import hashes, least, mix, to_bf16
from fp8scope_trainer.state_kernel import decoded, put, read, top_of, write

_OF_WEIGHTS = tl.constexpr(0x9E3779B9)
_INFINITY = tl.constexpr(0x7F800000)
_QUICK = tl.constexpr(0x26800000)  # 2^-50


@triton.jit
def _quick_root(x: tl.tensor, COMPILED: tl.constexpr) -> tl.tensor:
    """sqrt(x), to the bit from 2^-100 on; of less, of 0 and of Inf it is less than 2^-50, negative or NaN."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 r, s, h, e;
            rsqrt.approx.ftz.f32 r, $1;
            mul.rn.f32 s, $1, r;
            mul.rn.f32 h, r, 0f3F000000;
            neg.f32 e, s;
            fma.rn.f32 e, e, s, $1;
            fma.rn.f32 $0, e, h, s;
            }
            """, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def _quick_quotient(a: tl.tensor, b: tl.tensor, COMPILED: tl.constexpr) -> tl.tensor:
    """a / b, to the bit but for one in millions; b in [2^-100, 2^100]."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 n, r, e, q;
            rcp.approx.ftz.f32 r, $2;
            neg.f32 n, $2;
            fma.rn.f32 e, n, r, 0f3F800000;
            fma.rn.f32 r, e, r, r;
            mul.rn.f32 q, $1, r;
            fma.rn.f32 e, n, q, $1;
            fma.rn.f32 $0, e, r, q;
            }
            """, "=&f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(a, b)


@triton.jit
def _adam(m: tl.tensor, v: tl.tensor, correction1: tl.tensor, correction2: tl.tensor, eps: tl.tensor,
          QUICK: tl.constexpr, COMPILED: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """sqrt(v), `top_of` it and its least bits, and the update.

    IEEE roots and quotients branch for each element. Without, they hold in a range that their own bits tell;
    a tile with another element, seldom one, is computed again."""
    if QUICK:
        root = _quick_root(v, COMPILED)
        top, low = top_of(root, False), least(root.to(tl.int32, bitcast=True))
        if (low < _QUICK) | (tl.max(top, axis=0) >= _INFINITY):
            root = tl.sqrt_rn(v)
            top, low = top_of(root, False), least(root.to(tl.int32, bitcast=True))
            u = tl.div_rn(m * correction1, root * correction2 + eps)
        else:
            u = _quick_quotient(m * correction1, root * correction2 + eps, COMPILED)
    else:
        root = tl.sqrt_rn(v)
        top, low = top_of(root, False), least(root.to(tl.int32, bitcast=True))
        u = tl.div_rn(m * correction1, root * correction2 + eps)
    return root, top, low, u


@triton.jit
def _flat(x: tl.tensor) -> tl.tensor:
    """[WIDTH]: of a tile of numbers the sum over what a thread has in registers."""
    return tl.sum(tl.sum(x, axis=0), axis=0)


@triton.jit
def _added(sums: tl.tuple, w: tl.tensor, m: tl.tensor, root: tl.tensor, low: tl.tensor, u: tl.tensor,
           clipped: tl.tensor, clip: tl.tensor, PAIR: tl.constexpr) -> tl.tuple:
    """A tile's share of `StepStats` added to the program's: the numbers of `step.ROW`, without lr. The
    largest are bits, int32 [WIDTH]; what is lost and clipped int32; changes and weights fp32 [WIDTH]."""
    largest, lost, beyond, changes, weights = sums
    bits = u.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(tl.max(bits, axis=0), axis=0)
    if PAIR:  # noqa: SIM102  (known when compiled; the other is not)
        if low == 0:  # seldom
            lost += tl.sum(_flat(((root == 0.0) & (m != 0.0)).to(tl.int32)), axis=0)
    if tl.max(top, axis=0).to(tl.float32, bitcast=True) > clip:
        beyond += tl.sum(_flat((tl.abs(u) > clip).to(tl.int32)), axis=0)
    return (tl.maximum(largest, top), lost, beyond, changes + _flat(clipped * clipped),
            weights + _flat(w * w))


@triton.jit
def _moved(w_ptr: tl.tensor, g_ptr: tl.tensor, m_ptr: tl.tensor, v_ptr: tl.tensor, ms: tl.tensor,
           vs: tl.tensor, offset: tl.tensor, inside: tl.tensor, packed: tl.tensor, whole: tl.tensor,
           first: tl.tensor, key: tl.tensor, sums: tl.tuple, coefficient: tl.tensor, by: tl.tuple,
           RULE: tl.constexpr, FORMAT: tl.constexpr, WEIGHT: tl.constexpr, SCALED: tl.constexpr,
           CLIPPED: tl.constexpr, WIDE: tl.constexpr, QUICK: tl.constexpr, COMPILED: tl.constexpr,
           MASKED: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tuple]:
    """Moves the weights of a tile. Its moments (of blocks the root of the second), the `top_of` the second,
    and the sums with its share."""
    lr, decay, beta1, rest1, beta2, rest2, correction1, correction2, eps, clip = by
    PAIR: tl.constexpr = RULE == "adamw" or RULE == "adam"
    BLOCKS: tl.constexpr = FORMAT != "fp32" and FORMAT != "bf16"
    w = read(w_ptr, offset, inside, MASKED).to(tl.float32)
    g = read(g_ptr, offset, inside, MASKED).to(tl.float32)
    m = decoded(read(m_ptr, packed, whole, MASKED), ms, FORMAT, True)
    v = m
    if PAIR:
        v = decoded(read(v_ptr, packed, whole, MASKED), vs, FORMAT, False)
        if BLOCKS:
            m = tl.where(v == 0.0, 0.0, m)
            v = v * v
    if SCALED:
        g *= coefficient
    if RULE != "adamw" and RULE != "lion":
        g += decay * w
    top, low, root = 0, 1, m
    if PAIR:
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * (g * g)
        root, top, low, u = _adam(m, v, correction1, correction2, eps, QUICK, COMPILED)
    elif RULE == "lion":
        u = beta1 * m + rest1 * g
        u = (u > 0.0).to(tl.float32) - (u < 0.0).to(tl.float32)
        m = beta2 * m + rest2 * g
    else:
        m = beta1 * m + g
        u = g + beta1 * m if RULE == "nesterov" else m
    clipped = u
    if CLIPPED:
        clipped = tl.minimum(tl.maximum(u, -clip, propagate_nan=tl.PropagateNan.ALL), clip,
                             propagate_nan=tl.PropagateNan.ALL)
    sums = _added(sums, w, m, root, low, u, clipped, clip, PAIR)
    if RULE == "adamw" or RULE == "lion":
        w *= decay
    w -= lr * clipped
    if tl.bfloat16 == WEIGHT:
        w = to_bf16(w, hashes(mix(key ^ _OF_WEIGHTS), first, offset, WIDE) >> 16)
    write(w_ptr, offset, w, inside, MASKED)
    return m, root if PAIR and BLOCKS else v, top, sums


@triton.jit
def _tile(w_ptr: tl.tensor, g_ptr: tl.tensor, m_ptr: tl.tensor, v_ptr: tl.tensor, ms_ptr: tl.tensor,
          vs_ptr: tl.tensor, offset: tl.tensor, inside: tl.tensor, packed: tl.tensor, whole: tl.tensor,
          place: tl.tensor, there: tl.tensor, first: tl.tensor, key: tl.tensor, sums: tl.tuple,
          coefficient: tl.tensor, by: tl.tuple, RULE: tl.constexpr, FORMAT: tl.constexpr,
          WEIGHT: tl.constexpr, LARGEST_M: tl.constexpr, LARGEST_V: tl.constexpr, SCALED: tl.constexpr,
          CLIPPED: tl.constexpr, WIDE: tl.constexpr, QUICK: tl.constexpr, COMPILED: tl.constexpr,
          MASKED: tl.constexpr) -> tl.tuple:
    """offset, inside [CHUNKS, ROWS, WIDTH]; packed, whole: the same of the codes; place, there [ROWS]: of
    scales. Returns the sums with this tile's share."""
    PAIR: tl.constexpr = RULE == "adamw" or RULE == "adam"
    BLOCKS: tl.constexpr = FORMAT != "fp32" and FORMAT != "bf16"
    ms = read(ms_ptr, place, there, MASKED) if BLOCKS else 1.0
    vs = read(vs_ptr, place, there, MASKED) if BLOCKS and PAIR else 1.0
    m, v, top, sums = _moved(
        w_ptr, g_ptr, m_ptr, v_ptr, ms, vs, offset, inside, packed, whole, first, key, sums, coefficient, by,
        RULE, FORMAT, WEIGHT, SCALED, CLIPPED, WIDE, QUICK, COMPILED, MASKED)
    random = hashes(key, first, offset, WIDE)
    put(m_ptr, ms_ptr, packed, place, m, top_of(m, True), random, whole, there, FORMAT, True, LARGEST_M,
        MASKED, COMPILED)
    if PAIR:
        put(v_ptr, vs_ptr, packed, place, v, top, random, whole, there, FORMAT, False, LARGEST_V, MASKED,
            COMPILED)
    return sums


@triton.jit(do_not_specialize=["parts", "key"])
def step_kernel(table_ptr: tl.tensor, gradient_ptr: tl.tensor, part_ptr: tl.tensor,
                coefficient_ptr: tl.tensor, out_ptr: tl.tensor, parts: tl.tensor, key: tl.tensor,
                lr: tl.tensor, decay: tl.tensor, beta1: tl.tensor, rest1: tl.tensor, beta2: tl.tensor,
                rest2: tl.tensor, correction1: tl.tensor, correction2: tl.tensor, eps: tl.tensor,
                clip: tl.tensor, RULE: tl.constexpr, FORMAT: tl.constexpr, WEIGHT: tl.constexpr,
                GRADIENT: tl.constexpr, STORED_M: tl.constexpr, STORED_V: tl.constexpr,
                LARGEST_M: tl.constexpr, LARGEST_V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                TILES: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
                ALIGNED: tl.constexpr, SCALED: tl.constexpr, CLIPPED: tl.constexpr, WIDE: tl.constexpr,
                QUICK: tl.constexpr, COMPILED: tl.constexpr) -> None:
    """A program takes TILES tiles of the parameter that `part_ptr` names; the table is `step_table`'s."""
    program = tl.program_id(0)
    part = tl.load(part_ptr + program)
    table_ptr, out_ptr = table_ptr + part, out_ptr + program
    g_ptr = tl.load(gradient_ptr + part).to(tl.pointer_type(GRADIENT))
    w_ptr = tl.load(table_ptr).to(tl.pointer_type(WEIGHT))
    m_ptr = tl.load(table_ptr + parts).to(tl.pointer_type(STORED_M))
    v_ptr = tl.load(table_ptr + 2 * parts).to(tl.pointer_type(STORED_V))
    ms_ptr = tl.load(table_ptr + 3 * parts).to(tl.pointer_type(tl.float32))
    vs_ptr = tl.load(table_ptr + 4 * parts).to(tl.pointer_type(tl.float32))
    rows = tl.load(table_ptr + 5 * parts)  # if EVEN, elements
    stream = tl.load(table_ptr + 7 * parts).to(tl.uint32)
    first = tl.load(table_ptr + 8 * parts)
    tile = (program - tl.load(table_ptr + 9 * parts).to(tl.int32)) * TILES
    if ALIGNED:
        w_ptr, g_ptr = tl.multiple_of(w_ptr, 16), tl.multiple_of(g_ptr, 16)
        m_ptr, v_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16)
    key = mix(key.to(tl.uint32, bitcast=True) ^ stream)
    coefficient = tl.load(coefficient_ptr) if SCALED else 1.0

    PACKED: tl.constexpr = FORMAT == "int4"
    SHORT: tl.constexpr = BLOCK // 2 if PACKED else BLOCK  # codes of a block
    THIN: tl.constexpr = WIDTH // 2 if PACKED else WIDTH  # and of a chunk of it
    chunk = tl.arange(0, BLOCK // WIDTH)[:, None, None]
    place = tl.arange(0, ROWS)
    row = place[None, :, None]
    lane = chunk * WIDTH + tl.max_contiguous(tl.arange(0, WIDTH), VECTOR)[None, None, :]
    code = tl.max_contiguous(tl.arange(0, THIN), VECTOR // 2 if PACKED else VECTOR)[None, None, :]
    code = chunk * THIN + code
    by = lr, decay, beta1, rest1, beta2, rest2, correction1, correction2, eps, clip
    nothing = tl.zeros((WIDTH,), tl.float32)
    sums = nothing.to(tl.int32), 0, 0, nothing, nothing
    if EVEN:
        offset, packed = row * BLOCK + lane, row * SHORT + code
        last = (rows // (ROWS * BLOCK)).to(tl.int32)  # the first tile that is not whole
        top = tile.to(tl.int64) * ROWS
        for _ in range(tile, tl.minimum(tile + TILES, last)):
            begin = top * BLOCK
            sums = _tile(w_ptr + begin, g_ptr + begin, m_ptr + top * SHORT, v_ptr + top * SHORT, ms_ptr + top,
                         vs_ptr + top, offset, offset, packed, packed, place, place, first + begin, key, sums,
                         coefficient, by, RULE, FORMAT, WEIGHT, LARGEST_M, LARGEST_V, SCALED, CLIPPED, WIDE,
                         QUICK, COMPILED, False)
            top += ROWS
        begin = top * BLOCK
        if (last >= tile) & (last < tile + TILES) & (begin < rows):
            left = (rows - begin).to(tl.int32)
            sums = _tile(w_ptr + begin, g_ptr + begin, m_ptr + top * SHORT, v_ptr + top * SHORT, ms_ptr + top,
                         vs_ptr + top, offset, offset < left, packed,
                         packed < (left // 2 if PACKED else left), place, place * BLOCK < left, first + begin,
                         key, sums, coefficient, by, RULE, FORMAT,
                         WEIGHT, LARGEST_M, LARGEST_V, SCALED, CLIPPED, WIDE, QUICK, COMPILED, True)
    else:
        columns = tl.load(table_ptr + 6 * parts).to(tl.int32)
        if ALIGNED:
            columns = tl.multiple_of(columns, 16)
        blocks = tl.cdiv(columns, BLOCK)
        stride = (columns + 1) // 2 if PACKED else columns
        for at in range(tile, tl.minimum(tile + TILES, tl.cdiv(rows, ROWS).to(tl.int32) * blocks)):
            block, top = at % blocks, tl.cast(at // blocks, tl.int64) * ROWS
            begin, start = top * columns + block * BLOCK, top * stride + block * SHORT
            there = top + place < rows
            inside = there[None, :, None] & (lane < columns - block * BLOCK)
            whole = there[None, :, None] & (code < stride - block * SHORT)
            sums = _tile(w_ptr + begin, g_ptr + begin, m_ptr + start, v_ptr + start,
                         ms_ptr + top * blocks + block, vs_ptr + top * blocks + block, row * columns + lane,
                         inside, row * stride + code, whole, place * blocks, there, first + begin, key, sums,
                         coefficient, by, RULE, FORMAT, WEIGHT, LARGEST_M, LARGEST_V, SCALED, CLIPPED, WIDE,
                         QUICK, COMPILED, True)
    programs = tl.num_programs(0)
    tl.store(out_ptr, tl.max(sums[0], axis=0).to(tl.float32, bitcast=True))
    tl.store(out_ptr + programs, sums[1])
    tl.store(out_ptr + 2 * programs, sums[2])
    tl.store(out_ptr + 3 * programs, tl.sum(sums[3], axis=0))
    tl.store(out_ptr + 4 * programs, tl.sum(sums[4], axis=0))
