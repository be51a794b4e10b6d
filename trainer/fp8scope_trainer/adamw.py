"""AdamW, and the parameter groups that our optimizers share. See `optimizer` and, for the update, `rules`."""

from collections.abc import Iterable
from typing import Any

from fp8scope_trainer.groups import parameter_groups
from fp8scope_trainer.optimizer import StateOptimizer, StepStats
from fp8scope_trainer.rules import ADAMW

__all__ = ["AdamW", "StepStats", "parameter_groups"]


class AdamW(StateOptimizer):
    """Adam with decoupled weight decay. All options can be set per group.

    states, block: how moments are stored, see `state_format`. clip: largest |u|, None for none. warmup_steps:
    how many steps keep fp32 moments first. master: an fp32 master of 16-bit weights. seed: names the random
    numbers of the rounding. `Invalid` names an option that cannot be.
    """

    rule = ADAMW

    def __init__(
        self, params: Iterable[Any], lr: float = 3e-4, *, betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8, weight_decay: float = 0.1, states: str = "fp8", block: int | None = None,
        clip: float | None = 3.0, warmup_steps: int = 0, master: bool = False, seed: int = 0,
    ) -> None:
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "states": states,
            "block": block, "clip": clip, "warmup_steps": warmup_steps, "master": master, "seed": seed,
        })
