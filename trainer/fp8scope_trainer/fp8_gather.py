"""FP8 weights on the wire: each rank quantizes its shard; codes and scales are gathered, and computed with.

A 128x128 block never crosses ranks where the rows are a multiple of 128 times the ranks, so the gathered
codes are those of the gathered weight, to the bit, and nobody quantizes twice. A weight of N elements sends
N + N / 4,096 bytes instead of 2 N in BF16. Whether a weight is gathered so follows from its whole shape and
the mesh alone, alike on every rank: an uneven shard with two inputs would stop one rank and hang the others.

A layer that runs in `bf16` or `shadow` needs the weight itself, so its gather follows its precision: set it
at a step boundary, on all ranks alike. A gather in backward repeats the format of the one in forward.

FSDP2 asks the shard for what it gathers (`ShardedWeight`, a plain tensor with two more methods) and lets it
say what came of it (`GatheredWeight`, codes that look like a weight). Rejected: gathering columnwise codes,
too (blocks transpose exactly); quantizing from fp32 where the layer would have seen BF16 (one rounding less,
but the option would change numbers).
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fp8scope.quantize import Quantized, dequantize
from fp8scope_trainer.cut import keeps_tiles
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import quantize_weight


class ShardedWeight(Tensor):
    """A shard [N / ranks, K] that FSDP2 gathers as the layer's precision needs it; else a plain tensor."""

    owner: Any
    """FSDP2's record of the parameter, which keeps the gather's buffers."""
    gathers_fp8: bool | None
    """What the last gather was; None before the first."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(shard: Tensor, owner: Any) -> "ShardedWeight":
        """The same memory."""
        weight = Tensor._make_subclass(ShardedWeight, shard.detach())
        weight.owner, weight.gathers_fp8 = owner, None
        return weight

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved, copied and loaded as a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.as_subclass(Tensor), memo)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], bool]:
        """What this rank gives: codes as uint8 and scales, or the shard in the compute dtype."""
        assert isinstance(module, Fp8Linear)
        before = self.gathers_fp8
        if before is None or torch._C._current_graph_task_id() == -1:  # not inside a backward pass
            self.gathers_fp8 = module.precision == "fp8"
        if before not in (None, self.gathers_fp8):
            self.owner.all_gather_outputs = []  # FSDP2 makes new ones; these have other sizes, and are empty
        shard = self.as_subclass(Tensor).to(mp_policy.param_dtype or self.dtype)
        if not self.gathers_fp8:
            return (shard,), False
        quantized = quantize_weight(shard, module.recipe)
        return (quantized.codes.view(torch.uint8), quantized.scales.contiguous()), True

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: bool, param_dtype: torch.dtype, *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """What all ranks gave, as a weight [N, K] of `param_dtype`; after the first time put into `out`."""
        if out is None:
            weight = GatheredWeight.of(all_gather_outputs, param_dtype)
            return weight, ()
        assert isinstance(out, GatheredWeight)
        out.parts[:] = all_gather_outputs
        return None


class GatheredWeight(Tensor):
    """A whole weight [N, K] as it was gathered. FP8 layers take the codes; other operations see values."""

    parts: list[Tensor]
    """Codes (uint8) and scales, or the weight itself: FSDP2's own buffers, freed and filled by it."""

    @staticmethod
    def of(parts: tuple[Tensor, ...] | list[Tensor], dtype: torch.dtype) -> "GatheredWeight":
        """Shaped like the first of `parts`; a list is shared."""
        shape, device = parts[0].shape, parts[0].device
        weight: GatheredWeight = Tensor._make_wrapper_subclass(
            GatheredWeight, shape, dtype=dtype, device=device)
        weight.parts = parts if isinstance(parts, list) else list(parts)
        return weight

    @property
    def quantized(self) -> Quantized | None:
        """The gathered codes and scales; None where the weight itself was gathered."""
        if len(self.parts) == 1:
            return None
        codes, scales = self.parts
        return Quantized(codes.view(torch.float8_e4m3fn), scales, "block 128x128")

    @property
    def exact(self) -> Tensor | None:
        """The weight itself, if that was gathered."""
        return self.parts[0] if len(self.parts) == 1 else None

    def values(self) -> Tensor:
        """The weight in its dtype; from codes what they stand for."""
        codes = self.quantized
        return self.parts[0] if codes is None else dequantize(codes).to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SAME:
            return cls.of(args[0].parts, args[0].dtype)
        plain = [one.values() if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


_SAME = frozenset({
    torch.ops.aten.detach.default, torch.ops.aten.as_strided.default, torch.ops.aten.alias.default,
})


def gather_in_fp8(model: nn.Module) -> tuple[str, ...]:
    """After `fully_shard`: the weights of FP8 layers are gathered as codes where they can be.

    Returns the names of these layers. Others, whose rows are no multiple of 128 for each rank, are gathered
    in the compute dtype as before.
    """
    names = {module: name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    chosen = []
    for parameter in _fsdp_parameters(model):
        info = parameter._module_info
        ranks = parameter.shard_mesh.size()
        if info.module not in names or info.param_name != "weight" or ranks == 1:
            continue
        if getattr(info.module.recipe, "scaling", "block") != "block":
            continue  # one scale for the whole tensor is known to no rank alone
        if keeps_tiles(parameter._orig_size[0], ranks):
            held = parameter.sharded_param
            held._local_tensor = ShardedWeight.of(held._local_tensor, parameter)
            parameter._init_extensions()
            chosen.append(names[info.module])
    return tuple(chosen)


def gathered_as_codes(model: nn.Module) -> tuple[str, ...]:
    """Names of the weights that `gather_in_fp8` has chosen."""
    return tuple(name for name, parameter in model.named_parameters()
                 if type(getattr(parameter, "_local_tensor", None)) is ShardedWeight)


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """FSDP2's records of its parameters. It has no public way to them; torch 2.11 keeps one group a unit."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            yield from (one for group in groups if group is not None for one in group.fsdp_params)
