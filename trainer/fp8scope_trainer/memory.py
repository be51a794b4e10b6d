"""The bytes of a model's state that this rank holds: parameters, gradients, optimizer states."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """Bytes of storage on this rank, padding included; a storage that several tensors share counts once."""

    parameters: int
    gradients: int
    states: int
    """Of the optimizer, without its step counters."""


def model_state(model: nn.Module, optimizer: Optimizer) -> ModelState:
    """What is held now. Between backward and step under FSDP2 that is shards; between the micro-batches of
    a stage that keeps its parameters gathered, `parameters` is the gathered copy."""
    parameters = list(model.parameters())
    states = (value for state in optimizer.state.values() for key, value in state.items()
              if key != "step" and isinstance(value, Tensor))
    return ModelState(
        parameters=_held(parameters), gradients=_held(p.grad for p in parameters if p.grad is not None),
        states=_held(states),
    )


def _held(tensors: Iterable[Tensor]) -> int:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {(s := tensor.untyped_storage())._cdata: s.nbytes() for tensor in local}
    return sum(storages.values())
