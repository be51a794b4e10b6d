"""ZeRO on FSDP2's `fully_shard`: a stage is a way to call it, not an engine of ours.

| stage | parameters                         | gradients      | optimizer states |
|-------|------------------------------------|----------------|------------------|
| 0     | whole, one process                 | whole          | whole            |
| 2     | sharded; gathered once per step    | reduce-scatter | sharded          |
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8scope_protocol.errors import Invalid

STAGES = (0, 2)


def shard(
    model: nn.Module, stage: int = 2, mesh: DeviceMesh | None = None, *, compute: torch.dtype | None = None
) -> nn.Module:
    """Shards `model` in place and returns it. Call it after `convert` and before making the optimizer.

    Each element of a ModuleList is a unit whose parameters are gathered together. `compute` is the dtype
    that parameters are gathered in; gradients are always reduced in fp32. The default mesh is every rank.
    """
    if stage not in STAGES:
        raise Invalid("stage", stage, f"must be one of {', '.join(map(str, STAGES))}")
    if stage == 0:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise Invalid("stage", stage, "is for one process; accepted with several ranks: 2")
        return model
    if not dist.is_initialized():
        raise Invalid("stage", stage, "needs torch.distributed.init_process_group; accepted without: 0")
    mesh = mesh or init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            for unit in child:
                fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model
