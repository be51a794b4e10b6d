"""What a step found out about one parameter: where its tensors lie, which takes tens of microseconds."""

from operator import is_
from typing import NamedTuple

from torch import Tensor

from fp8scope_trainer.moments import State, is_exact
from fp8scope_trainer.place import local
from fp8scope_trainer.rules import Rule
from fp8scope_trainer.state_format import StateFormat
from fp8scope_trainer.step import StepTensors


class Asked(NamedTuple):
    """What decides how the states of a parameter are stored."""

    stream: int
    rule: Rule
    format: StateFormat
    """Of the group; what the parameter really has may be fp32."""
    master: bool


class Work:
    """One parameter to be updated, its state as it was then. Between steps its gradient is not held.

    format: what its moments are stored in now; exact: in a warm-up.
    """

    __slots__ = ("_address", "_asked", "_kept", "exact", "format", "parameter", "rule", "state", "tensors")

    def __init__(self, parameter: Tensor, state: State, asked: Asked, format: StateFormat,
                 tensors: StepTensors) -> None:
        self.parameter, self.state, self.tensors, self.format = parameter, state, tensors, format
        self.rule, self.exact = asked.rule, is_exact(state, asked.rule)
        self._asked, self._kept = asked, _but_step(state)
        self._address = local(parameter).data_ptr()

    def holds(self, state: State, asked: Asked) -> bool:
        """Whether nothing has moved, and the same is asked for."""
        part, kept = local(self.parameter), _but_step(state)
        return (state is self.state and asked == self._asked and len(kept) == len(self._kept)
                and all(map(is_, kept, self._kept))
                and part.data_ptr() == self._address and part.is_contiguous())


def _but_step(state: State) -> list[Tensor]:
    return [value for key, value in state.items() if key != "step"]
