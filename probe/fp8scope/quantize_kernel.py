"""Triton twins of the quantizers in `quantize`: same scale policy, same codes, to the bit.

Every kernel reads its tile of x once, holds it in registers as fp32 and writes codes and scales.

How the policy survives the compiler:

- |x| is compared through its bits. As integers the bits of non-negative floats order like the floats, with
  Inf above every number and NaN above Inf, so one integer maximum finds amax *and* tells whether a tile holds
  anything non-finite. A float maximum would not do: `tl.max` drops NaN.
- Divisions are `div_rn`, the IEEE quotient that torch computes. Triton's `/` on fp32 is two units off at
  worst, and x * (1 / s) yields other codes.
- NaN codes are written as such; nothing relies on what a cast does with NaN or beyond the largest code.

Layout. x [R, C] may have any strides; offsets are 64-bit, for tensors beyond 2^31 elements. Codes are
row-major. Tile scales are written with rows adjacent, [R, ceil(C / 128)] of strides (1, R): neighbouring
threads own neighbouring rows, and block-scaled GEMMs take that layout. Block scales are row-major.

Rejected: tiles of x and of x.t() from one read, [128,128] a program: 616 us at 256 MiB where two kernels take
328 (docs/decisions/0011).

The casts need compute capability 8.9. Under TRITON_INTERPRET=1 the kernels run on CPU tensors; there some 2 %
of values get a wrong code: where rounding up should carry into the exponent, it loses the carry.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.quantize import DTYPES, Quantized
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import SMALLEST_SCALE, Format
from fp8scope_protocol.formats import TILE as TILE_EDGE

CODE_TYPES = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}
"""Formats whose codes a kernel can write, by name."""

TILE = tl.constexpr(TILE_EDGE)
SMALLEST = tl.constexpr(SMALLEST_SCALE)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of an fp32 but the sign
INFINITY = tl.constexpr(0x7F800000)  # the bits of Inf; those of a NaN are greater
NAN_CODE = tl.constexpr(0x7F)  # in E4M3 and in E5M2

_TILE_ROWS = 32  # [32,128] a program: 32 elements a thread, and 64 bytes along a column of a bf16 transpose


@triton.jit
def load_tile(x_ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor, R: tl.tensor, C: tl.tensor,
              stride_r: tl.tensor, stride_c: tl.tensor) -> tl.tensor:
    """x[rows, columns] as fp32; zeros outside of x."""
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    x = tl.load(x_ptr + rows[:, None] * stride_r + columns[None, :] * stride_c, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """The bits of |x|, int32: ordered like |x|, NaN last."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def scale_of(amax_bits: tl.tensor, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr) -> tl.tensor:
    """Twin of `quantize.scale_of`, from the bits of amax."""
    scale = tl.maximum(tl.div_rn(amax_bits.to(tl.float32, bitcast=True), LARGEST), SMALLEST)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & INFINITY).to(tl.float32, bitcast=True)
    return tl.where((amax_bits > 0) & (amax_bits < INFINITY), scale, 1.0)


@triton.jit
def encode(x: tl.tensor, scale: tl.tensor, amax_bits: tl.tensor,
           LARGEST: tl.constexpr, CODE: tl.constexpr) -> tl.tensor:
    """Codes of x as uint8; `scale` and `amax_bits` broadcast against x."""
    y = tl.div_rn(x, scale)
    code = tl.clamp(y, -LARGEST, LARGEST).to(CODE).to(tl.uint8, bitcast=True)
    return tl.where((amax_bits >= INFINITY) | (y != y), NAN_CODE, code)


@triton.jit(do_not_specialize=["scale_r", "scale_c"])
def _tiles_kernel(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, R: tl.tensor, C: tl.tensor,
                  stride_r: tl.tensor, stride_c: tl.tensor, scale_r: tl.tensor, scale_c: tl.tensor,
                  LARGEST: tl.constexpr, CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                  GIVEN: tl.constexpr, ROWS: tl.constexpr) -> None:
    tiles = tl.cdiv(C, TILE)
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tile * TILE + tl.arange(0, TILE)
    x = load_tile(x_ptr, rows, columns, R, C, stride_r, stride_c)
    amax_bits = tl.max(magnitude_bits(x), axis=1)
    scale_ptrs = scales_ptr + rows * scale_r + tile * scale_c
    if GIVEN:
        scale = tl.load(scale_ptrs, mask=rows < R, other=1.0)
    else:
        scale = scale_of(amax_bits, LARGEST, POWER_OF_TWO)
        tl.store(scale_ptrs, scale, mask=rows < R)
    codes = encode(x, scale[:, None], amax_bits[:, None], LARGEST, CODE)
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    tl.store(codes_ptr + rows[:, None] * C + columns[None, :], codes, mask=inside)


