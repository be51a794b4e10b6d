"""Triton twin of `roundtrip.round_trip` for tiles and blocks: x comes from memory once, and nothing waits.
What needs no histogram, scales or codes goes to `tile_kernel` where it fits, which is twice as quick.

How it works. A program is one warp. It walks down `slabs` slabs of [ROWS, 128] and keeps its results in
registers, so that reductions over threads and partial results (`partials_kernel`) are paid once a program.
Each slab is passed over twice: `scan` finds amax, the least nonzero and the zeros on packed bf16; then x is
read again, out of the L1 cache, quantized as `quantize_kernel` does, and summed. The second pass is a real
loop: unrolled, ptxas keeps the slab in 250 registers and spills. Where columns are contiguous (x.t()) threads
own whole rows, and neighbouring rows are read together. `_slabs` fills whole waves of the device.

Arithmetic bounds this kernel, so elements are spared what tiles can pay for:

- Divisions. y = fma(x, r, x tail) with r = 1 / s and tail = (1 - s r) r. For bf16 and s = amax / 448 that is
  the IEEE quotient for every pair of significands (all 128 x 128 were tried), for any s it is not (11 of 2^30
  differ), so given scales, fp32 and E5M2 divide.
- NaN, Inf and amax of 2^100 or more, where 1 / s could be denormal: such a slab branches (`odd`).
- Zero codes are half a subnormal or less, a tie going to 0: one subtraction counts them, without unpacking q.

Ranges. As in the reference, each [1,128] tile is summed in fp32 on y / unit and its sums multiplied by
(scale unit)^k in float64. `unit` is a power of two whose reciprocal is one too; current scales need none.

Rejected: float atomics (other bits in every run); more threads a row; capped registers on x.t().
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.launch_kernel import Launcher
from fp8scope.partials_kernel import Partials
from fp8scope.quantize import DTYPES
from fp8scope.quantize_kernel import CODE_TYPES, check_matrix
from fp8scope.roundtrip import BAD_BLOCK_FACTOR
from fp8scope.roundtrip_body_kernel import measure_slabs
from fp8scope.slab_kernel import packs
from fp8scope.sums import RowSums
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import TILE as TILE_EDGE
from fp8scope_protocol.formats import Format

SCALINGS = ("tile 1x128", "block 128x128")  # what the kernel groups by; the reference knows more

ROWS_ADJACENT = {"ROWS": 64, "LANES": 1, "VECTOR": 2, "SCAN": 4, "UNROLL": 1}
COLUMNS_ADJACENT = {"ROWS": 16, "LANES": 2, "VECTOR": 8, "SCAN": 8, "UNROLL": 2}
_MOST_ELEMENTS = 1920  # a row and lane: below 2048, what the planes of the histogram can count
RESIDENT = 132 * 13, 132 * 20  # programs on an H200 at once, for either layout


@triton.jit(do_not_specialize=["scale_r", "scale_c", "slabs"])
def _round_trip_kernel(x_ptr: tl.tensor, scales_ptr: tl.tensor, codes_ptr: tl.tensor,
                       ints_ptr: tl.tensor, reals_ptr: tl.tensor, flag_ptr: tl.tensor, R: tl.tensor,
                       C: tl.tensor, stride_r: tl.tensor, stride_c: tl.tensor, scale_r: tl.tensor,
                       scale_c: tl.tensor, code_r: tl.tensor, code_c: tl.tensor, slabs: tl.tensor,
                       LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, BAD: tl.constexpr, CODE: tl.constexpr,
                       BLOCK: tl.constexpr, GIVEN: tl.constexpr, CODED: tl.constexpr, FLAGGED: tl.constexpr,
                       STOCHASTIC: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTOGRAM: tl.constexpr,
                       EVEN: tl.constexpr, PACKED: tl.constexpr, SCAN: tl.constexpr, UNROLL: tl.constexpr,
                       ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr) -> None:
    if FLAGGED:  # noqa: SIM102
        if tl.load(flag_ptr) == 0:
            return
    program = tl.program_id(0)
    measure_slabs(x_ptr, scales_ptr, codes_ptr, ints_ptr, reals_ptr, program, program, tl.num_programs(0), R,
                  C, stride_r, stride_c, scale_r, scale_c, code_r, code_c, slabs, LARGEST, SUBNORMAL, BAD,
                  CODE, BLOCK, GIVEN, CODED, STOCHASTIC, POWER_OF_TWO, HISTOGRAM, EVEN, PACKED, False, SCAN,
                  UNROLL, ROWS, LANES, VECTOR)


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
    """Twin of `roundtrip.round_trip` for `SCALINGS`; `codes` of the format's dtype; `flag`: see `backend`."""
    check_matrix(x)
    if scaling not in SCALINGS:
        raise Invalid("scaling", scaling, f"the kernel takes {' or '.join(SCALINGS)}")
    if codes is not None and codes.dtype != DTYPES[element.name]:
        raise Invalid("codes.dtype", codes.dtype, f"must be {DTYPES[element.name]}, as quantize returns them")
    row = RowSums.zeros(x.device) if out is None else out
    block = scaling == "block 128x128"
    transposed = x.stride(0) == 1 and x.stride(1) != 1
    layout = ROWS_ADJACENT if transposed else COLUMNS_ADJACENT
    tiles = triton.cdiv(x.shape[1], TILE_EDGE)
    steps = triton.cdiv(x.shape[0], layout["ROWS"])
    slabs = TILE_EDGE // layout["ROWS"] if block else _slabs(steps, tiles, RESIDENT[not transposed],
                                                             most_slabs(layout))
    slots = triton.cdiv(steps, slabs) * tiles
    partials = Partials(x, slots, histogram=histogram)
    if slots:
        groups = triton.cdiv(x.shape[0], TILE_EDGE) if block else x.shape[0]
        used = x if scales is None else scales.float().expand(groups, tiles)
        given = x if codes is None else codes.view(torch.uint8)
        whole_rows = TILE_EDGE if block else layout["ROWS"]
        packed = x.is_cuda and x.dtype == torch.bfloat16 and packs(x.device)
        _launch(
            slots, x, used, given, partials.ints, partials.reals, partials.ints if flag is None else flag,
            *x.shape, *x.stride(), *used.stride(), *given.stride(), slabs, num_warps=1,
            constants={**format_constants(element), "BLOCK": block, "GIVEN": scales is not None,
                       "CODED": codes is not None, "FLAGGED": flag is not None,
                       "STOCHASTIC": rounding == "stochastic", "POWER_OF_TWO": power_of_two,
                       "HISTOGRAM": histogram, "PACKED": packed, **layout,
                       "EVEN": x.shape[0] % whole_rows == 0 and x.shape[1] % TILE_EDGE == 0})
    partials.merge_into(row, x, flag)
    return row


def format_constants(element: Format) -> dict[str, Any]:
    """What the kernel knows of a format."""
    return {"LARGEST": element.largest, "SUBNORMAL": element.smallest_subnormal,
            "BAD": BAD_BLOCK_FACTOR * 10.0 ** (-element.sqnr_floor_db / 10.0),
            "CODE": CODE_TYPES[element.name]}


def most_slabs(layout: dict[str, int]) -> int:
    """Slabs that a program may take."""
    return _MOST_ELEMENTS * layout["LANES"] // TILE_EDGE


@functools.lru_cache(1024)
def _slabs(steps: int, tiles: int, resident: int, most: int) -> int:
    """Slabs a program, at most `most`: the fewest waves of `resident` programs, each dearer by its set-up."""
    return min(range(1, most + 1), key=lambda s: -(-(-(-steps // s) * tiles) // resident) * (s + 0.4))


_launch = Launcher(_round_trip_kernel)
