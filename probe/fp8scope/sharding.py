"""Which part of a parameter this rank holds, and how many other ranks hold the same part.

DTensors are recognised by their placements, so that a job without them does not import them.
"""

from math import prod
from typing import Any, NamedTuple

from torch import Tensor


class Axis(NamedTuple):
    """One dimension of the mesh a tensor lies on."""

    sharded: bool
    size: int
    coordinate: int


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor itself; without its gradient history."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def replicas(tensor: Tensor, world: int) -> int:
    """How many of `world` ranks hold this very part of `tensor`: all of them where it is not sharded."""
    return max(1, world // prod(axis.size for axis in _axes(tensor) if axis.sharded))


def is_measured_here(tensor: Tensor, *, rank: int, world: int, index: int) -> bool:
    """True on exactly one of the ranks that hold this part of `tensor`, the `index`-th of its kind.

    What all ranks hold is dealt out in turn; of shards the first replica is measured.
    """
    axes = _axes(tensor)
    if not any(axis.sharded for axis in axes):
        return index % world == rank
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
