"""Adam's step, as an optimizer's own numbers say it will be, or was:

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)        the direction, in units of lr
    dw = -lr (u + weight_decay w)                                  decoupled decay (AdamW)
    dw = -lr u, with g + weight_decay w in place of g              coupled decay (Adam)

Optimizers of this form are told by the names of their classes (torch, torchao, our trainer, apex) or by
`optimizer_name` (bitsandbytes). Variants with another direction (AMSGrad, NAdam, RAdam, Adamax, LAMB) are
none, though they keep the same moments: a formula that does not hold is worse than no number. Of SparseAdam,
which moves the rows that have a gradient, all rows are read as if they had moved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8scope.sample import Sample

NAMES = frozenset({"Adam", "AdamW", "SparseAdam", "_AdamBase", "FusedAdam"})

Number = Tensor | float
Steps = Tensor | float
"""t of every part, float64 [P] on the device; a number where it is the same for all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdamForm:
    """What one parameter group's step is made of. Numbers, or 0-dim tensors where the optimizer has them."""

    lr: Number
    betas: tuple[Number, Number]
    eps: Number
    weight_decay: Number
    decoupled: bool
    maximize: bool
    lazy: bool
    """Only rows that have a gradient move, and so do their moments."""
    clip: float | None
    """Largest |u| that is applied."""

    def direction(self, sample: Sample, m: Tensor, v: Tensor, steps: Steps) -> Tensor:
        """u, fp32 [elements], after clipping. m, v: the exact or decoded moments after step t, fp32."""
        first, second = (_correction(sample, beta, steps) for beta in self.betas)
        root = (v / second).sqrt_().add_(_here(self.eps, v))
        u = (m / first).div_(root)
        return u if self.clip is None else u.clamp_(-self.clip, self.clip)


def adam_form(optimizer: Optimizer, group: Mapping[str, Any]) -> AdamForm | None:
    """The form of `group`'s step, None where it is another one."""
    names = {one.__name__ for one in type(optimizer).__mro__}
    other = getattr(optimizer, "optimizer_name", None)  # of bitsandbytes, whose decay is always decoupled
    if (other != "adam" and not names & NAMES) or group.get("amsgrad"):
        return None
    if not {"lr", "betas", "eps"} <= group.keys() or len(group["betas"]) != 2:
        return None
    decoupled = group.get("decoupled_weight_decay", other == "adam" or "AdamW" in names)
    if "_AdamBase" in names:
        decoupled = getattr(optimizer, "is_adamw", decoupled)
    elif "FusedAdam" in names:
        decoupled = bool(getattr(optimizer, "adam_w_mode", True))
    return AdamForm(
        lr=group["lr"], betas=tuple(group["betas"]), eps=group["eps"],
        weight_decay=group.get("weight_decay", 0.0), decoupled=bool(decoupled),
        maximize=bool(group.get("maximize", False)), lazy="SparseAdam" in names, clip=group.get("clip"),
    )


def host_steps(states: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """How many steps each state has made; None where a GPU counts, which is not waited for."""
    counts = [state.get("step", 0) for state in states]
    if any(isinstance(count, Tensor) and count.device.type != "cpu" for count in counts):
        return None
    return [float(count) for count in counts]


def steps_of(states: Sequence[Mapping[str, Any]], device: torch.device, *, ahead: int = 0) -> Steps:
    """How many steps each state has made, `ahead` more. Counters on a GPU are not waited for."""
    if (known := host_steps(states)) is None:
        return _together([torch.as_tensor(state.get("step", 0)) for state in states], device) + ahead
    numbers = [count + ahead for count in known]
    if len(set(numbers)) == 1:
        return numbers[0]
    return torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)


def _together(counts: Sequence[Tensor], device: torch.device) -> Tensor:
    """float64 [P] on the device, in two launches where all are of one kind, as an optimizer's are."""
    if len({(count.device, count.dtype) for count in counts}) > 1:
        counts = [count.to(device, torch.float64, non_blocking=True) for count in counts]
    return torch.stack([count.reshape(()) for count in counts]).to(device, torch.float64, non_blocking=True)


def numbers_on(device: torch.device, numbers: Sequence[Number]) -> Tensor:
    """float64 [n] on the device. Numbers that lie there are not waited for."""
    here = [float(x) if isinstance(x, Tensor) and x.device.type == "cpu" else x for x in numbers]
    if any(isinstance(x, Tensor) for x in here):
        return _together([torch.as_tensor(x, dtype=torch.float64) for x in here], device)
    return torch.tensor(here, dtype=torch.float64).to(device, non_blocking=True)


def _correction(sample: Sample, beta: Number, steps: Steps) -> Number:
    """1 - beta^t: a number, a tensor [], or one for each element of the sample."""
    if isinstance(steps, Tensor):
        return sample.spread((1 - _here(beta, steps) ** steps).float())
    found = 1 - beta**steps
    return _here(found, sample.lengths)


def _here(number: Number, like: Tensor) -> Number:
    """A number that may lie on another device, without waiting for it."""
    if isinstance(number, Tensor) and number.device != like.device and number.device.type == "cpu":
        return float(number)
    return number
