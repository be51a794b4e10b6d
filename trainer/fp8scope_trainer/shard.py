"""ZeRO on FSDP2's `fully_shard`: a stage is a way to call it, not an engine of ours.

| stage        | parameters                       | gradients                     | optimizer states |
|--------------|----------------------------------|-------------------------------|------------------|
| 0            | whole                            | whole, all-reduced            | whole            |
| 1            | gathered once a step             | whole until the last backward | sharded          |
| 2            | gathered once a step             | reduce-scattered every time   | sharded          |
| 3            | gathered in forward and backward | reduce-scattered every time   | sharded          |
| HYBRID_SHARD | as 3, inside a group             | as 3, then all-reduced once   | sharded          |

Stage 0 is the same engine on shards of one rank, so that the parameters' names, the compute dtype and what
may be unused or frozen are the same at every stage. FSDP2 keeps an fp32 shard of every parameter between
steps at stages 1 and 2 too: what these stages hold whole is the copy that computes. Without accumulation 1
and 2 do the same.

Rejected: DistributedDataParallel for stage 0 (renames parameters, has no compute dtype, must be told of
unused parameters); ZeroRedundancyOptimizer for stage 1 (wraps one optimizer only, and no longer grows).
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.fp8_gather import gather_in_fp8
from fp8scope_trainer.mesh import axes
from fp8scope_trainer.stage import Stage, check_fp8_gather, parse_stage
from fp8scope_trainer.tensor_parallel import cut_layers


def shard(
    model: nn.Module, stage: int | str | Stage = 2, mesh: DeviceMesh | None = None, *,
    compute: torch.dtype | None = None, fp8_gather: bool = False,
) -> nn.Module:
    """Shards `model` in place and returns it. Call it after `convert` and before making the optimizer.

    Each element of a ModuleList is a unit whose parameters are gathered together. `compute` is the dtype
    that parameters are gathered in; gradients are always reduced in fp32. The default mesh is every rank,
    others come from `training_mesh`; with a dimension `tensor` the layers of a Decoder are cut, too.
    `fp8_gather`: at stage 3 and HYBRID_SHARD, weights of FP8 layers are gathered as codes where they can be.
    Without a process group only stage 0 is possible, and nothing is done.
    """
    which, needs = parse_stage(stage), "needs torch.distributed.init_process_group; accepted without:"
    if not dist.is_initialized():
        if which is not Stage.REPLICATED:
            raise Invalid("stage", stage, f"{needs} 0")
        if compute is not None:
            raise Invalid("compute", compute, f"{needs} None")
        return model
    units = tuple(_units(model))
    _check(model, units)
    layout = axes(mesh, which, next(model.parameters()).device.type)
    if fp8_gather:
        check_fp8_gather(which, tensor=layout.tensor is not None)
    if layout.tensor is not None:
        cut_layers(model, layout.tensor)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    free = not which.keeps_parameters
    for unit in (*units, model):
        fully_shard(unit, mesh=layout.data, mp_policy=policy, reshard_after_forward=free)
    if fp8_gather:
        gather_in_fp8(model)
    model.register_forward_hook(_reshard_after_evaluation)
    return model


def micro_batch(model: nn.Module, *, stage: int | str | Stage, last: bool) -> None:
    """Call before each micro-batch's forward when gradients are accumulated; `last`: the step follows.

    Stages 0 and 1 reduce gradients in the last backward only, HYBRID_SHARD all-reduces in it. Stages 0 to 2
    keep their parameters gathered until it, so a step after a backward that was not the last would use old
    weights. Without accumulation there is no need to call it.
    """
    which = parse_stage(stage)
    if not isinstance(model, FSDPModule):
        return
    if which in (Stage.REPLICATED, Stage.STATES):
        model.set_requires_gradient_sync(last)
    if which is Stage.HYBRID:
        model.set_requires_all_reduce(last)
    if which.keeps_parameters:
        model.set_reshard_after_backward(last)


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost ModuleLists that have parameters."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            if next(child.parameters(), None) is not None:
                yield child
        else:
            yield from _units(child)


def _check(model: nn.Module, units: tuple[nn.Module, ...]) -> None:
    """Raises `Invalid` where FSDP would fail late, or train wrongly."""
    if isinstance(model, FSDPModule):
        raise Invalid("model", type(model).__name__, "is sharded already")
    if next(model.parameters(), None) is None:
        raise Invalid("model", type(model).__name__, "has no parameters")
    owner = {id(module): i for i, unit in enumerate(units) for module in unit.modules()}
    seen: dict[Tensor, tuple[str, int]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            path, unit = f"{name}.{key}".lstrip("."), owner.get(id(module), -1)
            first, first_unit = seen.setdefault(parameter, (path, unit))
            if first_unit != unit:
                raise Invalid("model", f"{first}, {path}",
                              "share a weight across units that are gathered apart, which would lose its "
                              "gradients; untie them, or keep both outside of module lists")


def _reshard_after_evaluation(model: nn.Module, args: object, output: object) -> None:
    """Frees what a forward without gradients gathered; a later step would leave it behind, out of date."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
