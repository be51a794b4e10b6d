"""Tiles of x and tiles of x.t() in one launch that reads x from memory once, for bf16 and E4M3.

The twin of two calls of `quantize.quantize_tiles`; what does not `pack_kernel.fits` goes through those. With
`out`, the round trip of the tiles of x is measured on the way.

How it works. Programs for the rows and for the columns of one part of x follow one another in the order of
the launch, so they run side by side, and the later ones find in the L2 cache what the first have read: at
the most some 10 MB lie between them, of 60. A block of [128, 128] has four, two for 64 of its rows each and
two for 64 of its columns (`pack_kernel`). Measured, its rows are one warp's that walks down them
(`tile_body_kernel`), beside four for 32 columns each: the arithmetic of sums is done while columns wait for
memory.

Rejected (decision 0011): one program for both orientations, which has 128 elements a thread to keep and two
scales for each: 356 us for 256 MiB, where two launches of `pack_kernel` take 201.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope import tile_kernel
from fp8scope.launch_kernel import BoundLauncher, Launcher
from fp8scope.pack_kernel import WIDTH, constants_of, empty, fits, pack_columns, pack_rows
from fp8scope.partials_kernel import Partials
from fp8scope.quantize import Quantized
from fp8scope.quantize_kernel import TILE
from fp8scope.sums import RowSums
from fp8scope.tile_body_kernel import measure_tiles
from fp8scope_protocol.formats import TILE as TILE_EDGE
from fp8scope_protocol.formats import Format

WARPS, BLOCKS = 1, 1
"""Of a program, and of what it measures, where it does."""
_WARPS = 4
_REGISTERS = 80  # at most; what does not fit belongs to rare branches


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


@triton.jit
def _summed_kernel(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, turned_ptr: tl.tensor,
                   turned_scales_ptr: tl.tensor, ints_ptr: tl.tensor, reals_ptr: tl.tensor, R: tl.tensor,
                   C: tl.tensor, stride: tl.tensor, slots: tl.tensor, nothing: tl.tensor,
                   LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, BAD: tl.constexpr, MANTISSA: tl.constexpr,
                   NORMAL: tl.constexpr, CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr, ASM: tl.constexpr,
                   ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, BLOCKS: tl.constexpr,
                   EDGE: tl.constexpr) -> None:
    """A slot of partial results for BLOCKS blocks below one another; EDGE: columns of a program."""
    PARTS: tl.constexpr = TILE // EDGE
    slot, part = tl.program_id(0) // (1 + BLOCKS * PARTS), tl.program_id(0) % (1 + BLOCKS * PARTS)
    tiles = C // TILE
    if part == 0:
        measure_tiles(x_ptr, codes_ptr, scales_ptr, ints_ptr, reals_ptr, slot, slot, slots, R, tiles, stride,
                      BLOCKS * TILE // ROWS, nothing, LARGEST, SUBNORMAL, BAD, MANTISSA, NORMAL, CODE,
                      POWER_OF_TWO, True, ASM, False, ROWS, LANES, VECTOR)
    else:
        i = (slot // tiles).to(tl.int64) * BLOCKS + (part - 1) // PARTS
        j = (slot % tiles).to(tl.int64)
        if i * TILE < R:
            pack_columns(x_ptr, turned_ptr, turned_scales_ptr, j * PARTS + (part - 1) % PARTS, i, R, C,
                         stride, LARGEST, MANTISSA, NORMAL, CODE, POWER_OF_TWO, ASM, EDGE, False)


def quantize_both(
    x: Tensor, element: Format, *, power_of_two: bool = False, out: RowSums | None = None
) -> tuple[Quantized, Quantized] | None:
    """`quantize.quantize_tiles` of x [R, C] and of x.t(); None if x does not fit. The round trip of x itself
    is added to `out`, but for the histogram."""
    if not fits(x, element, TILE_EDGE):
        return None
    if out is not None:
        return _summed(x, element, power_of_two, out) if _measurable(x, element) else None
    rows, columns = x.shape
    codes, scales = empty(x, rows, columns, element)
    turned, turned_scales = empty(x, columns, rows, element)
    _both(element, power_of_two, x.is_cuda)(
        (rows // TILE_EDGE) * (columns // TILE_EDGE) * 2 * (TILE_EDGE // WIDTH), x, codes.view(torch.uint8),
        scales, turned.view(torch.uint8), turned_scales, rows, columns, x.stride(0) // 2)
    return Quantized(codes, scales.t(), "tile 1x128"), Quantized(turned, turned_scales.t(), "tile 1x128")


def _measurable(x: Tensor, element: Format) -> bool:
    return tile_kernel.fits(x, element, "tile 1x128")


def _summed(x: Tensor, element: Format, power_of_two: bool, out: RowSums) -> tuple[Quantized, Quantized]:
    rows, columns = x.shape
    codes, scales = empty(x, rows, columns, element)
    turned, turned_scales = empty(x, columns, rows, element)
    slots = -(-rows // (TILE_EDGE * BLOCKS)) * (columns // TILE_EDGE)
    partials = Partials(x, slots, histogram=False)
    _measuring(element, power_of_two, x.is_cuda)(
        slots * (1 + BLOCKS * (TILE_EDGE // (32 * WARPS))), x, codes.view(torch.uint8), scales,
        turned.view(torch.uint8), turned_scales, partials.ints, partials.reals, rows, columns,
        x.stride(0) // 2, slots, 0)
    partials.merge_into(out, x)
    return Quantized(codes, scales.t(), "tile 1x128"), Quantized(turned, turned_scales.t(), "tile 1x128")


@cache
def _measuring(element: Format, power_of_two: bool, compiled: bool) -> BoundLauncher:
    return Launcher(_summed_kernel).bound(measuring_constants(element, power_of_two, compiled),
                                          num_warps=WARPS)


def measuring_constants(element: Format, power_of_two: bool, compiled: bool, *, warps: int = WARPS,
                        blocks: int = BLOCKS) -> dict[str, Any]:
    """Of `_summed_kernel`."""
    given = tile_kernel.constants_of(element, "tile 1x128", power_of_two, coded=True, flagged=False,
                                     compiled=compiled)
    names = ("LARGEST", "SUBNORMAL", "BAD", "MANTISSA", "NORMAL", "CODE", "POWER_OF_TWO", "ASM")
    return {name: given[name] for name in names} | {
        "ROWS": given["ROWS"] * warps, "LANES": given["LANES"], "VECTOR": given["VECTOR"], "BLOCKS": blocks,
        "EDGE": 32 * warps}


@cache
def _both(element: Format, power_of_two: bool, compiled: bool) -> BoundLauncher:
    constants = constants_of(element, power_of_two, compiled) | {"EDGE": WIDTH}
    return Launcher(_both_kernel).bound(constants, num_warps=_WARPS, maxnreg=_REGISTERS)
