"""Where this rank's part of a parameter lies in the whole.

A parameter is seen as a matrix [R, C]: a vector as one column, experts [E, N, K] as [E N, K], kernels of a
convolution [O, I, H, W] as [O, I H W]. Element i of the whole tensor, row by row, has index i on every mesh.

Rows may be dealt out in any way. Columns may be cut where every part is a run of columns, and, for states
in blocks, where all parts are of the same whole number of blocks: then blocks, and so scales and codes, are
those of one process. Decided from shape, mesh and placements, so alike on every rank.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fp8scope_protocol.errors import Invalid


class Place(NamedTuple):
    """Indices of this rank's elements in the whole tensor."""

    first: int
    """Of the first one."""
    starts: Tensor | None = None
    """Of the first of each row, int64 [R] on the parameter's device; None where all elements follow one
    another."""

    def indices(self, like: Tensor) -> Tensor:
        """int64, shaped like the part `like` [R, C]."""
        if self.starts is None:
            return torch.arange(self.first, self.first + like.numel(), device=like.device).view(like.shape)
        return self.starts[:, None] + torch.arange(like.shape[1], device=like.device)


def columns_of(shape: torch.Size) -> int:
    """C of the matrix that a tensor of this shape is seen as."""
    if len(shape) < 2:
        return 1
    return shape[-1] if len(shape) < 4 else shape[1:].numel()


def as_matrix(tensor: Tensor) -> Tensor:
    """This rank's part as [R, C]; a view where it is contiguous."""
    part = local(tensor)
    columns = columns_of(part.shape)
    return part.reshape(part.numel() // max(columns, 1), columns)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_of(tensor: Tensor) -> Place:
    """Of this rank's part. `Invalid` where a row's part is not a run of it, or a sum that is not made yet."""
    if not isinstance(tensor, DTensor) or not tensor.dim():
        return Place(0)
    if any(isinstance(one, Partial) for one in tensor.placements) or (reason := cut_of(tensor, 0)):
        raise Invalid("placements", tensor.placements, reason or "must not be Partial")
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements)
    stride = torch.empty(tensor.shape, device="meta").stride()
    first = sum(at * step for at, step in zip(offset, stride, strict=True)) if all(shape) else 0
    if tuple(shape[1:]) == tuple(tensor.shape[1:]):
        return Place(first)
    starts = torch.tensor([first])
    for size, step in list(zip(shape, stride, strict=True))[:_row_dimensions(tensor.shape)]:
        starts = (starts[:, None] + torch.arange(size) * step).flatten()
    return Place(first, starts.to(tensor.device))


def cut_of(tensor: Tensor, block: int) -> str:
    """Why states in blocks of `block` (0: without) cannot follow how its rows are cut; empty if they can."""
    for dimension, parts in _cuts(tensor).items():
        if dimension > _row_dimensions(tensor.shape):
            return "is cut into more than one run of columns a row"
        columns = columns_of(tensor.shape)
        if block and (tensor.shape[dimension] % parts or columns // parts % block):
            return f"has {columns} columns, cut into {parts} parts that are no multiples of {block}"
    return ""


def filled(like: Tensor, shape: torch.Size, dtype: torch.dtype, value: int) -> Tensor:
    """A tensor of the *global* shape with the placement of `like`, whose number of columns may differ."""
    if not isinstance(like, DTensor):
        return torch.full(shape, value, dtype=dtype, device=like.device)
    mine = torch.Size(like.to_local().shape)
    if shape != like.shape:
        mine = torch.Size((*mine[:len(shape) - 1], shape[-1] // math.prod(_cuts(like).values())))
    whole = torch.full(mine, value, dtype=dtype, device=like.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(whole, like.device_mesh, like.placements, run_check=False, shape=shape,
                              stride=stride)


def _row_dimensions(shape: torch.Size) -> int:
    """How many of the dimensions number the rows of the matrix."""
    return max(1, len(shape) - 1) if len(shape) < 4 else 1


def _cuts(tensor: Tensor) -> dict[int, int]:
    """Number of parts of each dimension of columns that is cut."""
    cuts: dict[int, int] = {}
    if not isinstance(tensor, DTensor):
        return cuts
    for number, placement in enumerate(tensor.placements):
        dimension: int | None = getattr(placement, "dim", None)  # of all kinds of Shard
        if dimension is None or tensor.device_mesh.size(number) == 1:
            continue
        if dimension >= _row_dimensions(tensor.shape):
            cuts[dimension] = cuts.get(dimension, 1) * tensor.device_mesh.size(number)
    return cuts
