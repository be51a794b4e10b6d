"""Where a tensor lives decides who quantizes it: Triton kernels on CUDA, plain torch everywhere else.

Call these and not `quantize` or `quantize_kernel` directly, unless a particular one is meant. Both compute
the same codes, scales and counts; `quantize` says what that is.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fp8scope import quantize as reference
from fp8scope import roundtrip
from fp8scope.adam import AdamForm
from fp8scope.batch import Trip
from fp8scope.change import Change
from fp8scope.change import change as reference_change
from fp8scope.quantize import Quantized
from fp8scope.sample import Sample
from fp8scope.squares import squares as reference_squares
from fp8scope.stored import State
from fp8scope.sums import RowSums
from fp8scope_protocol.formats import Format


def quantize(x: Tensor, element: Format, scaling: str, *, scales: Tensor | None = None) -> Quantized:
    """x [R, C] in any format and scaling; see `quantize.quantize`."""
    if scaling == "tile 1x128":
        return quantize_tiles(x, element, scales=scales)
    if scaling == "block 128x128":
        return quantize_blocks(x, element, scales=scales)
    return reference.quantize(x, element, scaling, scales=scales)


def quantize_tiles(
    x: Tensor, element: Format, *, scales: Tensor | None = None, power_of_two: bool = False,
    out: RowSums | None = None,
) -> Quantized:
    """[1,128] tiles of x [R, C]; see `quantize.quantize_tiles`.

    out: a row to which the round trip is added, but for the histogram; from the same kernel, where it fits.
    """
    if runs_kernels(x, element):
        from fp8scope import pack_kernel, quantize_kernel, tile_kernel

        if scales is None and out is None:
            packed = pack_kernel.quantize_tiles(x, element, power_of_two=power_of_two)
            if packed is not None:
                return packed
        elif scales is None and out is not None and tile_kernel.fits(x, element, "tile 1x128"):
            return tile_kernel.quantize_tiles(x, element, power_of_two=power_of_two, out=out)
        q = quantize_kernel.quantize_tiles(x, element, scales=scales, power_of_two=power_of_two)
    else:
        q = reference.quantize_tiles(x, element, scales=scales, power_of_two=power_of_two)
    if out is not None:
        round_trip(x, element, "tile 1x128", scales=scales, power_of_two=power_of_two, histogram=False,
                   out=out)
    return q


def quantize_both(
    x: Tensor, element: Format, *, power_of_two: bool = False
) -> tuple[Quantized, Quantized]:
    """[1,128] tiles of x [R, C] and of x.t(), with current scales; from one read where the kernel fits."""
    if runs_kernels(x, element):
        from fp8scope import both_kernel

        if (both := both_kernel.quantize_both(x, element, power_of_two=power_of_two)) is not None:
            return both
    return (quantize_tiles(x, element, power_of_two=power_of_two),
            quantize_tiles(x.t(), element, power_of_two=power_of_two))


def quantize_blocks(
    x: Tensor, element: Format, *, scales: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """[128,128] blocks of x [R, C]; see `quantize.quantize_blocks`."""
    if not runs_kernels(x, element):
        return reference.quantize_blocks(x, element, scales=scales, power_of_two=power_of_two)
    from fp8scope import pack_kernel, quantize_kernel

    if scales is None:
        packed = pack_kernel.quantize_blocks(x, element, power_of_two=power_of_two)
        if packed is not None:
            return packed
    return quantize_kernel.quantize_blocks(x, element, scales=scales, power_of_two=power_of_two)


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
    """What quantization does to x [R, C], added to `out`; see `roundtrip.round_trip`.

    flag: int32 [1] on the device, for a CUDA graph: where it holds 0, a replay adds nothing. Only where
    `takes_flag`.
    """
    when = {} if flag is None else {"flag": flag}
    if scales is codes is None and rounding == "nearest" and not histogram and _is_light(x, element, scaling):
        from fp8scope import tile_kernel

        return tile_kernel.round_trip(x, element, scaling, power_of_two=power_of_two, out=out, **when)
    twin = _round_trip_of(x, element, scaling)
    return twin(x, element, scaling, scales=scales, codes=codes, rounding=rounding, power_of_two=power_of_two,
                histogram=histogram, out=out, **when)


def round_trips(trips: Sequence[Trip], *, histogram: bool, plans: dict[Any, Any]) -> set[int]:
    """Adds to their rows, which must be different ones, what kernels can measure together; see
    `batch.round_trips`. Returns which: the others are left. Nothing is added if it raises.

    plans: what kernels keep between calls; belongs to the caller, who gives it every time.
    """
    if not any(runs_kernels(trip.x, trip.element) for trip in trips):
        return set()
    from fp8scope import batch_kernel

    taken = [i for i, trip in enumerate(trips)
             if runs_kernels(trip.x, trip.element) and batch_kernel.fits(trip)]
    batch_kernel.round_trips([trips[i] for i in taken], histogram=histogram, plans=plans)
    return set(taken)


def takes_flag(x: Tensor, element: Format, scaling: str) -> bool:
    """Whether kernels do this round trip, which can be left out when a CUDA graph is replayed."""
    return _round_trip_of(x, element, scaling) is not roundtrip.round_trip


def change(sample: Sample, form: AdamForm, states: Sequence[State], before: Tensor | None) -> Change:
    """What a step did to the sampled weights; see `change.change`."""
    if sample.device.type == "cuda" and _has_triton(sample.device):
        from fp8scope import change_kernel

        if (tensors := change_kernel.in_place(sample, states)) is not None:
            return change_kernel.change(sample, form, states, before, tensors=tensors)
    return reference_change(sample, form, states, before)


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each tensor, of one device and type; see `squares.squares`."""
    if tensors[0].is_cuda and _has_triton(tensors[0].device):
        from fp8scope import squares_kernel

        if squares_kernel.is_readable(tensors):
            return squares_kernel.squares(tensors)
    return reference_squares(tensors)


def runs_kernels(x: Tensor, element: Format) -> bool:
    """Whether x is where the kernels run, and they have the format."""
    return x.is_cuda and element.name in ("e4m3", "e5m2") and _has_casts(x.device)


def _is_light(x: Tensor, element: Format, scaling: str) -> bool:
    """Whether one read does, where neither scales, codes nor a histogram are asked for."""
    if not runs_kernels(x, element):
        return False
    from fp8scope import tile_kernel

    return tile_kernel.fits(x, element, scaling)


def _round_trip_of(x: Tensor, element: Format, scaling: str) -> Callable[..., RowSums]:
    if runs_kernels(x, element) and scaling in ("tile 1x128", "block 128x128"):
        from fp8scope import roundtrip_kernel

        return roundtrip_kernel.round_trip
    if x.is_cuda and element.name != "bf16" and scaling != "none" and _has_triton(x.device):
        from fp8scope import group_kernel

        return group_kernel.round_trip
    return roundtrip.round_trip


@cache
def _has_triton(device: torch.device) -> bool:
    """Triton is installed, and compiles for `device` of NVIDIA."""
    if find_spec("triton") is None or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _has_casts(device: torch.device) -> bool:
    """Triton is installed and `device`, of NVIDIA, converts to FP8 in hardware."""
    if find_spec("triton") is None or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
