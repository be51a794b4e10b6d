"""Tensor parallelism: the ranks of a mesh share each layer of the decoder.

| layer            | weight [N, K]           | input              | output                    | sums        |
|------------------|-------------------------|--------------------|---------------------------|-------------|
| qkv, gate_up     | rows cut: Shard(0)      | whole              | columns of this rank      | in backward |
| out, down        | columns cut: Shard(1)   | columns of a rank  | whole, after an all_reduce| in forward  |
| q_norm, k_norm   | whole                   | heads of a rank    | heads of a rank           | of gradient |
| all others       | whole, computed by each rank alike                                                     |

Two all_reduces of one activation a block in forward, and two in backward. Every parameter becomes a DTensor
on the mesh, so that norms and optimizers see one kind. An `Fp8Linear` works on its local weight: a cut at
multiples of 128 leaves tiles and blocks, and so all codes, as they are in the whole.

Rejected: separate q, k and v weights (the input would be quantized three times); handing DTensors to the
quantizers (no rule knows them, and their values are local anyway).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fp8scope.observer import Cut
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.cut import COLUMNWISE, ROWWISE, check_cut
from fp8scope_trainer.decoder import Decoder
from fp8scope_trainer.linear import Fp8Linear

PER_HEAD = ("attention.q_norm", "attention.k_norm")


def cut_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shares the layers of a `Decoder` over the one-dimensional `mesh`, in place; before FSDP.

    Raises `Invalid` for other models, and with its name for a layer that cannot be cut.
    """
    if not isinstance(model, Decoder):
        raise Invalid("model", type(model).__name__, "has no plan for tensor parallelism, only Decoder has; "
                      "cut it with torch's parallelize_module, and give shard a mesh without tensor")
    check_cut(model.config, mesh.size(), {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules() if isinstance(module, Fp8Linear)})
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            plan[name] = _style(name, module)
    parallelize_module(model, mesh, plan)


class Local(ParallelStyle):
    """An `Fp8Linear` on this rank's rows (dim 0) or columns (dim 1) of its weight; plain tensors in, out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut,
                                 self._input, self._output)  # type: ignore[arg-type]

    def _cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(module, Fp8Linear)
        weight = distribute_tensor(module.weight, mesh, [Shard(self.dim)])
        module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        module.out_features, module.in_features = weight.to_local().shape
        cut = Cut(dim=self.dim, parts=mesh.size(), part=mesh.get_local_rank())
        module.cut = cut  # type: ignore[assignment]

    def _input(self, module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Tensor:
        """Whole for cut rows, where each rank has a part of its gradient; else this rank's columns."""
        (x,) = inputs
        if self.dim:
            return x
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def _output(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's columns for cut rows; else the sum over ranks."""
        if not self.dim:
            return output
        partial = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[Replicate()]).to_local()


class Whole(ParallelStyle):
    """A layer that every rank of the mesh computes alike."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None,
                                 self._input, self._output)  # type: ignore[arg-type]

    @staticmethod
    def _input(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    @staticmethod
    def _output(module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        local: Tensor = _Plain.apply(output.to_local())  # type: ignore[no-untyped-call]
        return local


class _Plain(torch.autograd.Function):
    """The same values, and no view of them: an in-place operation on a view would drop FSDP's hooks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _style(name: str, module: nn.Module) -> ParallelStyle:
    if name.endswith(PER_HEAD):
        return SequenceParallel(sequence_dim=1, use_local_output=True)
    if name.endswith(COLUMNWISE):
        return Local(0) if isinstance(module, Fp8Linear) else ColwiseParallel()
    if name.endswith(ROWWISE):
        return Local(1) if isinstance(module, Fp8Linear) else RowwiseParallel()
    return Whole()
