"""How a linear's operands become FP8: the recipes and their options.

`block`: activations and gradients in [1,128] tiles, in both orientations; weights in [128,128] blocks; E4M3
throughout (block-scaled GEMMs on Hopper reject E5M2). Under `delayed` the activation takes one scale from its
amax history for all of its tiles; weights and gradients stay with current scaling.

`tensorwise`: one scale a tensor, in E4M3, gradients in E5M2 where asked. It computes faster and holds less
range: an outlier takes it from the whole tensor and not from 127 neighbours. Under `delayed` activations and
gradients take the scales of their histories and are read once instead of twice; the weight, which is smaller
and is read again anyway, stays with current scaling.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
from torch import Tensor

from fp8scope import backend
from fp8scope.observer import Told
from fp8scope.quantize import Quantized, block_amax, scale_of, tile_amax
from fp8scope.sums import RowSums
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, E5M2, SCALE_POLICIES, TILE, Format
from fp8scope_trainer.history import LONGEST

RECIPES = ("block", "tensorwise")
WGRAD_ACTIVATIONS = {"tile": "tile 1x128", "block": "block 128x128"}
GRADIENT_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Scaling choices of one FP8 linear."""

    scaling: str = "block"
    """Which elements share a scale: `block` or `tensorwise`."""
    gradient_format: str = "e4m3"
    """Of the gradient of the output: `e4m3`, or under tensorwise scaling `e5m2`."""
    policy: str = "current"
    """Where scales come from: `current` or `delayed`."""
    history_length: int = LONGEST
    """Steps that a delayed scale looks back, 1 to 1024."""
    margin: int = 0
    """Bits of headroom that a delayed scale adds."""
    power_of_two: bool = False
    """Current scales rounded up to a power of two: at most one bit of range for exact re-quantization."""
    wgrad_activation: str = "tile"
    """How wgrad takes the activation of the block recipe: in `tile`s along the tokens or in `block`s of
    128 x 128, for which Hopper has a faster product and which hold less range."""
    sanitize: bool = False
    """FP8 takes NaN and Inf of activations and gradients as 0. They are still counted, but a gradient scaler
    no longer sees them."""

    def __post_init__(self) -> None:
        _check("scaling", self.scaling, RECIPES)
        _check("gradient_format", self.gradient_format, GRADIENT_FORMATS)
        _check("wgrad_activation", self.wgrad_activation, WGRAD_ACTIVATIONS)
        if self.wgrad_activation == "block" and self.scaling != "block":
            raise Invalid("wgrad_activation", "block", "goes with scaling block")
        _check("policy", self.policy, SCALE_POLICIES)
        if self.gradient_format == "e5m2" and self.scaling == "block":
            raise Invalid("gradient_format", "e5m2",
                          "goes with scaling tensorwise: block-scaled GEMMs refuse it")
        if not _is_whole(self.history_length) or not 1 <= self.history_length <= LONGEST:
            raise Invalid("history_length", self.history_length, f"must be 1 to {LONGEST} steps")
        if not _is_whole(self.margin) or not 0 <= self.margin <= 8:
            raise Invalid("margin", self.margin, "must be 0 to 8 bits; E4M3 has 17 from end to end")
        for name in ("power_of_two", "sanitize"):
            if not isinstance(getattr(self, name), bool):
                raise Invalid(name, getattr(self, name), "must be True or False")

    @property
    def text(self) -> str:
        """All of it, for `recipe_of`: what a compiled graph knows of it."""
        return (f"{self.scaling} {self.gradient_format} {self.policy} {self.history_length} {self.margin} "
                f"{self.power_of_two:d} {self.wgrad_activation} {self.sanitize:d}")

    @property
    def operand_scaling(self) -> str:
        """Of activations and gradients, as protocol.formats names it."""
        return "tile 1x128" if self.scaling == "block" else "tensorwise"

    @property
    def wgrad_scaling(self) -> str:
        """Of the activation in wgrad."""
        return WGRAD_ACTIVATIONS[self.wgrad_activation] if self.scaling == "block" else "tensorwise"

    def operands(self) -> dict[tuple[str, str], Told]:
        """What an observer is told of, by role and orientation."""
        activation = Told("e4m3", self.operand_scaling, self.policy)
        gradient = Told(self.gradient_format, self.operand_scaling, self.gradient_policy)
        found = {("activation", "rowwise"): activation, ("gradient", "rowwise"): gradient,
                 ("weight", "rowwise"): Told("e4m3", self.weight_scaling, "current")}
        if self.scaling == "block":
            found["activation", "columnwise"] = activation._replace(scaling=self.wgrad_scaling)
            found["gradient", "columnwise"] = gradient
        return found

    @property
    def weight_scaling(self) -> str:
        """Of weights."""
        return "block 128x128" if self.scaling == "block" else "tensorwise"

    @property
    def gradient_policy(self) -> str:
        """Where the scales of gradients come from."""
        return "current" if self.scaling == "block" else self.policy

    @property
    def gradient_element(self) -> Format:
        """The format of gradients."""
        return GRADIENT_FORMATS[self.gradient_format]


