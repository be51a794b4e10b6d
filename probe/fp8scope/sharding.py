"""Which part of a tensor this rank holds, whether its values lie there, and how many ranks hold the same.

DTensors are recognised by their placements, so that a job without them does not import them. What wraps other
tensors has no values of its own: its address is 0, and a kernel that read there would end the job.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter


class Axis(NamedTuple):
    """One dimension of the mesh a tensor lies on."""

    sharded: bool
    size: int
    coordinate: int


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor itself; without its gradient history. Plain, unless it
    is one of those that `unreadable` names."""
    part: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if hasattr(part, "trigger_wait"):  # the result of a collective under way: the stream waits, not the host
        part = part.trigger_wait()
    if type(part) not in (Tensor, Parameter) and not _wraps(part):
        with torch._C.DisableTorchFunctionSubclass():
            part = part.as_subclass(Tensor)
    detached: Tensor = part.detach()
    return detached


def unreadable(tensor: Tensor) -> str:
    """Why the values of `tensor` cannot be read where it lies; empty if they can."""
    part = local(tensor)
    if _wraps(part):
        return f"a {type(part).__name__}, whose values only its own operations know"
    if part.is_nested or part.layout is not torch.strided:
        return "nested" if part.is_nested else f"{part.layout}".removeprefix("torch.")
    return "" if part.is_floating_point() else f"{part.dtype}".removeprefix("torch.")


def _wraps(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def replicas(tensor: Tensor, world: int) -> int:
    """How many of `world` ranks hold this very part of `tensor`: all of them where it is not sharded."""
    return max(1, world // prod(axis.size for axis in _axes(tensor) if axis.sharded))


def is_measured_here(tensor: Tensor, *, rank: int, world: int, index: int, parts: int = 1) -> bool:
    """True on exactly one of the ranks that hold this part of `tensor`, the `index`-th of its kind.

    What all ranks hold is dealt out in turn; of shards the first replica is measured. parts: neighbouring
    ranks that hold a part each of a plain tensor.
    """
    axes = _axes(tensor)
    if not any(axis.sharded for axis in axes):
        return index % max(1, world // parts) == rank // parts
    return all(axis.sharded or axis.coordinate == 0 for axis in axes)


def first_row(tensor: Any) -> int:
    """Global index of the first local row of what is sharded along rows (in chunks of ceil(rows / ranks), as
    DTensor deals them out); 0 under any other placement."""
    placements = getattr(tensor, "placements", ())
    if any(one.is_shard() and (one.dim != 0 or type(one).__name__ != "Shard") for one in placements):
        return 0
    offset, size = 0, tensor.shape[0]
    for axis in _axes(tensor):
        if axis.sharded:
            chunk = -(-size // axis.size)
            start = min(chunk * axis.coordinate, size)
            offset, size = offset + start, min(chunk, size - start)
    return offset


def is_first_copy(tensor: Tensor) -> bool:
    """True on one of the ranks that hold this part of an activation or a gradient; of a plain tensor each
    rank has its own."""
    return all(axis.sharded or axis.coordinate == 0 for axis in _axes(tensor))


def _axes(tensor: Any) -> list[Axis]:
    if not hasattr(tensor, "placements"):
        return []
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or [0] * len(tensor.placements)
    return [
        Axis(placement.is_shard(), mesh.size(dimension), coordinate[dimension])
        for dimension, placement in enumerate(tensor.placements)
    ]
