"""What a step found out about one parameter: where its tensors lie, which takes tens of microseconds."""

from torch import Tensor

from fp8scope_trainer.moments import State
from fp8scope_trainer.place import local
from fp8scope_trainer.rules import Rule
from fp8scope_trainer.state_format import StateFormat
from fp8scope_trainer.step import StepTensors


class Work:
    """One parameter to be updated, its state as it was then. Between steps its gradient is not held."""

    __slots__ = ("_address", "_kept", "format", "parameter", "rule", "state", "tensors")

    def __init__(
        self, parameter: Tensor, state: State, rule: Rule, format: StateFormat, tensors: StepTensors
    ) -> None:
        self.parameter, self.state, self.tensors = parameter, state, tensors
        self.rule, self.format = rule, format
        self._kept = _but_step(state)
        self._address = local(parameter).data_ptr()

    def holds(self, state: State, stream: int, rule: Rule, format: StateFormat) -> bool:
        """Whether nothing has moved, and the same is asked for."""
        part, kept = local(self.parameter), _but_step(state)
        return (state is self.state and len(kept) == len(self._kept)
                and all(a is b for a, b in zip(kept, self._kept, strict=True))
                and (rule, format, stream) == (self.rule, self.format, self.tensors.stream)
                and part.data_ptr() == self._address and part.is_contiguous())


def _but_step(state: State) -> list[Tensor]:
    return [value for key, value in state.items() if key != "step"]
