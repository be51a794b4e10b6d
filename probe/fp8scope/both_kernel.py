"""Tiles of x and tiles of x.t() in one launch that reads x from memory once, for bf16 and E4M3.

The twin of two calls of `quantize.quantize_tiles`; what does not `pack_kernel.fits` goes through those.

How it works. Each block of [128, 128] has four programs, one after the other in the order of the launch: two
pack 64 of its rows, two pack 64 of its columns (`pack_kernel`). They run side by side, so the second pair
finds in the L2 cache what the first has read: at the most some 10 MB lie between them, of 60.

Measured on an H200, 256 MiB: 177 us, where two launches of `pack_kernel` take 202 and a copy 128; [16384,
2048]: 48 and 59. Rejected: one program for both orientations, which has 128 elements a thread to keep and
two scales for each (356 us, decision 0011); sums of the round trip of x on the way, a warp that walks down
128 rows beside four that pack columns (310 us and more, where two launches that measure take 245).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.launch_kernel import BoundLauncher, Launcher
from fp8scope.pack_kernel import WIDTH, constants_of, empty, fits, pack_columns, pack_rows
from fp8scope.quantize import Quantized
from fp8scope.quantize_kernel import TILE
from fp8scope_protocol.formats import TILE as TILE_EDGE
from fp8scope_protocol.formats import Format

_WARPS = 4
_REGISTERS = 80  # at most, so that 24 warps fit into a multiprocessor; what spills belongs to rare branches


@triton.jit
def _both_kernel(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, turned_ptr: tl.tensor,
                 turned_scales_ptr: tl.tensor, R: tl.tensor, C: tl.tensor, stride: tl.tensor,
                 LARGEST: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr, CODE: tl.constexpr,
                 POWER_OF_TWO: tl.constexpr, ASM: tl.constexpr, EDGE: tl.constexpr) -> None:
    """EDGE: rows, and columns, of a program."""
    PARTS: tl.constexpr = TILE // EDGE
    block, part = tl.program_id(0) // (2 * PARTS), tl.program_id(0) % (2 * PARTS)
    i, j = (block // (C // TILE)).to(tl.int64), (block % (C // TILE)).to(tl.int64)
    if part < PARTS:
        pack_rows(x_ptr, codes_ptr, scales_ptr, i * TILE + part * EDGE, j, R, C, stride, LARGEST, MANTISSA,
                  NORMAL, CODE, POWER_OF_TWO, ASM, EDGE)
    else:
        pack_columns(x_ptr, turned_ptr, turned_scales_ptr, j * PARTS + (part - PARTS), i, R, C, stride,
                     LARGEST, MANTISSA, NORMAL, CODE, POWER_OF_TWO, ASM, EDGE, False)


def quantize_both(
    x: Tensor, element: Format, *, power_of_two: bool = False
) -> tuple[Quantized, Quantized] | None:
    """`quantize.quantize_tiles` of x [R, C] and of x.t(); None if x does not fit."""
    if not fits(x, element, TILE_EDGE):
        return None
    rows, columns = x.shape
    codes, scales = empty(x, rows, columns, element)
    turned, turned_scales = empty(x, columns, rows, element)
    _both(element, power_of_two, x.is_cuda)(
        (rows // TILE_EDGE) * (columns // TILE_EDGE) * 2 * (TILE_EDGE // WIDTH), x, codes.view(torch.uint8),
        scales, turned.view(torch.uint8), turned_scales, rows, columns, x.stride(0) // 2)
    return Quantized(codes, scales.t(), "tile 1x128"), Quantized(turned, turned_scales.t(), "tile 1x128")


@cache
def _both(element: Format, power_of_two: bool, compiled: bool) -> BoundLauncher:
    constants = constants_of(element, power_of_two, compiled) | {"EDGE": WIDTH}
    return Launcher(_both_kernel).bound(constants, num_warps=_WARPS, maxnreg=_REGISTERS)
