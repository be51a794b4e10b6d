"""Triton twin of `batch.round_trips`: one launch for all tensors of a kind, and one that merges all of them.

One round trip is two launches, so many small tensors cost the host more than the device. Here a program
finds its tensor in a table: a map gives its number, the table its address, sizes and first program. What it
then does is what `tile_kernel` (bf16, whole slabs, no histogram) or `roundtrip_kernel` (all else) does for
one tensor: they share their device code, so counts and extremes agree to the bit. Partial results of all
kinds lie in one table. A tensor's are neighbours, and one program a column adds them up in fixed order: the
same input gives the same bits.

Kinds. Types, formats, scalings, square roots and whether slabs are whole are constants of a kernel: tensors
that differ in one of them are of another kind, and of another launch. How many slabs a program takes is
chosen for all tensors of a kind together, so that small ones fill the device together.

Tables. They hold addresses, of tensors and of rows, so they stay right while these stay where they are; they
are kept by the caller and made anew for other addresses. The copy comes from pinned memory, for which the
host does not wait.

Not chosen: a search in the table instead of the map, which is a row of loads that wait for each other; one
launch for what is ragged and what is not, where masks would forbid wide loads to all.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope import roundtrip_kernel, tile_kernel
from fp8scope.batch import Trip
from fp8scope.change_kernel import TYPES
from fp8scope.launch_kernel import Launcher
from fp8scope.partials_kernel import Partials, merge_column
from fp8scope.quantize_kernel import CODE_TYPES, check_matrix
from fp8scope.roundtrip_body_kernel import measure_slabs
from fp8scope.slab_kernel import packs
from fp8scope.tile_body_kernel import measure_tiles
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import TILE as TILE_EDGE
from fp8scope_protocol.formats import Format

Plans = dict[Any, "Plan"]
"""Tables by what they are for, the oldest first."""

_MOST_PLANS = 16
_MOST_LIGHT_SLABS = 64
_REGISTERS = 128  # what `roundtrip_kernel` takes by itself where it packs; without a cap 162, and none spills
_FIELDS = tl.constexpr(5)  # of a tensor: address, rows, columns, elements from row to row, first program
_MERGE_FIELDS = tl.constexpr(7)  # first slot, slots, elements, addresses of the four parts of its row
_CHUNK, _WIDE_CHUNK = 128, 1024  # partial results that a program of the merge reads at a time


class Kind(NamedTuple):
    """What one launch has in common."""

    light: bool
    """Whether `tile_kernel`'s code does it."""
    dtype: torch.dtype
    element: Format
    scaling: str
    root: bool
    power_of_two: bool
    whole: bool
    """Slabs are whole, rows begin at 16 bytes: no masks, wide loads."""


class Launch(NamedTuple):
    """One kind, ready for the device."""

    kind: Kind
    table: Tensor
    """int64 [T, 5]; see `_FIELDS`."""
    tensors: Tensor
    """int32 [programs]: which of them a program measures."""
    base: int
    """Its first slot."""
    slabs: int


class Plan(NamedTuple):
    """Tables for one list of trips."""

    launches: tuple[Launch, ...]
    merge: Tensor
    """int64 [T, 7]; see `_MERGE_FIELDS`."""
    slots: int
    widest: int
    """Slots of the tensor that has most."""


