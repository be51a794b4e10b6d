"""How ranks are laid out: `replicate`, `shard` and `tensor`, from the slowest links to the fastest.

| stage        | dimensions                                        |
|--------------|---------------------------------------------------|
| 0            | replicate = ranks / tensor, shard = 1             |
| 1, 2, 3      | shard = ranks / tensor                            |
| HYBRID_SHARD | replicate = groups, shard = ranks of a group      |

`tensor`, where there is one, is last: ranks 0 and 1 share each layer, and 0, 2, 4, 6 are one data group.
"""

import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.stage import Stage, parse_stage

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """A mesh taken apart."""

    data: DeviceMesh
    """What FSDP gets: [shard] or [replicate, shard]."""
    tensor: DeviceMesh | None
    """Over which single layers are cut; None without tensor parallelism."""


def training_mesh(
    device_type: str, stage: int | str | Stage, *, tensor: int = 1, group: int | None = None
) -> DeviceMesh:
    """The mesh over all ranks for `stage`. Every rank calls it, alike.

    tensor: ranks that share each layer. group: data-parallel ranks of a sharding group under HYBRID_SHARD;
    by default those of one node (LOCAL_WORLD_SIZE / tensor).
    """
    which, world = parse_stage(stage), _world(stage)
    if tensor < 1 or world % tensor:
        raise Invalid("tensor", tensor, f"must divide the number of ranks, {world}")
    ranks = world // tensor
    if which is Stage.HYBRID:
        inner = _node(ranks, tensor) if group is None else group
        if inner < 1 or ranks % inner:
            raise Invalid("group", inner, f"must divide the number of data-parallel ranks, {ranks}")
        sizes = {REPLICATE: ranks // inner, SHARD: inner}
    elif group is not None:
        raise Invalid("group", group, "is for HYBRID_SHARD")
    else:
        sizes = {REPLICATE: ranks, SHARD: 1} if which is Stage.REPLICATED else {SHARD: ranks}
    if tensor > 1:
        sizes[TENSOR] = tensor
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def axes(mesh: DeviceMesh | None, stage: Stage, device_type: str) -> Axes:
    """`mesh`, or the stage's own over all ranks, taken apart; raises `Invalid` if it does not fit `stage`.

    A mesh of one dimension without a name that is known here is `shard`; one of two is `replicate, shard`.
    """
    if mesh is None:
        mesh = training_mesh(device_type, stage)
    names, sizes = _names(mesh), tuple(mesh.mesh.shape)
    if mesh.get_coordinate() is None:
        raise Invalid("mesh", _shown(names, sizes), f"must hold this rank, {dist.get_rank()}")
    size = dict(zip(names, sizes, strict=True))
    if stage is Stage.REPLICATED and names == (SHARD,) and sizes[0] == dist.get_world_size():
        return Axes(data=training_mesh(device_type, stage), tensor=None)
    if stage is Stage.REPLICATED and size.get(SHARD, 1) != 1:
        raise Invalid("mesh", _shown(names, sizes), "stage 0 shards nothing: make it with training_mesh")
    if stage in (Stage.REPLICATED, Stage.HYBRID) and not {REPLICATE, SHARD} <= set(names):
        raise Invalid("mesh", _shown(names, sizes),
                      f"stage {stage.value} needs the dimensions {REPLICATE}, {SHARD}; see training_mesh")
    if stage not in (Stage.REPLICATED, Stage.HYBRID) and (SHARD not in names or REPLICATE in names):
        raise Invalid("mesh", _shown(names, sizes),
                      f"stage {stage.value} needs the dimension {SHARD} and no {REPLICATE}, "
                      "which is for HYBRID_SHARD and stage 0")
    if TENSOR not in names:
        return Axes(data=mesh, tensor=None)
    data = (REPLICATE, SHARD) if REPLICATE in names else (SHARD,)
    return Axes(data=mesh[data], tensor=mesh[TENSOR])


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    given = mesh.mesh_dim_names
    if mesh.ndim == 1 and (given is None or given[0] not in (REPLICATE, TENSOR)):
        return (SHARD,)
    accepted = f"the dimensions' names must be of {REPLICATE}, {SHARD}, {TENSOR}, in this order"
    if given is None:
        raise Invalid("mesh", tuple(mesh.mesh.shape), accepted)
    if mesh.ndim == 2 and not set(given) & {REPLICATE, SHARD, TENSOR}:
        return (REPLICATE, SHARD)
    if tuple(name for name in (REPLICATE, SHARD, TENSOR) if name in given) != tuple(given):
        raise Invalid("mesh", given, accepted)
    return tuple(given)


def _node(ranks: int, tensor: int) -> int:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) // tensor
    if not 0 < here < ranks or ranks % here:
        raise Invalid("stage", Stage.HYBRID.value, f"takes a node's ranks for a group, and {ranks} are not "
                      f"several nodes of {here} (LOCAL_WORLD_SIZE); give training_mesh a group")
    return here


def _world(stage: int | str | Stage) -> int:
    if not dist.is_initialized():
        raise Invalid("stage", stage, "needs torch.distributed.init_process_group; accepted without: 0")
    return dist.get_world_size()


def _shown(names: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
