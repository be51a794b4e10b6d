"""Where a weight that several layers share is at home: the first module that has it, whose name it carries.

Layers share a weight while they hold the same tensor. A job may end that at any time, at either end (a new
`Parameter`, `load_state_dict(assign=True)`, another embedding): then the name means what lies at home, and a
layer whose weight is another one now calls it by its own name. So it is asked whenever a shared weight is
measured; a look at what was shared when attaching would put one layer's numbers into another one's series.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)


class Home(NamedTuple):
    """The place of a parameter in `model`."""

    model: nn.Module
    path: tuple[str, ...]
    """Of the module, as it was when attaching; the model itself has none."""
    module: nn.Module
    key: str

    def has(self, weight: Tensor | None) -> bool:
        """Whether this very weight is there, in the module that is at the path now, or in the one that was,
        if it was only wrapped."""
        there = self._now()
        if there is not None and is_same(matrix_of(there, self.key), weight):
            return True
        return (there is not self.module and is_same(matrix_of(self.module, self.key), weight)
                and any(one is self.module for one in self.model.modules()))

    def _now(self) -> nn.Module | None:
        module: object = self.model
        for name in self.path:
            module = getattr(module, name, None)
        return module if isinstance(module, nn.Module) else None


def find_homes(model: nn.Module) -> dict[int, Home]:
    """The home of every parameter of `model`, by id."""
    homes: dict[int, Home] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            homes.setdefault(id(parameter), Home(model, tuple(path.split(".")) if path else (), module, key))
    return homes


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are the same values, wherever they are changed."""
    if one is other or one is None or other is None:
        return one is other
    return (type(one) in PLAIN and type(other) in PLAIN and one.shape == other.shape
            and one.device == other.device and one.dtype == other.dtype and one.stride() == other.stride()
            and 0 != one.data_ptr() == other.data_ptr())


def matrix_of(module: nn.Module, key: str) -> Tensor | None:
    """A weight as it lies there. A parametrized one is a property that computes, which may draw random
    numbers or, for spectral norm, move the job's own buffers: it is left alone; so are those of what
    torch.jit has compiled, which runs no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    weight = module._parameters.get(key, vars(module).get(key))
    return weight if isinstance(weight, Tensor) else None