@cache
def recipe_of(text: str) -> Recipe:
    """The recipe of this `Recipe.text`."""
    scaling, gradient_format, policy, length, margin, two, activation, sanitize = text.split()
    return Recipe(scaling=scaling, gradient_format=gradient_format, policy=policy, history_length=int(length),
                  margin=int(margin), power_of_two=two == "1", wgrad_activation=activation,
                  sanitize=sanitize == "1")


def quantize_rows(
    x: Tensor, recipe: Recipe, scale: Tensor | None = None, *, sums: RowSums | None = None
) -> Quantized:
    """x [R, C] in tiles along its rows; the columnwise orientation is that of x.t().

    scale: the delayed one, [1, 1], for every tile. sums: to which the round trip is added.
    """
    two = recipe.power_of_two and scale is None
    return backend.quantize_tiles(x, E4M3, scales=scale, power_of_two=two, out=sums)


def quantize_both(
    x: Tensor, recipe: Recipe, scale: Tensor | None = None, *, sums: RowSums | None = None
) -> tuple[Quantized, Quantized]:
    """x [R, C] and x.t() [C, R], each in tiles along its rows; scale and sums as in `quantize_rows`."""
    if scale is None and sums is None:
        return backend.quantize_both(x, E4M3, power_of_two=recipe.power_of_two)
    return quantize_rows(x, recipe, scale, sums=sums), quantize_rows(x.t(), recipe, scale)


def quantize_for_wgrad(x: Tensor, recipe: Recipe, scale: Tensor | None = None) -> Quantized:
    """The activation x [M, K], turned: x.t() in tiles along the tokens, or in blocks."""
    if recipe.wgrad_activation == "tile":
        return quantize_rows(x.t(), recipe, scale)
    two = recipe.power_of_two and scale is None
    return backend.quantize_blocks(x.t(), E4M3, scales=scale, power_of_two=two)


def quantize_weight(weight: Tensor, recipe: Recipe) -> Quantized:
    """weight [N, K] in blocks: its own codes, if it was gathered as such (see `fp8_gather`)."""
    if (gathered := getattr(weight, "quantized", None)) is not None:
        return cast(Quantized, gathered)
    return backend.quantize_blocks(weight, E4M3, power_of_two=recipe.power_of_two)


def sanitized(x: Tensor, recipe: Recipe) -> Tensor:
    """x, or under `sanitize` a copy in which NaN and Inf are 0."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) if recipe.sanitize else x


def tile_scales(x: Tensor, recipe: Recipe, scale: Tensor | None = None) -> Tensor:
    """The scales [R, ceil(C / 128)] with which x [R, C] would be quantized."""
    if scale is None:
        return scale_of(tile_amax(x), E4M3, power_of_two=recipe.power_of_two)
    return scale.expand(x.shape[0], -(-x.shape[1] // TILE))


def block_scales(x: Tensor, recipe: Recipe, scale: Tensor | None = None) -> Tensor:
    """The scales [ceil(R / 128), ceil(C / 128)] with which x [R, C] would be quantized in blocks."""
    if scale is None:
        return scale_of(block_amax(x), E4M3, power_of_two=recipe.power_of_two)
    return scale.expand(-(-x.shape[0] // TILE), -(-x.shape[1] // TILE))


def _check(name: str, value: object, accepted: Collection[str]) -> None:
    if value not in accepted:
        raise Invalid(name, value, f"must be one of {', '.join(accepted)}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
