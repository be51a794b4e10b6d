"""What AdamW, Adam, SGD and Lion share: groups, states in six formats, and one step over all parameters.

A step collects the parameters that share format, scalars and dtypes, and updates them by one call. While an
observer looks, each parameter is updated by itself, so that what was encoded can be handed over; codes and
weights are the same. The fp32 warm-up of a group keeps exact moments in its first `warmup_steps` steps and
encodes them at the end of the last.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8scope.observer import StateObserver
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.groups import (
    check_group,
    check_loaded,
    check_rule,
    check_weights,
    format_of_group,
)
from fp8scope_trainer.moments import (
    MASTER,
    Draw,
    State,
    Stored,
    as_matrix,
    columns_of,
    end_warm_up,
    exception,
    first_index,
    is_exact,
    local,
    new_state,
    slots,
)
from fp8scope_trainer.rules import Rule, Scalars, scalars
from fp8scope_trainer.state_format import StateFormat
from fp8scope_trainer.step import ROW, StepTensors, update, update_all
from fp8scope_trainer.work import Work, work_of

FP32 = StateFormat.of("fp32")

ROLES = {"momentum_buffer": "momentum"}
"""The probe's names of states that are called otherwise there."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepStats:
    """Of the last step, over this rank's part of the parameters: 0-dim fp32 tensors on their device."""

    update_max: Tensor
    """Largest |u| before clipping: the update in units of lr."""
    v_zero_share: Tensor | None
    """Share of second moments that are exactly zero where the first is not; None if the rule has none."""
    update_weight_ratio: Tensor
    """||lr u|| / ||w||, after clipping, w before the step."""
    clipped_share: Tensor
    """Share of elements whose update was clipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateException:
    """A parameter that keeps fp32 moments although its group asks for others."""

    name: str
    """As given to the optimizer, else its number there."""
    shape: tuple[int, ...]
    asked: str
    reason: str


class _Kind(NamedTuple):
    """What the parameters of one call share."""

    format: StateFormat
    by: Scalars
    weight: torch.dtype
    gradient: torch.dtype
    device: torch.device
    master: bool


class StateOptimizer(Optimizer):
    """Base of our optimizers. `observer` is set by a probe; `step_stats` is None until the first step."""

    rule: ClassVar[Rule]
    observer: StateObserver | None
    step_stats: StepStats | None
    grad_scale: Tensor | None
    """What every gradient is divided by in the next step, a tensor of one element; see `clip_gradients`."""
    _spent: Tensor | None = None
    """The `grad_scale` that the last step has used."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._begin()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and pickles hold groups and states; they are observed by nobody."""
        super().__setstate__(state)
        if "observer" not in self.__dict__:
            self._begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refuses options that would be ignored or cannot work."""
        check_group(self.rule, self.defaults | param_group)
        super().add_param_group(param_group)
        check_weights(self.param_groups[-1])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient. Nothing waits for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = self._gradient_factor()
        elements, rows = 0, []
        for kind, works in self._collected().items():
            if self.observer is not None and self.observer.active:
                rows += [self._shown(kind, one, factor) for one in works]
            else:
                rows += update_all([one.tensors for one in works], self.rule, kind.format, kind.by, factor,
                                   self._tables)
            elements += sum(one.tensors.weight.numel() for one in works)
            for one in works:
                if not (part := local(one.parameter.detach())).is_contiguous():
                    part.copy_(one.tensors.weight.view(part.shape))
                one.release()
        self._end_warm_ups()
        self.step_stats = _stats(rows, elements, has_root=self.rule.root is not None)
        return loss

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """The norm of all gradients, over all ranks, fp32 []; the next step clips them to `max_norm`.

        Nothing is written: the step divides each gradient by `grad_scale` while it reads it, which
        `nn.utils.clip_grad_norm_` takes a pass over all gradients for. With a NaN norm the step is NaN, too.
        """
        if not max_norm > 0:
            raise Invalid("max_norm", max_norm, "must be above 0")
        gradients = [p.grad for _, _, p in self._parameters() if p.grad is not None]
        norm: Tensor = nn.utils.get_total_norm(gradients)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()
        self.grad_scale = (norm / max_norm).clamp(min=1.0)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what the gradients were to be divided by goes with them."""
        super().zero_grad(set_to_none)
        self.grad_scale = None

    def format_of(self, parameter: Tensor) -> str:
        """One of `state_block.FORMATS`: what the moments of `parameter` are stored in, or will be when they
        exist and its fp32 warm-up is over."""
        for _, group, known in self._parameters():
            if known is parameter:
                return _format(group, parameter).name
        raise Invalid("parameter", tuple(parameter.shape), "is not one of this optimizer's")

    def coded_states(self, parameter: Tensor) -> tuple[tuple[str, str, str], ...]:
        """(role, format, scaling), in the probe's words, of the states of `parameter` stored as codes."""
        for _, group, known in self._parameters():
            if known is parameter and (format := _format(group, parameter)).quantized:
                scaling = format.scaling(columns_of(parameter.shape))
                return tuple((ROLES.get(key, key), format.code_name(root=key == self.rule.root), scaling)
                             for key in self.rule.keys)
        return ()

    @property
    def exceptions(self) -> tuple[StateException, ...]:
        """Every parameter that keeps fp32 moments although its group asks for others, and why."""
        found = []
        for stream, group, parameter in self._parameters():
            if group["states"] != "fp32" and (reason := exception(parameter.shape)):
                found.append(StateException(name=self._name(stream), shape=tuple(parameter.shape),
                                            asked=group["states"], reason=reason))
        return tuple(found)

    @torch.no_grad()
    def make_states(self, steps: int = 0) -> None:
        """Zero moments for every parameter, with the keys and dtypes they have after `steps` steps.

        For what loads into existing states, as torch.distributed.checkpoint does. States that exist are
        replaced.
        """
        for _, group, parameter in self._parameters():
            state = self._new_state(group, parameter, steps)
            state["step"].fill_(steps)
            self.state[parameter] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but everything keeps its dtype, and nothing is shared with `state_dict`.

        torch casts every state to the parameter's dtype, codes too, and shares `step`.
        """
        check_loaded(self.param_groups, state_dict["param_groups"])
        check_rule(self.rule, state_dict["state"])
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, (_, group, parameter) in zip(numbers, self._parameters(), strict=True):
            for key, default in self.defaults.items():
                group.setdefault(key, default)  # of options that were not there when it was saved
            for key, value in state_dict["state"].get(number, {}).items():
                device = value.device if key == "step" else parameter.device
                self.state[parameter][key] = value.to(device, copy=True).contiguous()

    def _begin(self) -> None:
        self.observer, self.step_stats, self.grad_scale = None, None, None
        self._tables: dict[Any, Any] = {}
        self._works: dict[Tensor, Work] = {}

    def _gradient_factor(self) -> Tensor | None:
        """1 / grad_scale, if that is not one that an earlier step has used."""
        scale, spent, self._spent = self.grad_scale, self._spent, self.grad_scale
        return None if scale is None or scale is spent else scale.float().reciprocal()

    def _parameters(self) -> Iterator[tuple[int, dict[str, Any], Tensor]]:
        """(number, group, parameter) of all."""
        pairs = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        return ((stream, group, parameter) for stream, (group, parameter) in enumerate(pairs))

    def _name(self, stream: int) -> str:
        names = list(chain.from_iterable(
            group.get("param_names", [""] * len(group["params"])) for group in self.param_groups))
        return names[stream] or str(stream)

    def _collected(self) -> dict[_Kind, list[Work]]:
        """What there is to do, by call, in the order of the parameters."""
        kinds: dict[_Kind, list[Work]] = defaultdict(list)
        known: dict[tuple[int, int], Scalars] = {}
        formats: dict[tuple[int, torch.Size], StateFormat] = {}
        for stream, group, parameter in self._parameters():
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise Invalid("grad.layout", str(parameter.grad.layout),
                              f"of parameter {self._name(stream)} must be dense")
            state: State = self.state[parameter]
            if not state:
                state.update(self._new_state(group, parameter, 0))
            state["step"] += 1
            step = int(state["step"].item())
            if (id(group), step) not in known:
                known[id(group), step] = scalars(self.rule, group, step)
            if (place := (id(group), parameter.shape)) not in formats:
                formats[place] = _format(group, parameter)
            format = FP32 if is_exact(state, self.rule) else formats[place]
            work = work_of(self._works, parameter, state,
                           partial(self._tensors, parameter, state, stream, format))
            tensors = work.tensors
            kind = _Kind(format, known[id(group), step], tensors.weight.dtype, tensors.gradient.dtype,
                         tensors.weight.device, tensors.master is not None)
            kinds[kind].append(work)
        return kinds

    def _tensors(self, parameter: Tensor, state: State, stream: int, format: StateFormat) -> StepTensors:
        master = state.get(MASTER)
        rounds = format.rounds or (parameter.dtype != torch.float32 and master is None)
        assert parameter.grad is not None
        return StepTensors(
            weight=as_matrix(parameter.detach()), gradient=as_matrix(parameter.grad),
            slots=slots(state, self.rule), master=None if master is None else as_matrix(master),
            stream=stream, first=first_index(parameter) if rounds else 0,
        )

    def _new_state(self, group: dict[str, Any], parameter: Tensor, steps: int) -> State:
        format = _format(group, parameter)
        exact = format.rounds and steps < group["warmup_steps"]
        return new_state(parameter, self.rule, format, exact=exact, master=group["master"])

    def _shown(self, kind: _Kind, work: Work, factor: Tensor | None) -> Tensor:
        """Updates one parameter and hands over what was encoded."""
        row, stored = update(work.tensors, self.rule, kind.format, kind.by, factor)
        for one in stored:
            self._show(work.parameter, kind.format, one)
        return row

    def _end_warm_ups(self) -> None:
        for stream, group, parameter in self._parameters():
            state: State = self.state.get(parameter, {})
            if not state or not is_exact(state, self.rule):
                continue
            step = int(state["step"].item())
            if step >= group["warmup_steps"]:
                draw = Draw(seed=group["seed"], step=step, stream=stream, first=first_index(parameter))
                end_warm_up(state, parameter, self.rule, _format(group, parameter), draw)

    def _show(self, parameter: Tensor, format: StateFormat, one: Stored) -> None:
        assert self.observer is not None
        if one.encoded.scales is None:
            return
        root, columns = one.key == self.rule.root, one.x.shape[1]
        self.observer.state(
            parameter, ROLES.get(one.key, one.key), one.x, one.encoded.scales,
            scaling=format.scaling(columns), rounding="stochastic", format=format.code_name(root=root),
            codes=format.unpacked(one.encoded.codes, columns, root=root))


def _format(group: dict[str, Any], parameter: Tensor) -> StateFormat:
    """What the moments of a parameter are stored in after the warm-up."""
    return FP32 if exception(parameter.shape) else format_of_group(group)


def _stats(rows: list[Tensor], elements: int, *, has_root: bool) -> StepStats | None:
    if not elements:
        return None
    table = torch.stack([row.to(rows[0].device, non_blocking=True) for row in rows])
    sums = dict(zip(ROW, table.sum(dim=0), strict=True))
    return StepStats(
        update_max=table[:, ROW.index("update_max")].amax(),
        v_zero_share=sums["lost"] / elements if has_root else None,
        update_weight_ratio=(sums["change_square"] / sums["weight_square"]).sqrt(),
        clipped_share=sums["clipped"] / elements,
    )
