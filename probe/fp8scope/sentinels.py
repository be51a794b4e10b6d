"""Sentinels: a few numbers of the whole job, taken in every step at any cadence.

Everything stays on the device until the step closes. How numbers merge over ranks is fixed by their columns
(sums.py): squares and counts add up, extremes take the maximum. What several ranks hold alike enters with
1 / replicas, so that a sum over ranks counts it once, under DDP, FSDP and hybrids of both.

Gradients are read when `optimizer.step` begins: after unscaling, and after clipping if the job clips; when it
ends if it was given a closure, which computes them. A job that knows the norm before clipping says so with
`scope.log(grad_norm=...)`, which wins.

Numbers about the update come, in every step, from the optimizer's own account (`optimizer.step_stats`) if it
keeps one. Else they are taken in sampled steps from its exp_avg and exp_avg_sq, which costs some ten passes
over them: u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps). Likewise non-finite gradients: elements are
counted in sampled steps; in the others a tensor that holds any counts as one.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8scope.rows import to_host
from fp8scope.sharding import local, replicas
from fp8scope.sums import SENTINEL_MAX_COLUMNS, SENTINEL_SUM_COLUMNS, SentinelSums
from fp8scope_protocol.errors import Invalid, UnknownName

LOGGED = ("loss", "grad_norm", "lr", "loss_scale")
"""What a job may hand over by name."""

Number = Tensor | float


class Sentinels:
    """The sentinels of the step under way."""

    def __init__(self, device: torch.device, *, world: int) -> None:
        self.device = device
        self.world = world
        self._now = SentinelSums.zeros(device)
        self._logged: set[str] = set()
        self._read: set[int] = set()
        """Ids of the optimizers whose gradients were read, and which have not stepped since."""

    def log(self, values: dict[str, Number]) -> None:
        """Numbers that the job knows. Losses average over calls; the others are the job's, on any rank."""
        for name, value in values.items():
            if name not in LOGGED:
                raise UnknownName("log", name, LOGGED)
            number = self._scalar(name, value)
            self._logged.add(name)
            if name == "loss":
                self._add(loss_sum=number, loss_count=1.0, nonfinite=(~torch.isfinite(number)).double())
            elif name == "grad_norm":
                self._set("grad_square", number.square() / self.world)
                self._set("grad_count", 1.0)
            else:
                self._raise(name, number)

    def read_gradients(self, optimizer: Optimizer, *, sampled: bool) -> None:
        """Reads the gradients that `optimizer` is about to use, or has used; once for each of its steps."""
        if id(optimizer) in self._read:
            return
        self._read.add(id(optimizer))
        lr = optimizer.param_groups[0].get("lr")
        if lr is not None and "lr" not in self._logged:
            self._raise("lr", self._number(lr))
        scale = getattr(optimizer, "grad_scale", None)  # set where the optimizer unscales by itself
        unscale = 1.0 if scale is None else self._number(scale).square().reciprocal()
        found = self._gradients(optimizer)
        for copies, gradients in found.items():
            norms = torch.stack([
                self._number(norm) for norm in torch._foreach_norm(gradients, 2.0, dtype=torch.float64)])
            if sampled:
                bad = sum(self._number(torch.count_nonzero(~torch.isfinite(g))) for g in gradients)
            else:
                bad = torch.count_nonzero(~torch.isfinite(norms)).double()
            self._add(nonfinite=bad / copies)
            if "grad_norm" not in self._logged:
                self._add(grad_square=norms.square().sum() * unscale / copies)
        if found and "grad_norm" not in self._logged:
            self._add(grad_count=1.0)

    def after_step(self, optimizer: Optimizer, *, sampled: bool) -> None:
        """Reads what the step did to the parameters."""
        self._read.discard(id(optimizer))
        stats = getattr(optimizer, "step_stats", None)
        if stats is not None:  # this rank's own ratios: merged over ranks as means
            self._raise("update_max", self._number(stats.update_max))
            self._add(v_zero=self._number(stats.v_zero_share), v_total=1.0, weight_square=1.0,
                      update_square=self._number(stats.update_weight_ratio).square())
            return
        for group in optimizer.param_groups if sampled else ():
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if isinstance(state, Mapping) and _is_adam(group, state):
                    self._add_update(group, parameter, state)

    def staleness(self, bits: Tensor) -> None:
        """The worst scale staleness of a delayed-scaling layer, in bits."""
        self._raise("scale_staleness_bits", bits)

    def take(self) -> SentinelSums:
        """The step's sentinels on their way to the host; then begins anew."""
        taken = SentinelSums(sums=to_host(self._now.sums), maxes=to_host(self._now.maxes))
        self._now = SentinelSums.zeros(self.device)
        self._logged.clear()
        self._read.clear()
        return taken

    def _gradients(self, optimizer: Optimizer) -> dict[int, list[Tensor]]:
        """This rank's parts of all gradients, by the number of ranks that hold the same part."""
        found: dict[int, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = local(parameter.grad)
                if gradient.is_sparse:
                    gradient = gradient.coalesce().values()
                if gradient.is_complex():
                    gradient = torch.view_as_real(gradient)
                if gradient.numel():
                    found.setdefault(replicas(parameter, self.world), []).append(gradient)
        return found

    def _add_update(self, group: dict[str, Any], parameter: Tensor, state: Mapping[str, Any]) -> None:
        m, v = local(state["exp_avg"]), local(state["exp_avg_sq"])
        if not (m.is_floating_point() and m.element_size() > 1 and m.shape == v.shape) or not m.numel():
            return
        share = 1.0 / replicas(parameter, self.world)
        beta1, beta2 = group["betas"]
        step = state["step"]
        t = step.double() if isinstance(step, Tensor) and step.is_cuda else float(step)
        root = v.sqrt().div_((1 - beta2**t) ** 0.5).add_(group["eps"])
        update = m.div(root)
        first = self._number(1 - beta1**t)
        lr = self._number(group["lr"])
        self._raise("update_max", self._number(torch.linalg.vector_norm(update, math.inf)) / first)
        moved = self._number(torch.linalg.vector_norm(update, dtype=torch.float64)) / first * lr
        weight = self._number(torch.linalg.vector_norm(local(parameter), dtype=torch.float64))
        lost = torch.count_nonzero((v == 0) & (m != 0))
        self._add(update_square=moved.square() * share, weight_square=weight.square() * share,
                  v_zero=self._number(lost) * share, v_total=m.numel() * share)

    def _scalar(self, name: str, value: Number) -> Tensor:
        """What a job says, as float64 [] on the device; `Invalid` if it is not one number."""
        try:
            return self._number(value)
        except (TypeError, ValueError, RuntimeError):
            given = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else value
            raise Invalid(name, given, "must be one real number") from None

    def _number(self, value: Number) -> Tensor:
        """`value` as float64 [] on the device; nothing waits."""
        if isinstance(value, Tensor):
            return local(value).reshape(()).to(self.device, torch.float64,
                                                non_blocking=self.device.type == "cuda")
        return torch.full((), value, dtype=torch.float64, device=self.device)

    def _add(self, **values: Number) -> None:
        for name, value in values.items():
            self._now.sums[SENTINEL_SUM_COLUMNS.index(name)] += value

    def _set(self, name: str, value: Number) -> None:
        self._now.sums[SENTINEL_SUM_COLUMNS.index(name)] = value

    def _raise(self, name: str, value: Tensor) -> None:
        """NaN counts as Inf: a maximum over ranks may lose a NaN."""
        cell = self._now.maxes[SENTINEL_MAX_COLUMNS.index(name)]
        torch.maximum(cell, value.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf), out=cell)


def _is_adam(group: dict[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether the update follows from what the optimizer keeps."""
    return {"exp_avg", "exp_avg_sq", "step"} <= state.keys() and {"betas", "eps", "lr"} <= group.keys()