@triton.jit(do_not_specialize=["scale_r", "scale_c"])
def _blocks_kernel(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, R: tl.tensor, C: tl.tensor,
                   stride_r: tl.tensor, stride_c: tl.tensor, scale_r: tl.tensor, scale_c: tl.tensor,
                   LARGEST: tl.constexpr, CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                   GIVEN: tl.constexpr) -> None:
    blocks = tl.cdiv(C, TILE)
    i = (tl.program_id(0) // blocks).to(tl.int64)
    j = (tl.program_id(0) % blocks).to(tl.int64)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    x = load_tile(x_ptr, rows, columns, R, C, stride_r, stride_c)
    amax_bits = tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)
    if GIVEN:
        scale = tl.load(scales_ptr + i * scale_r + j * scale_c)
    else:
        scale = scale_of(amax_bits, LARGEST, POWER_OF_TWO)
        tl.store(scales_ptr + i * scale_r + j * scale_c, scale)
    codes = encode(x, scale, amax_bits, LARGEST, CODE)
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    tl.store(codes_ptr + rows[:, None] * C + columns[None, :], codes, mask=inside)


def quantize_tiles(
    x: Tensor, element: Format, *, scales: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """Twin of `quantize.quantize_tiles`; for the columnwise orientation pass x.t()."""
    check_matrix(x)
    rows, columns = x.shape
    tiles = triton.cdiv(columns, TILE_EDGE)
    used = _rows_adjacent(x, rows, tiles) if scales is None else scales.float().expand(rows, tiles)
    codes = _codes(x, rows, columns, element)
    if x.numel():
        grid = (triton.cdiv(rows, _TILE_ROWS) * tiles,)
        with torch.cuda.device_of(x):
            _tiles_kernel[grid](
                x, codes.view(torch.uint8), used, rows, columns, *x.stride(), *used.stride(),
                LARGEST=element.largest, CODE=CODE_TYPES[element.name], POWER_OF_TWO=power_of_two,
                GIVEN=scales is not None, ROWS=_TILE_ROWS, num_warps=4,
            )
    return Quantized(codes, used, "tile 1x128")


def quantize_blocks(
    x: Tensor, element: Format, *, scales: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """Twin of `quantize.quantize_blocks`."""
    check_matrix(x)
    rows, columns = x.shape
    shape = (triton.cdiv(rows, TILE_EDGE), triton.cdiv(columns, TILE_EDGE))
    used = x.new_empty(shape, dtype=torch.float32) if scales is None else scales.float().expand(shape)
    codes = _codes(x, rows, columns, element)
    if x.numel():
        with torch.cuda.device_of(x):
            _blocks_kernel[(shape[0] * shape[1],)](
                x, codes.view(torch.uint8), used, rows, columns, *x.stride(), *used.stride(),
                LARGEST=element.largest, CODE=CODE_TYPES[element.name], POWER_OF_TWO=power_of_two,
                GIVEN=scales is not None, num_warps=8,
            )
    return Quantized(codes, used, "block 128x128")


def check_matrix(x: Tensor) -> None:
    """`Invalid` unless x is [R, C]."""
    if x.dim() != 2:
        raise Invalid("x.dim()", x.dim(), "must be 2; flatten leading dimensions first")


def _codes(x: Tensor, rows: int, columns: int, element: Format) -> Tensor:
    return x.new_empty((rows, columns), dtype=DTYPES[element.name])


def _rows_adjacent(x: Tensor, rows: int, tiles: int) -> Tensor:
    """fp32 [rows, tiles] of strides (1, rows), uninitialised."""
    return x.new_empty((tiles, rows), dtype=torch.float32).t()
