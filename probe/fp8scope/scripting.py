"""`torch.jit.script` compiles a module's hooks with it, which those of the probe cannot be.

It first asks every module that has a method `__prepare_scriptable__` for what to compile instead. So while
the probe is attached, each module answers with a copy of its tree: other module objects, with the same
parameters and buffers, and without our hooks. All modules must answer, not only those that have hooks: torch
puts the answers in place of the submodules of whatever it was given.
"""

import weakref
from typing import Any

import torch
from torch import nn

from fp8scope.inert import Inert, InertObserver, nothing

NAME = "__prepare_scriptable__"
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Unhooked:
    """What one module answers. Copies and pickles of a module answer for themselves."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        module = self._module()
        if module is None:
            return None
        twin = _bare(module, {})
        own = getattr(twin, NAME, None)  # of its class
        return twin if own is None else own()

    def __reduce__(self) -> tuple[Any, ...]:
        return Unhooked, (self._module(),)

    def remove(self) -> None:
        """The module answers no more."""
        if (module := self._module()) is not None:
            vars(module).pop(NAME, None)


def answer_scripting(model: nn.Module) -> list[Unhooked]:
    """Makes every module of `model` answer; `remove` undoes it."""
    answers = []
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            answers.append(Unhooked(module))
            vars(module)[NAME] = answers[-1]
    return answers


def _bare(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """A copy of the tree that shares all but its module objects and has none of our hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return module
    if id(module) not in known:
        twin = known[id(module)] = module.__new__(type(module))
        kept = {key: value for key, value in vars(module).items() if key != NAME}
        for key in HOOKS:
            kept[key] = type(kept[key])(
                (number, hook) for number, hook in kept[key].items()
                if not isinstance(hook, Inert) and hook is not nothing)
        if isinstance(kept.get("observer"), InertObserver):
            kept["observer"] = None
        vars(twin).update(kept)
        twin._modules = {name: None if child is None else _bare(child, known)
                         for name, child in module._modules.items()}
    return known[id(module)]