@triton.jit(do_not_specialize=["base", "slots", "slabs"])
def _batch_tile_kernel(table_ptr: tl.tensor, tensor_ptr: tl.tensor, ints_ptr: tl.tensor, reals_ptr: tl.tensor,
                       base: tl.tensor, slots: tl.tensor, slabs: tl.tensor, LARGEST: tl.constexpr,
                       SUBNORMAL: tl.constexpr, BAD: tl.constexpr, MANTISSA: tl.constexpr,
                       NORMAL: tl.constexpr, CODE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                       ASM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
                       VECTOR: tl.constexpr) -> None:
    program = tl.program_id(0)
    entry = table_ptr + tl.load(tensor_ptr + program) * _FIELDS
    x_ptr = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int32)), 16)
    rows, tiles = tl.load(entry + 1).to(tl.int32), (tl.load(entry + 2) // 128).to(tl.int32)
    pairs = tl.multiple_of((tl.load(entry + 3) // 2).to(tl.int32), 16)
    here = program - tl.load(entry + 4).to(tl.int32)
    measure_tiles(x_ptr, ints_ptr, ints_ptr, ints_ptr, reals_ptr, here, base + program, slots, rows, tiles,
                  pairs, slabs, slabs, LARGEST, SUBNORMAL, BAD, MANTISSA, NORMAL, CODE, POWER_OF_TWO,
                  False, ASM, BLOCK, ROWS, LANES, VECTOR)


@triton.jit(do_not_specialize=["base", "slots", "slabs"])
def _batch_kernel(table_ptr: tl.tensor, tensor_ptr: tl.tensor, ints_ptr: tl.tensor, reals_ptr: tl.tensor,
                  base: tl.tensor, slots: tl.tensor, slabs: tl.tensor, TYPE: tl.constexpr,
                  LARGEST: tl.constexpr, SUBNORMAL: tl.constexpr, BAD: tl.constexpr, CODE: tl.constexpr,
                  BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr, HISTOGRAM: tl.constexpr,
                  EVEN: tl.constexpr, PACKED: tl.constexpr, ROOT: tl.constexpr, SCAN: tl.constexpr,
                  UNROLL: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
                  VECTOR: tl.constexpr) -> None:
    program = tl.program_id(0)
    entry = table_ptr + tl.load(tensor_ptr + program) * _FIELDS
    x_ptr = tl.load(entry).to(tl.pointer_type(TYPE))
    rows, columns = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    stride = tl.load(entry + 3).to(tl.int32)
    if EVEN:
        x_ptr, stride = tl.multiple_of(x_ptr, 16), tl.multiple_of(stride, 16)
    here = program - tl.load(entry + 4).to(tl.int32)
    measure_slabs(x_ptr, ints_ptr, ints_ptr, ints_ptr, reals_ptr, here, base + program, slots, rows, columns,
                  stride, 1, 0, 0, 0, 0, slabs, LARGEST, SUBNORMAL, BAD, CODE, BLOCK, False, False, False,
                  POWER_OF_TWO, HISTOGRAM, EVEN, PACKED, ROOT, SCAN, UNROLL, ROWS, LANES, VECTOR)


@triton.jit(do_not_specialize=["slots"])
def _batch_merge_kernel(table_ptr: tl.tensor, ints_ptr: tl.tensor, reals_ptr: tl.tensor, slots: tl.tensor,
                        INTS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr) -> None:
    """A program takes one row of the partial results of one tensor."""
    entry = table_ptr + (tl.program_id(0) // COLUMNS) * _MERGE_FIELDS
    first, mine = tl.load(entry), tl.load(entry + 1).to(tl.int32)
    counts_ptr = tl.load(entry + 3).to(tl.pointer_type(tl.int64))
    sums_ptr = tl.load(entry + 4).to(tl.pointer_type(tl.float64))
    maxes_ptr = tl.load(entry + 5).to(tl.pointer_type(tl.float64))
    histogram_ptr = tl.load(entry + 6).to(tl.pointer_type(tl.int64))
    merge_column(tl.program_id(0) % COLUMNS, ints_ptr + first, reals_ptr + first, slots, mine, counts_ptr,
                 sums_ptr, maxes_ptr, histogram_ptr, tl.load(entry + 2), INTS, CHUNK)


def fits(trip: Trip) -> bool:
    """Whether the kernels read such a tensor: a plain matrix, by rows, in a type, format and scaling of
    theirs; on the CPU too, where they run in Triton's interpreter only."""
    x = trip.x
    return (
        x.dim() == 2 and x.dtype in TYPES and x.layout is torch.strided and x.device == trip.row.counts.device
        and trip.element.name in CODE_TYPES and trip.scaling in roundtrip_kernel.SCALINGS
        and (x.stride(1) == 1 or x.shape[1] <= 1) and max(*x.shape, x.stride(0)) < 2**31
    )


def round_trips(trips: Sequence[Trip], *, histogram: bool, plans: Plans) -> None:
    """See `batch.round_trips`; all of them `fits`, on one device.

    plans: tables of earlier calls. Raises `Invalid` where two trips share a row, before anything is added.
    """
    if not trips:
        return
    key = (histogram, *map(_place, trips))
    plan = plans.get(key)
    if plan is None:
        while len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plan = plans[key] = _plan(trips, histogram)
    partials = Partials(plan.merge, plan.slots, histogram=histogram)
    for launch in plan.launches:
        _measure(launch, partials, histogram)
    columns, wide = len(partials.ints) + len(partials.reals), plan.widest > 2 * _CHUNK
    _merge(columns * len(plan.merge), plan.merge, partials.ints, partials.reals, plan.slots,
           num_warps=4 if wide else 1,
           constants={"INTS": len(partials.ints), "COLUMNS": columns,
                      "CHUNK": _WIDE_CHUNK if wide else _CHUNK})


def _place(trip: Trip) -> tuple[Any, ...]:
    """What a plan knows of a trip."""
    x = trip.x
    return (x.data_ptr(), x.shape, x.stride(), x.dtype, trip.element.name, trip.scaling, trip.root,
            trip.power_of_two, trip.row.counts.data_ptr())


def _measure(launch: Launch, partials: Partials, histogram: bool) -> None:
    """The programs of one kind."""
    programs = len(launch.tensors)
    if not programs:
        return
    device = launch.table.device
    constants = constants_of(launch.kind, histogram=histogram, compiled=device.type == "cuda",
                             packed=device.type == "cuda" and packs(device))
    where = launch.table, launch.tensors, partials.ints, partials.reals, launch.base, partials.slots
    if launch.kind.light:
        _launch_tiles(programs, *where, launch.slabs, constants=constants,
                      num_warps=tile_kernel.warps_of(constants["ROWS"]), maxnreg=tile_kernel.REGISTERS)
    elif constants["PACKED"] and launch.kind.whole:
        _launch(programs, *where, launch.slabs, constants=constants, num_warps=1, maxnreg=_REGISTERS)
    else:
        _launch(programs, *where, launch.slabs, constants=constants, num_warps=1)


def _plan(trips: Sequence[Trip], histogram: bool) -> Plan:
    """Tables for `trips`, on their way to the device."""
    if len({trip.row.counts.data_ptr() for trip in trips}) < len(trips):
        raise Invalid("trips", len(trips), "each must have a row of its own")
    kinds: dict[Kind, list[Trip]] = {}
    for trip in trips:
        check_matrix(trip.x)
        kinds.setdefault(_kind(trip, histogram), []).append(trip)
    device = trips[0].x.device
    launches, merged, base = [], [], 0
    for kind, some in kinds.items():
        rows = _rows_of(kind)
        slabs = _slabs(kind, Counter(trip.x.shape for trip in some))
        programs = [_programs(trip.x.shape, rows, slabs) for trip in some]
        firsts = [0, *accumulate(programs)]
        table = [[trip.x.data_ptr(), *trip.x.shape, trip.x.stride(0), first]
                 for trip, first in zip(some, firsts, strict=False)]
        each = torch.repeat_interleave(torch.arange(len(some), dtype=torch.int32), torch.tensor(programs))
        launches.append(Launch(kind, _there(torch.tensor(table), device), _there(each, device), base, slabs))
        merged += [[base + first, count, trip.x.numel(), *(part.data_ptr() for part in trip.row)]
                   for trip, first, count in zip(some, firsts, programs, strict=False)]
        base += firsts[-1]
    return Plan(tuple(launches), _there(torch.tensor(merged), device), base, max(one[1] for one in merged))


def _kind(trip: Trip, histogram: bool) -> Kind:
    x, block = trip.x, trip.scaling == "block 128x128"
    light = not (histogram or trip.root) and tile_kernel.fits(x, trip.element, trip.scaling)
    rows = TILE_EDGE if block else roundtrip_kernel.COLUMNS_ADJACENT["ROWS"]
    whole = light or (x.shape[0] % rows == 0 and x.shape[1] % TILE_EDGE == 0 and x.stride(0) % 16 == 0
                      and x.data_ptr() % 16 == 0)
    return Kind(light, x.dtype, trip.element, trip.scaling, trip.root, trip.power_of_two, whole)


def _rows_of(kind: Kind) -> int:
    """Rows of a slab."""
    if kind.light:
        return tile_kernel.ROWS[kind.scaling]
    return roundtrip_kernel.COLUMNS_ADJACENT["ROWS"]


def _programs(shape: torch.Size, rows: int, slabs: int) -> int:
    """How many programs a tensor takes; none if it is empty."""
    return -(-shape[0] // (rows * slabs)) * -(-shape[1] // TILE_EDGE)


def _slabs(kind: Kind, shapes: Counter[torch.Size]) -> int:
    """Slabs a program: the fewest waves of programs over all tensors, each dearer by its set-up, which is
    more than in a launch of its own by two loads that wait for each other."""
    rows, set_up = _rows_of(kind), 1.5
    if kind.light:
        most, resident = _MOST_LIGHT_SLABS, tile_kernel.resident(rows, coded=False)
    elif kind.scaling == "block 128x128":
        return TILE_EDGE // rows
    else:
        most = roundtrip_kernel.most_slabs(roundtrip_kernel.COLUMNS_ADJACENT)
        resident, set_up = roundtrip_kernel.RESIDENT[True], 0.9
    most = min(most, max(1, *(-(-shape[0] // rows) for shape in shapes)))

    def cost(slabs: int) -> float:
        programs = sum(_programs(shape, rows, slabs) * count for shape, count in shapes.items())
        return -(-programs // resident) * (slabs + set_up)

    return min(range(1, most + 1), key=cost)


def _there(table: Tensor, device: torch.device) -> Tensor:
    """On the device, without a wait for it."""
    if device.type == "cuda" and table.numel():
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


@functools.lru_cache(64)
def constants_of(kind: Kind, *, histogram: bool, compiled: bool, packed: bool) -> dict[str, Any]:
    """The kernel's constants. packed: the device can compare two bf16 at once."""
    if kind.light:
        found = tile_kernel.constants_of(kind.element, kind.scaling, kind.power_of_two, coded=False,
                                         flagged=False, compiled=compiled)
        return {name: value for name, value in found.items() if name not in ("CODES", "FLAGGED")}
    return {
        "TYPE": TYPES[kind.dtype], **roundtrip_kernel.format_constants(kind.element),
        "BLOCK": kind.scaling == "block 128x128", "POWER_OF_TWO": kind.power_of_two, "HISTOGRAM": histogram,
        "EVEN": kind.whole, "ROOT": kind.root, **roundtrip_kernel.COLUMNS_ADJACENT,
        "PACKED": packed and kind.dtype == torch.bfloat16 and not kind.root,
    }


_launch_tiles = Launcher(_batch_tile_kernel)
_launch = Launcher(_batch_kernel)
_merge = Launcher(_batch_merge_kernel)
