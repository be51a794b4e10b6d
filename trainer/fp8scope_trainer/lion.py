"""Lion: the sign of an interpolated momentum (Chen et al. 2023). One state; every weight moves by lr."""

from collections.abc import Iterable
from typing import Any

from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.rules import LION


class Lion(StateOptimizer):
    """Options as of `adamw.AdamW`; lr is a third to a tenth of AdamW's, the update needs no clipping."""

    rule = LION

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, *, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0, states: str = "fp8", block: int | None = None, warmup_steps: int = 0,
        master: bool = False, seed: int = 0,
    ) -> None:
        super().__init__(params, {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "states": states, "block": block,
            "warmup_steps": warmup_steps, "master": master, "seed": seed,
        })
