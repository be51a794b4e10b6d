"""What AdamW, Adam, SGD and Lion share: groups, states in six formats, and one step over all parameters.

A step collects the parameters that share format and scalars, and updates them by one call; what it finds
out is kept for the next (see `plan`). While an observer looks, each parameter is updated by itself, so that
what was encoded can be handed over; codes and weights are the same. The fp32 warm-up of a group keeps exact
moments in its first `warmup_steps` steps and encodes them at the end of the last.

`states`, `block`, `master` and whether there is a `momentum` may change in the groups of a live optimizer:
the next step brings the states into what is asked for, from the moments as they were stored. Loading does
not convert: there a difference is more likely a mistake.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8scope.observer import StateObserver
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.gradient_norm import total_norm
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
    end_warm_up,
    exception,
    is_exact,
    new_state,
    slots,
)
from fp8scope_trainer.place import Place, as_matrix, columns_of, local, place_of
from fp8scope_trainer.plan import Call, Plan, parameters_of
from fp8scope_trainer.reformat import FP32, as_asked, format_in, is_as_asked
from fp8scope_trainer.rules import Rule, Scalars, rule_of, scalars
from fp8scope_trainer.state_format import StateFormat
from fp8scope_trainer.step import ROW, StepTensors, update, update_all
from fp8scope_trainer.steps import Steps
from fp8scope_trainer.work import Asked, Work

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


class StateOptimizer(Optimizer):
    """Base of our optimizers. `observer` is set by a probe; `step_stats` is None until the first step."""

    rule: ClassVar[Rule]
    state_rounding: ClassVar[str] = "stochastic"
    """How states in fewer than 32 bits are rounded, in the probe's words."""
    observer: StateObserver | None
    step_stats: StepStats | None
    grad_scale: Tensor | None
    """What every gradient is divided by in the next step, a tensor of one element; see `clip_gradients`."""
    _spent: Tensor | None = None
    """The `grad_scale` that the last step has used."""
    _clipped: tuple[Tensor, weakref.ref[Tensor]] | None
    """The `grad_scale` of the last `clip_gradients`, and the first gradient that it has looked at."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._begin()
        super().__init__(params, defaults | {"rule": self.rule.name})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and pickles hold groups, states and a clip to come; they are observed by nobody."""
        super().__setstate__(state)
        if "observer" not in self.__dict__:
            self._begin()
            self.grad_scale, self._spent = state.get("grad_scale"), state.get("_spent")

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"grad_scale": self.grad_scale, "_spent": self._spent}

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
        plan = self._begun()
        factor = self._gradient_factor()
        elements, rows = 0, []
        for call in plan.calls:
            by = scalars(call.rule, call.group, call.step)
            if self.observer is not None and self.observer.active:
                rows += [self._shown(call, by, work, factor) for work in call.works]
            else:
                rows += update_all(call.tensors, call.rule, call.format, by, factor, self._tables)
            elements += call.elements
        plan.end()
        self._end_warm_ups(plan)
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
        gradients = [grad for p in parameters_of(self.param_groups) if (grad := p.grad) is not None]
        norm = total_norm(gradients)
        self.grad_scale = (norm / max_norm).clamp(min=1.0)
        self._clipped = (self.grad_scale, weakref.ref(gradients[0])) if gradients else None
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
                state, rule = self.state.get(parameter, {}), rule_of(self.rule, group)
                found = None if is_exact(state, rule) else format_in(state, parameter, rule)
                return (found or _format(group, parameter)).name
        raise Invalid("parameter", tuple(parameter.shape), "is not one of this optimizer's")

    def coded_states(self, parameter: Tensor) -> tuple[tuple[str, str, str], ...]:
        """(role, format, scaling), in the probe's words, of the states of `parameter` stored as codes."""
        for _, group, known in self._parameters():
            if known is parameter and (format := _format(group, parameter)).quantized:
                scaling = format.scaling(columns_of(parameter.shape))
                return tuple((ROLES.get(key, key), format.code_name(root=key == self.rule.root), scaling)
                             for key in rule_of(self.rule, group).keys)
        return ()

    @property
    def exceptions(self) -> tuple[StateException, ...]:
        """Every parameter that keeps fp32 moments although its group asks for others, and why."""
        found = []
        for stream, group, parameter in self._parameters():
            if rule_of(self.rule, group).keys and (reason := exception(parameter, format_of_group(group))):
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
        self._forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but everything keeps its dtype, and nothing is shared with `state_dict`.

        torch casts every state to the parameter's dtype, codes too, and shares `step`. `Invalid` for states
        of another rule, or stored in another way. For torch's own there is `torch_states.from_torch`.
        """
        check_loaded(self.param_groups, state_dict["param_groups"])
        check_rule(self.rule, state_dict["state"])
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, (_, group, parameter) in zip(numbers, self._parameters(), strict=True):
            for key, default in self.defaults.items():
                group.setdefault(key, default)  # of options that were not there when it was saved
            for key, value in state_dict["state"].get(number, {}).items():
                kept = torch.as_tensor(value)  # `step` may be a number
                device = torch.device("cpu") if key == "step" else parameter.device
                self.state[parameter][key] = kept.to(device, copy=True).contiguous()
        self._forget()

    def _begin(self) -> None:
        self.observer, self.step_stats, self.grad_scale, self._clipped = None, None, None, None
        self._forget()

    def _forget(self) -> None:
        """Holds no tensor of earlier steps any more."""
        self._tables: dict[Any, Any] = {}
        self._works: dict[Tensor, Work] = {}
        self._plan: Plan | None = None

    def _gradient_factor(self) -> Tensor | None:
        """1 / grad_scale, if that is not one that an earlier step has used, and not one of gradients that
        are gone: `model.zero_grad` says nothing to an optimizer."""
        scale, spent, self._spent = self.grad_scale, self._spent, self.grad_scale
        if scale is None or scale is spent:
            return None
        if self._clipped is not None and self._clipped[0] is scale:
            first = next((p.grad for p in parameters_of(self.param_groups) if p.grad is not None), None)
            if self._clipped[1]() is not first:
                return None
        return scale.float().reciprocal()

    def _parameters(self) -> Iterator[tuple[int, dict[str, Any], Tensor]]:
        """(number, group, parameter) of all."""
        pairs = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        return ((stream, group, parameter) for stream, (group, parameter) in enumerate(pairs))

    def _name(self, stream: int) -> str:
        names = list(chain.from_iterable(
            group.get("param_names", [""] * len(group["params"])) for group in self.param_groups))
        return names[stream] or str(stream)

    def _begun(self) -> Plan:
        """What there is to do now, counted as done."""
        gradients = [parameter.grad for parameter in parameters_of(self.param_groups)]
        plan = self._plan
        if plan is None or not plan.holds(self.param_groups, self.state, gradients):
            self._plan = None
            works = self._brought(gradients)
            plan = self._plan = self._planned(gradients, works, None if plan is None else plan.steps)
        if not plan.begin(gradients):
            for number, gradient in enumerate(gradients):
                if gradient is not None and gradient.layout != torch.strided:
                    raise Invalid("grad.layout", str(gradient.layout),
                                  f"of parameter {self._name(number)} must be dense")
        return plan

    def _brought(self, gradients: Sequence[Tensor | None]) -> list[Work]:
        """The parameters to be updated, in their order. Makes the states that are missing, and brings those
        that are there into what their groups ask, of parameters without a gradient, too."""
        works, stream = [], 0
        for group in self.param_groups:
            check_group(self.rule, group)
            check_weights(group)
        for group in self.param_groups:
            asked = Asked(0, rule_of(self.rule, group), format_of_group(group), group["master"])
            for parameter in group["params"]:
                if (work := self._brought_one(group, parameter, asked._replace(stream=stream))) is not None:
                    works.append(work)
                stream += 1
        return works

    def _brought_one(self, group: dict[str, Any], parameter: Tensor, asked: Asked) -> Work | None:
        state: State = self.state.get(parameter, {})
        known = self._works.get(parameter)
        if known is None or not known.holds(state, asked):
            if not state and parameter.grad is None:
                return None
            format = _format(group, parameter)
            if not state:
                state = self.state[parameter] = self._new_state(group, parameter, 0)
            elif not is_as_asked(state, parameter, asked.rule, format, master=asked.master):
                draw = self._draw(group, parameter, state, asked.stream)
                state = self.state[parameter] = as_asked(state, parameter, asked.rule, format, draw,
                                                         master=asked.master)
            known = self._works[parameter] = self._work(parameter, state, asked, format)
        return None if parameter.grad is None else known

    def _planned(self, gradients: Sequence[Tensor | None], works: list[Work], steps: Steps | None) -> Plan:
        """The calls of a step. steps: those known from before."""
        if steps is None or not steps.are_of(self.state.values()):
            steps = Steps(self.state.values())
        made, calls, numbers = steps.made(), {}, self._group_numbers()
        for work in works:
            number, step = numbers[work.tensors.stream], made[id(work.state)]
            gradient = gradients[work.tensors.stream]
            assert gradient is not None
            if local(gradient).numel() != work.tensors.weight.numel():
                raise Invalid("grad", tuple(local(gradient).shape), f"of parameter "
                              f"{self._name(work.tensors.stream)} must be placed as the parameter is")
            key = (number, work.format, work.exact, step, work.tensors.weight.device)
            if key not in calls:
                calls[key] = Call(group=self.param_groups[number], rule=work.rule, format=work.format,
                                  exact=work.exact, step=step)
            calls[key].add(work)
        return Plan(self.param_groups, self.state, gradients, list(calls.values()), steps)

    def _group_numbers(self) -> list[int]:
        """Of each parameter the number of its group."""
        return [number for number, group in enumerate(self.param_groups) for _ in group["params"]]

    def _work(self, parameter: Tensor, state: State, asked: Asked, format: StateFormat) -> Work:
        format, master = FP32 if is_exact(state, asked.rule) else format, state.get(MASTER)
        weight = as_matrix(parameter.detach())
        rounds = format.rounds or (parameter.dtype != torch.float32 and master is None)
        place = place_of(parameter) if rounds else Place(0)
        tensors = StepTensors(
            weight=weight, gradient=weight, slots=slots(state, asked.rule),
            master=None if master is None else as_matrix(master), stream=asked.stream, first=place.first,
            starts=place.starts)
        return Work(parameter, state, asked, format, tensors)

    def _new_state(self, group: dict[str, Any], parameter: Tensor, steps: int) -> State:
        format = _format(group, parameter)
        exact = format.rounds and steps < group["warmup_steps"]
        rule = rule_of(self.rule, group)
        return new_state(parameter, rule, format, exact=exact, master=group["master"])

    def _draw(self, group: Mapping[str, Any], parameter: Tensor, state: State, stream: int) -> Draw:
        return Draw(seed=group["seed"], step=int(state["step"].item()), stream=stream,
                    place=place_of(parameter))

    def _shown(self, call: Call, by: Scalars, work: Work, factor: Tensor | None) -> Tensor:
        """Updates one parameter and hands over what was encoded."""
        row, stored = update(work.tensors, call.rule, call.format, by, factor)
        for one in stored:
            self._show(work.parameter, call.format, one)
        return row

    def _end_warm_ups(self, plan: Plan) -> None:
        for call in plan.calls:
            if call.exact and call.step >= call.group["warmup_steps"]:
                for work in call.works:
                    draw = self._draw(call.group, work.parameter, work.state, work.tensors.stream)
                    format = _format(call.group, work.parameter)
                    end_warm_up(work.state, work.parameter, call.rule, format, draw)

    def _show(self, parameter: Tensor, format: StateFormat, one: Stored) -> None:
        assert self.observer is not None
        if one.encoded.scales is None:
            return
        root, columns = one.key == self.rule.root, one.x.shape[1]
        self.observer.state(
            parameter, ROLES.get(one.key, one.key), one.x, one.encoded.scales,
            scaling=format.scaling(columns_of(parameter.shape)), rounding=self.state_rounding,
            format=format.code_name(root=root), codes=format.unpacked(one.encoded.codes, columns, root=root))


def _format(group: Mapping[str, Any], parameter: Tensor) -> StateFormat:
    """What the moments of a parameter are stored in after the warm-up."""
    format = format_of_group(group)
    return FP32 if exception(parameter, format) else format


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
