"""Paired runs: the same weights, the same data in the same order, and only the numbers' formats differ.

Two seeds of one recipe differ by several percent of the loss, two precisions of one seed by less than a
hundredth of that. So only differences within a pair say anything, and the mean difference of n pairs comes
with its 95 % interval: mean +- t s / sqrt(n), with Student's t of n - 1 degrees of freedom.

The learning rate rises over the warm-up and falls to 0 along a line from there on: at a constant rate two
runs that differ in nothing but rounding are still apart by what their last steps happened to do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fp8scope.observer import Switchable
from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.data import Corpus, batch_at
from fp8scope_trainer.decoder import Decoder, DecoderConfig
from fp8scope_trainer.history import advance_histories
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.shard import shard

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % point of Student's t, for 1, 2, ... degrees of freedom; the last is a bound for more."""

Change = Callable[[nn.Module], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What all runs of a comparison have in common."""

    steps: int
    batch: int
    """Sequences a step."""
    lr: float
    warmup_steps: int = 20
    clip: float = 1.0
    held_out_batches: int = 16

    def lr_at(self, step: int) -> float:
        """Of a step, counted from 0."""
        rise = (step + 1) / max(1, self.warmup_steps)
        fall = (self.steps - step) / max(1, self.steps - self.warmup_steps)
        return self.lr * min(1.0, rise, fall)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "held_out_batches"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("warmup_steps", self.warmup_steps)
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < 1e3:
                raise Invalid(name, getattr(self, name), "must be above 0 and below 1000")


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """In which formats one side of a pair computes and keeps its states."""

    precision: Literal["fp32", "bf16", "fp8"]
    states: str = "fp32"
    block: int | None = None
    linear: Recipe = field(default_factory=Recipe)
    change: Change | None = None
    """Done to the model before the first step: a sabotage or a perturbation."""


@dataclass(slots=True)
class Curve:
    """One run."""

    losses: list[float] = field(default_factory=list)
    update_ratios: list[float] = field(default_factory=list)
    """||lr u|| / (lr ||w||) of each step."""
    held_out: float = float("nan")
    """As trained."""
    in_bf16: float = float("nan")
    """The same of the same weights, with every layer that can be switched in BF16: what rounding has done to
    the weights, without what it does to this forward."""


def trained(
    config: DecoderConfig, numbers: Numbers, schedule: Schedule, corpus: Corpus[Tensor], *, seed: int,
    device: torch.device,
) -> Iterator[Curve]:
    """Runs step by step; yields the growing curve after each, and last with its held-out loss."""
    torch.manual_seed(seed)
    model: nn.Module = Decoder(config).to(device)
    if numbers.precision != "fp32":
        convert(model, Conversion(precision=numbers.precision, recipe=numbers.linear))
    if numbers.change is not None:
        numbers.change(model)
    if dist.is_initialized():
        shard(model, stage=2, compute=torch.bfloat16 if device.type == "cuda" else None)
    optimizer = AdamW(parameter_groups(model, states=numbers.states, block=numbers.block), seed=seed)
    curve = Curve()
    for step in range(schedule.steps):
        lr = schedule.lr_at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = _loss(model, corpus.train, step, config, schedule, seed, device)
        torch.autograd.backward(loss)
        optimizer.clip_gradients(schedule.clip)
        optimizer.step()
        optimizer.zero_grad()
        advance_histories(model)
        curve.losses.append(loss.item())
        if optimizer.step_stats is not None:
            curve.update_ratios.append(optimizer.step_stats.update_weight_ratio.item() / lr)
        yield curve
    model.eval()
    curve.held_out = _held_out(model, corpus.held_out, config, schedule, device)
    for layer in model.modules():
        if isinstance(layer, Switchable):
            layer.set_precision("bf16")
    curve.in_bf16 = _held_out(model, corpus.held_out, config, schedule, device)
    yield curve


def mean_and_half_width(differences: list[float]) -> tuple[float, float]:
    """Mean, and half the 95 % interval around it; infinite for one pair."""
    if len(differences) < 2:
        return fmean(differences), float("inf")
    t = T_95[min(len(differences) - 1, len(T_95)) - 1]
    return fmean(differences), t * stdev(differences) / len(differences) ** 0.5


@torch.no_grad()
def _held_out(
    model: nn.Module, text: Tensor, config: DecoderConfig, schedule: Schedule, device: torch.device
) -> float:
    return fmean(_loss(model, text, step, config, schedule, 0, device).item()
                 for step in range(schedule.held_out_batches))


def _loss(
    model: nn.Module, text: Tensor, step: int, config: DecoderConfig, schedule: Schedule, seed: int,
    device: torch.device,
) -> Tensor:
    tokens, targets = (one.to(device) for one in batch_at(text, step=step, batch=schedule.batch,
                                                          length=config.context, seed=seed))
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
