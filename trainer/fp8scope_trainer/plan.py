"""What a step does, for as long as nothing but numbers changes: gradients, weights, states, lr, betas.

To look at each of 2,000 parameters took 22 ms of Python a step; to see that all is as it was takes a few C
loops over them, about 2 ms. What is looked at: the groups, what they hold and what they ask for; which
gradients are there; which tensors the states are; where weights lie; how many steps have been made.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8scope_trainer.moments import State
from fp8scope_trainer.rules import Rule
from fp8scope_trainer.state_format import StateFormat
from fp8scope_trainer.step import StepTensors
from fp8scope_trainer.steps import Steps
from fp8scope_trainer.work import Work

Groups = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """Parameters that are updated together: of one group, format, number of steps and device."""

    group: Mapping[str, Any]
    rule: Rule
    format: StateFormat
    """Of what is stored now; fp32 in a warm-up."""
    exact: bool
    """In a warm-up."""
    step: int
    """How many they have made."""
    works: list[Work] = field(default_factory=list)
    tensors: list[StepTensors] = field(default_factory=list)
    elements: int = 0
    """Of this rank."""

    def add(self, work: Work) -> None:
        """One more parameter."""
        self.works.append(work)
        self.tensors.append(work.tensors)
        self.elements += work.tensors.weight.numel()


class Plan:
    """The calls of a step. `gradients`: of all parameters in their order, None where there is none."""

    def __init__(self, groups: Groups, states: Mapping[Tensor, State], gradients: Sequence[Tensor | None],
                 calls: list[Call], steps: Steps) -> None:
        self.calls, self.steps = calls, steps
        self._groups, self._asked = list(groups), asked(groups)
        self._parameters = parameters_of(groups)
        self._missing = [gradient is None for gradient in gradients]
        self._states, self._kept = list(states.values()), _tensors(states)
        there = {id(work.parameter): work for call in calls for work in call.works}
        works = [there[id(one)] for one, missing in zip(self._parameters, self._missing, strict=True)
                 if not missing]
        self._moving, self._tensors = [one.parameter for one in works], [one.tensors for one in works]
        self._sharded = any(isinstance(one, DTensor) for one in self._moving)
        parts = self._parts(self._moving)
        self._addresses = list(map(Tensor.data_ptr, parts))
        self._gaps = [(part, one.tensors) for part, one in zip(parts, works, strict=True)
                      if not part.is_contiguous()]
        self._made = steps.mask(work.state for work in works)
        self._counts = steps.counts.clone()

    def holds(self, groups: Groups, states: Mapping[Tensor, State],
              gradients: Sequence[Tensor | None]) -> bool:
        """Whether all is as it was."""
        if not (_same(groups, self._groups) and asked(groups) == self._asked
                and _same(parameters_of(groups), self._parameters)
                and [gradient is None for gradient in gradients] == self._missing
                and _same(list(states.values()), self._states) and _same(_tensors(states), self._kept)
                and torch.equal(self.steps.counts, self._counts)):
            return False
        parts = self._parts(self._moving)
        return list(map(Tensor.data_ptr, parts)) == self._addresses and all(map(Tensor.is_contiguous, parts))

    def begin(self, gradients: Sequence[Tensor | None]) -> bool:
        """Takes the gradients over and counts the step; False, and nothing, where one is not dense."""
        parts = self._parts([gradient for gradient in gradients if gradient is not None])
        if set(map(_LAYOUT, parts)) - {torch.strided}:
            return False
        for tensors, part in zip(self._tensors, parts, strict=True):
            tensors.gradient = part
        self.steps.counts.add_(self._made)
        self._counts.add_(self._made)
        for call in self.calls:
            call.step += 1
        return True

    def end(self) -> None:
        """Lets the gradients go; writes back weights that are no matrix where they lie."""
        for tensors in self._tensors:
            tensors.gradient = tensors.weight
        for part, tensors in self._gaps:
            part.copy_(tensors.weight.view(part.shape))

    def _parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """Of this rank. `to_local` of a parameter makes a view each time, which takes a microsecond."""
        return [getattr(one, "_local_tensor", one) for one in tensors] if self._sharded else tensors


_LAYOUT = attrgetter("layout")


def parameters_of(groups: Groups) -> list[Tensor]:
    """Of all groups."""
    return list(chain.from_iterable(group["params"] for group in groups))


def asked(groups: Groups) -> list[tuple[Any, ...]]:
    """What of each group's options decides what is stored."""
    return [(len(group["params"]), group["states"], group.get("block"), group["master"],
             bool(group.get("momentum"))) for group in groups]


def _tensors(states: Mapping[Tensor, State]) -> list[Tensor]:
    return list(chain.from_iterable(map(dict.values, states.values())))


def _same(found: Iterable[Any], known: Sequence[Any]) -> bool:
    """Whether both are the same objects in the same order."""
    found = list(found)
    return len(found) == len(known) and all(map(is_, found, known))
