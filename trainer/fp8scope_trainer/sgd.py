"""SGD, torch's form: the buffer is not damped and lr stays outside of it."""

from collections.abc import Iterable
from typing import Any

from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.rules import SGD as RULE


class SGD(StateOptimizer):
    """A group with `momentum` 0 has no moments, and `states` says nothing of it.

    The other options as of `adamw.AdamW`; the update is not clipped.
    """

    rule = RULE

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, *, momentum: float = 0.9, nesterov: bool = False,
        weight_decay: float = 0.0, states: str = "fp8", block: int | None = None, warmup_steps: int = 0,
        master: bool = False, seed: int = 0,
    ) -> None:
        super().__init__(params, {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "states": states, "block": block, "warmup_steps": warmup_steps, "master": master, "seed": seed,
        })
