"""The norm of all gradients of all ranks.

torch's get_total_norm works on DTensors one by one, 10 us each on the host, fails where they lie on several
meshes, and rounds the norm of each bf16 gradient to bf16: 0.04 % off, and otherwise on another mesh. Here
each rank takes the norms of its parts in fp32, and squares are added up, once for each mesh and placement.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from fp8scope_trainer.place import local

Layout = tuple[DeviceMesh, tuple[Placement, ...]]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """fp32 [], on the device of the first. Every rank calls it, with its parts of the same gradients."""
    parts: dict[Layout | None, list[Tensor]] = defaultdict(list)
    for one in gradients:
        if isinstance(one, DTensor) and any(isinstance(kind, Partial) for kind in one.placements):
            parts[None].append(one.full_tensor())
        else:
            parts[(one.device_mesh, one.placements) if isinstance(one, DTensor) else None].append(local(one))
    if not parts:
        return torch.zeros(())
    squares = [_square(found, layout) for layout, found in parts.items()]
    return torch.stack([one.to(squares[0].device) for one in squares]).sum().sqrt().float()


def _square(parts: list[Tensor], layout: Layout | None) -> Tensor:
    """Of the norm of what `parts` are parts of, float64 []."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for part in parts:
        alike[part.device, part.dtype].append(part)
    norms = [torch.stack(torch._foreach_norm(some, 2.0, dtype=torch.float32)) for some in alike.values()]
    square = torch.stack([some.double().square().sum().to(norms[0].device) for some in norms]).sum()
    if layout is not None:
        mesh, placements = layout
        for dimension, placement in enumerate(placements):
            if not isinstance(placement, Replicate) and mesh.size(dimension) > 1:
                dist.all_reduce(square, group=mesh.get_group(dimension))
    return square
