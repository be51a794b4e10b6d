"""Adam with its weight decay in the gradient (L2), as torch.optim.Adam has it."""

from collections.abc import Iterable
from typing import Any

from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.rules import ADAM


class Adam(StateOptimizer):
    """Options as of `adamw.AdamW`; defaults of betas and weight decay as torch's."""

    rule = ADAM

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, states: str = "fp8", block: int | None = None,
        clip: float | None = 3.0, warmup_steps: int = 0, master: bool = False, seed: int = 0,
    ) -> None:
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "states": states,
            "block": block, "clip": clip, "warmup_steps": warmup_steps, "master": master, "seed": seed,
        })
