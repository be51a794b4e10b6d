"""Tiles of row-major bf16 from one read: their round trip, alone or with codes; of blocks the round trip.

The twin of `roundtrip.round_trip` for what training measures most, and of `quantize.quantize_tiles` where the
round trip of what it quantizes is asked for, too; codes alone come from `pack_kernel`. What does not `fits`
goes to `roundtrip_kernel` and `quantize_kernel`.

How it works. A program is one warp. It walks down `slabs` slabs of [16, 128]: two threads a tile, 64
elements each, held in 32 registers as pairs (`pair_kernel`), so x is read once. For [128,128] blocks eight
warps do the same to a slab of 128 rows. What an element costs, in instructions:

    extremes       1.5   and, max and min on pairs
    the quotient   3     widened; y = fma(x, r, x tail) with r = 1 / s, tail = (1 - s r) r: for bf16 and
                         s = amax / 448 the IEEE quotient, for every pair of significands (128 x 128 tried)
    the code       2     a pair at once, to E4M3 and back
    the sums       7     of |y|, y^2, y^4, e^2 and y e

Sums of a thread's elements are fp32; multiplied by powers of the scale they are added in float64, thread by
thread. Adding up the threads of a tile first would take ten shuffles a tile. The extremes of scales follow
from those of amax.

What is rare branches, a slab at a time. Where the least |x| shows that codes of zero exist they are counted;
zeros, NaN, Inf and magnitudes of 2^100 and more, where 1 / s could be denormal, take a path of their own
that reads the slab again. Branches inside of the sums cost a tenth of the speed.

Rejected, with their share of the read bandwidth at 256 MiB where this form has 88 %: four threads a tile
(77 %), no cap on registers (83 %), a cap of 112 (63 %), of 96 (76 %).
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.launch_kernel import Launcher
from fp8scope.pair_kernel import packs
from fp8scope.partials_kernel import Partials
from fp8scope.quantize import DTYPES, Quantized
from fp8scope.quantize_kernel import CODE_TYPES
from fp8scope.roundtrip import bad_block_error
from fp8scope.sums import RowSums
from fp8scope.tile_body_kernel import measure_tiles
from fp8scope_protocol.formats import TILE as TILE_EDGE
from fp8scope_protocol.formats import Format, parse_scaling

ROWS = {"tile 1x128": 16, "block 128x128": 128}
"""Of a slab, by scaling."""

_TILES = {"BLOCK": False, "ROWS": ROWS["tile 1x128"], "LANES": 2, "VECTOR": 4}
_CODED = _TILES | {"VECTOR": 8}  # 16 bytes of codes a thread and store
_BLOCKS = {"BLOCK": True, "ROWS": ROWS["block 128x128"], "LANES": 2, "VECTOR": 4}
_THREADS = 2  # a row
REGISTERS = 128  # at most, without codes: with more, not 16 warps fit into a multiprocessor
_WARPS = 132 * 16, 132 * 12  # on an H200 at once, without and with codes
_MOST_SLABS = 1024


@triton.jit(do_not_specialize=["R", "tiles", "slabs", "nothing"])
def _tile_kernel(x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, ints_ptr: tl.tensor,
                 reals_ptr: tl.tensor, flag_ptr: tl.tensor, R: tl.tensor, tiles: tl.tensor, stride: tl.tensor,
                 slabs: tl.tensor, nothing: tl.tensor,
                 LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, BAD: tl.constexpr, MANTISSA: tl.constexpr,
                 NORMAL: tl.constexpr, CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                 CODES: tl.constexpr, FLAGGED: tl.constexpr, ASM: tl.constexpr, BLOCK: tl.constexpr,
                 ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr) -> None:
    if FLAGGED:  # noqa: SIM102
        if tl.load(flag_ptr) == 0:
            return
    program = tl.program_id(0)
    measure_tiles(x_ptr, codes_ptr, scales_ptr, ints_ptr, reals_ptr, program, program, tl.num_programs(0), R,
                  tiles, stride, slabs, nothing, LARGEST, SUBNORMAL, BAD, MANTISSA, NORMAL, CODE,
                  POWER_OF_TWO, CODES, ASM, BLOCK, ROWS, LANES, VECTOR)


def fits(x: Tensor, element: Format, scaling: str) -> bool:
    """Whether x [R, C] is what the kernel takes: bf16 in whole slabs, rows that begin at 64 bytes, for E4M3.

    On the CPU too, where the kernel runs in Triton's interpreter only.
    """
    rows = ROWS.get(scaling)
    return (
        rows is not None and x.dtype == torch.bfloat16 and element.name == "e4m3" and x.dim() == 2
        and x.numel() > 0 and x.shape[0] % rows == 0 and x.shape[1] % TILE_EDGE == 0
        and x.stride(1) == 1 and x.stride(0) % 32 == 0 and x.data_ptr() % 16 == 0
        and (not x.is_cuda or packs(x.device))
    )


def round_trip(
    x: Tensor, element: Format, scaling: str, *, power_of_two: bool = False, out: RowSums | None = None,
    flag: Tensor | None = None,
) -> RowSums:
    """`roundtrip.round_trip` of current scales but for the histogram, of what `fits`; flag: see `backend`."""
    row = RowSums.zeros(x.device) if out is None else out
    constants = constants_of(element, scaling, power_of_two, coded=False, flagged=flag is not None,
                             compiled=x.is_cuda)
    programs, *sizes = _cut(x, constants["ROWS"], coded=False)
    partials = Partials(x, programs, histogram=False)
    when = partials.ints if flag is None else flag
    _launch(programs, x, x, x, partials.ints, partials.reals, when, *sizes, 0, constants=constants,
            num_warps=warps_of(constants["ROWS"]), maxnreg=REGISTERS)
    partials.merge_into(row, x, flag)
    return row


def quantize_tiles(x: Tensor, element: Format, *, power_of_two: bool = False, out: RowSums) -> Quantized:
    """`quantize.quantize_tiles` for what `fits`; its round trip is added to `out`, but for the histogram."""
    codes = x.new_empty(x.shape, dtype=DTYPES[element.name])
    scales = x.new_empty((x.shape[1] // TILE_EDGE, x.shape[0]), dtype=torch.float32).t()
    constants = constants_of(element, "tile 1x128", power_of_two, coded=True, flagged=False,
                             compiled=x.is_cuda)
    programs, *sizes = _cut(x, constants["ROWS"], coded=True)
    partials = Partials(x, programs, histogram=False)
    _launch(programs, x, codes.view(torch.uint8), scales, partials.ints, partials.reals, partials.ints,
            *sizes, 0, constants=constants, num_warps=1)
    partials.merge_into(out, x)
    return Quantized(codes, scales, "tile 1x128")


def warps_of(rows: int) -> int:
    """Of a program whose slabs have so many rows."""
    return rows * _THREADS // 32


def resident(rows: int, *, coded: bool) -> int:
    """Such programs on an H200 at once."""
    return _WARPS[coded] // warps_of(rows)


def _cut(x: Tensor, rows: int, *, coded: bool) -> tuple[int, int, int, int, int]:
    """How many programs; rows and tiles of x, pairs from row to row; slabs of a program."""
    steps, tiles = x.shape[0] // rows, x.shape[1] // TILE_EDGE
    slabs = _slabs(steps, tiles, resident(rows, coded=coded))
    return -(-steps // slabs) * tiles, x.shape[0], tiles, x.stride(0) // 2, slabs


@functools.lru_cache(1024)
def _slabs(steps: int, tiles: int, resident: int) -> int:
    """Slabs a program: the fewest waves of `resident` programs, each dearer by its set-up."""
    most = min(steps, _MOST_SLABS)
    return min(range(1, most + 1), key=lambda s: -(-(-(-steps // s) * tiles) // resident) * (s + 1.0))


@functools.lru_cache(64)
def constants_of(
    element: Format, scaling: str, power_of_two: bool, *, coded: bool, flagged: bool, compiled: bool
) -> dict[str, Any]:
    """The kernel's constants."""
    layout = _CODED if coded else _BLOCKS if scaling == "block 128x128" else _TILES
    return {
        "LARGEST": element.largest, "SUBNORMAL": element.smallest_subnormal,
        "BAD": bad_block_error(element, parse_scaling(scaling)), "MANTISSA": element.mantissa_bits,
        "NORMAL": 127 + int(math.log2(element.smallest_normal)), "CODE": CODE_TYPES[element.name],
        "POWER_OF_TWO": power_of_two, "CODES": coded, "FLAGGED": flagged, "ASM": compiled,
        **layout,
    }


_launch = Launcher(_tile_kernel)
