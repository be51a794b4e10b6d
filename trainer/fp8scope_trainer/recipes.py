"""Training recipes: what goes together when a decoder is trained in one precision or another.

`fp8` is what published FP8 runs recommend: 1.5 times the learning rate that suits BF16, gradients clipped at
a norm of 0.8, 2,000 steps of learning-rate warm-up, scales of 1.0 before the first amax is known, and an amax
history of 1,024 steps where a layer's scaling is delayed. QKNorm is the decoder's own
(`DecoderConfig.qk_norm`) and on everywhere. `bf16` is the baseline that it is compared with, `int8_states` is
`fp8` with both moments in INT8. `plain` is for runs of some hundred steps, which would end in 2,000 of
warm-up.

We have not measured these choices against others; benchmarks/parity.py compares precisions at equal choices.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.recipe import Recipe

Precision = Literal["fp8", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecipe:
    """Choices that do not depend on the model's size."""

    precision: Precision
    """Of the linears."""
    states: str
    """Format of the optimizer's moments, see `state_format`."""
    lr_factor: float
    """Times the learning rate that suits the model in BF16."""
    clip: float
    """Largest norm of the whole gradient."""
    warmup_steps: int
    """Over which the learning rate rises from 0."""
    linear: Recipe = field(default_factory=Recipe)
    """How operands become FP8. Before a history has an amax its scale is 1.0."""

    def __post_init__(self) -> None:
        if not 0 < self.lr_factor <= 100:
            raise Invalid("lr_factor", self.lr_factor, "must be above 0 and at most 100")
        check_clip(self.clip)
        check_whole("warmup_steps", self.warmup_steps)


def fp8() -> TrainingRecipe:
    """As recommended for FP8."""
    return TrainingRecipe(precision="fp8", states="fp8", lr_factor=1.5, clip=0.8, warmup_steps=2000,
                          linear=Recipe(history_length=1024))


def bf16() -> TrainingRecipe:
    """The BF16 baseline: fp32 moments, the model's own learning rate, gradients clipped at 1."""
    return TrainingRecipe(precision="bf16", states="fp32", lr_factor=1.0, clip=1.0, warmup_steps=2000)


def int8_states() -> TrainingRecipe:
    """`fp8` with both moments in INT8, in blocks of 1,024 elements."""
    return replace(fp8(), states="int8")


def plain() -> TrainingRecipe:
    """FP8 for short runs: the model's own learning rate after 20 steps, gradients clipped at 1."""
    return TrainingRecipe(precision="fp8", states="fp8", lr_factor=1.0, clip=1.0, warmup_steps=20)


RECIPES: dict[str, Callable[[], TrainingRecipe]] = {
    "plain": plain, "fp8": fp8, "bf16": bf16, "int8-states": int8_states,
}


def check_clip(clip: float) -> None:
    """`Invalid` unless a gradient can be clipped at `clip`."""
    if not 0 < clip < float("inf"):
        raise Invalid("clip", clip, "must be above 0 and finite")
