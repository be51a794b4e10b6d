"""A live model and its optimizer under the names that a checkpoint knows them by."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from fp8scope.observer import Switchable, switchable_layers
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.series import canonical_name
from fp8scope_trainer.groups import format_of_group
from fp8scope_trainer.history import AmaxHistory
from fp8scope_trainer.manifest import Job, Layer, Optimized, plain
from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.state_format import StateFormat


class Names:
    """The state_dict of a model, and its parameters by name: as DCP names them, without wrappers' prefixes.

    state: shares memory with the model; DTensors where it is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state: dict[str, Any] = get_model_state_dict(model)  # it also reshards what FSDP had gathered
        self.parameters = {self._known(name): one for name, one in model.named_parameters()}
        self._names = {id(one): name for name, one in self.parameters.items()}

    def of(self, parameter: Tensor) -> str:
        """The name of `parameter`; `Invalid` if it is not one of the model's."""
        if id(parameter) not in self._names:
            raise Invalid("optimizer", f"parameter {tuple(parameter.shape)}",
                          "is not one of the model's; make the optimizer from the model as it is now")
        return self._names[id(parameter)]

    def optimized(self, optimizer: Optimizer) -> dict[str, tuple[int, Tensor]]:
        """Name -> number of its group, parameter; in the optimizer's order."""
        return {self.of(one): (number, one)
                for number, group in enumerate(optimizer.param_groups) for one in group["params"]}

    def histories(self) -> dict[str, AmaxHistory]:
        """Every amax history of the model."""
        return {canonical_name(name): module for name, module in self.model.named_modules()
                if isinstance(module, AmaxHistory)}

    def layers(self) -> dict[str, Switchable]:
        """Every layer whose precision can be switched."""
        return {canonical_name(name): layer for name, layer in switchable_layers(self.model).items()}

    def _known(self, name: str) -> str:
        return name if name in self.state else canonical_name(name)


def describe(names: Names, optimizer: Optimizer | None) -> Job:
    """What a checkpoint of this job says of it."""
    parts: dict[str, Any] = {}
    if optimizer is not None:
        kind = type(optimizer)
        parts = {
            "optimizer": f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
            "rule": optimizer.rule.name if isinstance(optimizer, StateOptimizer) else "",
            "groups": [{key: plain(value) for key, value in group.items() if key not in _NAMES_IN_GROUP}
                       for group in optimizer.param_groups],
            "optimized": {
                name: Optimized(number=number, group=group, states=states_of(optimizer, group, parameter),
                                stored=stored_dtypes(optimizer.state.get(parameter, {})))
                for number, (name, (group, parameter)) in enumerate(names.optimized(optimizer).items())},
        }
    embedded = {id(m.weight) for m in names.model.modules() if isinstance(m, nn.Embedding)}
    return Job(
        model={name: entry_of(value) for name, value in names.state.items()},
        layers={name: Layer(precision=layer.precision, recipe=_recipe(layer))
                for name, layer in names.layers().items()},
        histories={name: one.amaxes.numel() for name, one in names.histories().items()},
        embeddings=[name for name, one in names.parameters.items() if id(one) in embedded], **parts,
    )


def states_of(optimizer: Optimizer, group: int, parameter: Tensor) -> str:
    """What the moments of `parameter` are stored in: `fp32`, `int8 in blocks of 1024`."""
    if not isinstance(optimizer, StateOptimizer):
        return "fp32" if parameter.dtype == torch.float32 else _short(parameter.dtype)
    name = optimizer.format_of(parameter)
    asked = format_of_group(optimizer.param_groups[group])
    return shown(asked if asked.name == name else StateFormat.of(name))


def shown(format: StateFormat) -> str:
    """As a manifest says it: `fp32`, `int8 in blocks of 1024`."""
    return f"{format.name} in blocks of {format.block}" if format.block else format.name


def parsed(text: str) -> StateFormat:
    """Inverse of `shown`."""
    name, _, block = text.partition(" in blocks of ")
    return StateFormat.of(name, int(block) if block else None)


def entry_of(value: Any) -> str:
    """Dtype and global shape of an entry of a state_dict: `float32[128, 256]`."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{_short(value.dtype)}{list(value.shape)}"


_NAMES_IN_GROUP = ("params", "param_names")


def stored_dtypes(state: Mapping[str, Any]) -> dict[str, str]:
    """Key -> dtype of the tensors of one parameter's state."""
    return {key: _short(value.dtype) for key, value in state.items() if isinstance(value, Tensor)}


def _recipe(layer: Switchable) -> dict[str, Any]:
    recipe = getattr(layer, "recipe", None)
    if recipe is None:
        return {}
    plainly: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str))
    return plainly


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
