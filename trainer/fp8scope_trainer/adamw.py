"""AdamW with E4M3 moments.

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    u = clip(m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), -3, 3)
    w = w (1 - lr weight_decay) - lr u

The step itself uses the exact fp32 moments; they are rounded once, when they are stored (see `moments`).
Matrices of at least 4,096 elements in a group with states="fp8" are stored in E4M3; all else stays fp32,
decided from the global shape and so alike on every mesh. A clip of 3 is never reached by exact moments at the
default betas; it bounds what a damaged second moment can do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.observer import StateObserver
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.convert import is_head
from fp8scope_trainer.moments import (
    Draw,
    Moments,
    decode,
    local,
    new_state,
    quantizable,
    store,
)

STATES = ("fp8", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepStats:
    """Of the last step, over this rank's part of the parameters: 0-dim fp32 tensors on their device."""

    update_max: Tensor
    """Largest |u| before clipping: the update in units of lr."""
    v_zero_share: Tensor
    """Share of stored second moments that are exactly zero where the first moment is not."""
    update_weight_ratio: Tensor
    """||lr u|| / ||w||, after clipping, w before the step."""
    clipped_share: Tensor
    """Share of elements whose update was clipped."""


class AdamW(Optimizer):
    """See the module. `observer` is set by a probe; `step_stats` is None until the first step.

    `states` ("fp8" or "fp32") can be set per group. `seed` names the random numbers of the rounding.
    """

    observer: StateObserver | None
    step_stats: StepStats | None

    def __init__(
        self, params: Iterable[Any], lr: float = 3e-4, *, betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8, weight_decay: float = 0.1, states: str = "fp8", clip: float | None = 3.0,
        seed: int = 0,
    ) -> None:
        self.observer, self.step_stats, self.seed = None, None, seed
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "states": states, "clip": clip})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refuses options that would be ignored or cannot work."""
        _check_group(self.defaults | param_group)
        super().add_param_group(param_group)

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
        sums = _Sums()
        for stream, (group, parameter) in enumerate(self._parameters()):
            if parameter.grad is not None:
                self._update(parameter, parameter.grad, group, stream, sums)
        self.step_stats = sums.stats()
        return loss

    def format_of(self, parameter: Tensor) -> str:
        """`fp8` or `fp32`: what the moments of `parameter` are, or will be, stored in."""
        for group, known in self._parameters():
            if known is parameter:
                return _format(group, parameter)
        raise Invalid("parameter", tuple(parameter.shape), "is not one of this optimizer's")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but everything keeps its dtype, and nothing is shared with `state_dict`.

        torch casts every state to the parameter's dtype, codes too, and shares `step`.
        """
        own = [group["states"] for group in self.param_groups]
        saved = [group.get("states") for group in state_dict["param_groups"]]
        if own != saved:
            raise Invalid("states", saved, f"must be what this optimizer's groups have: {own}")
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, (_, parameter) in zip(numbers, self._parameters(), strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                device = value.device if key == "step" else parameter.device
                self.state[parameter][key] = value.to(device, copy=True)

    def _parameters(self) -> Iterable[tuple[dict[str, Any], Tensor]]:
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], stream: int,
                sums: "_Sums") -> None:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # on the CPU: reading it never waits for the device
            state.update(new_state(parameter, quantized=_format(group, parameter) == "fp8"))
        state["step"] += 1
        step = int(state["step"].item())
        weight = local(parameter)
        moments = _moved(decode(state), local(gradient).float(), group["betas"])
        update = _direction(moments, step, group)
        sums.add(update, moments, weight, group)
        if group["clip"] is not None:
            update = update.clamp(-group["clip"], group["clip"])
        encoded = store(state, moments, Draw(self.seed, step, stream))
        if self.observer is not None and self.observer.active:
            for one in encoded:
                q = one.quantized
                self.observer.state(parameter, one.role, one.x, q.scales, scaling=q.scaling,
                                    rounding="stochastic", codes=q.codes)
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(weight.dtype), alpha=-group["lr"])


def parameter_groups(
    model: nn.Module, *, states: str = "fp8", weight_decay: float = 0.1
) -> list[dict[str, Any]]:
    """Groups for AdamW: embedding and head keep fp32 moments; vectors do too, and are not decayed."""
    embedded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices: list[Tensor] = []
    exempt: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif parameter in embedded or is_head(name.rpartition(".")[0]):
            exempt.append(parameter)
        else:
            matrices.append(parameter)
    groups = (
        {"params": matrices, "states": states, "weight_decay": weight_decay},
        {"params": exempt, "states": "fp32", "weight_decay": weight_decay},
        {"params": vectors, "states": "fp32", "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


def _moved(old: Moments, gradient: Tensor, betas: tuple[float, float]) -> Moments:
    return Moments(old.m.lerp(gradient, 1 - betas[0]), old.v.lerp(gradient.square(), 1 - betas[1]))


def _direction(moments: Moments, step: int, group: dict[str, Any]) -> Tensor:
    """u before clipping."""
    beta1, beta2 = group["betas"]
    root: Tensor = (moments.v / (1 - beta2**step)).sqrt_().add_(group["eps"])
    direction: Tensor = (moments.m / (1 - beta1**step)).div_(root)
    return direction


def _format(group: dict[str, Any], parameter: Tensor) -> str:
    return "fp8" if group["states"] == "fp8" and quantizable(parameter.shape) else "fp32"


def _check_group(group: dict[str, Any]) -> None:
    if group["states"] not in STATES:
        raise Invalid("states", group["states"], f"must be one of {', '.join(STATES)}")
    if not group["lr"] >= 0:
        raise Invalid("lr", group["lr"], "must be 0 or more")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise Invalid("betas", group["betas"], "must both be in [0, 1)")
    if not group["eps"] > 0:
        raise Invalid("eps", group["eps"], "must be above 0")
    if not group["weight_decay"] >= 0:
        raise Invalid("weight_decay", group["weight_decay"], "must be 0 or more")
    if group["clip"] is not None and not group["clip"] > 0:
        raise Invalid("clip", group["clip"], "must be above 0, or None for no clipping")


class _Sums:
    """What `StepStats` is made of, parameter by parameter."""

    def __init__(self) -> None:
        self.elements = 0
        self.rows: list[Tensor] = []

    def add(self, update: Tensor, moments: Moments, weight: Tensor, group: dict[str, Any]) -> None:
        if not update.numel():
            return
        size, clip = update.abs(), group["clip"] or float("inf")
        self.elements += update.numel()
        lost = (moments.v == 0) & (moments.m != 0)
        self.rows.append(torch.stack((
            size.amax(), lost.sum().float(), (size > clip).sum().float(),
            size.clamp(max=clip).square().sum() * group["lr"] ** 2, weight.float().square().sum(),
        )))

    def stats(self) -> StepStats | None:
        if not self.rows:
            return None
        rows = torch.stack(self.rows)
        _, lost, clipped, moved, weight = rows.sum(dim=0).unbind()
        return StepStats(
            update_max=rows[:, 0].amax(), v_zero_share=lost / self.elements,
            update_weight_ratio=(moved / weight).sqrt(), clipped_share=clipped / self.elements,
        )
