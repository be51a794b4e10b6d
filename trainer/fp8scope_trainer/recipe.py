"""The block recipe: how a linear's operands become FP8.

Activations and gradients in [1,128] tiles, in both orientations; weights in [128,128] blocks; E4M3 throughout
(E5M2 belongs to tensorwise scaling: block-scaled GEMMs on Hopper reject it). Under `delayed` the activation
takes one scale from its amax history for all of its tiles; weights and gradients stay with current scaling.
"""

from dataclasses import dataclass

from torch import Tensor

from fp8scope import backend
from fp8scope.quantize import Quantized, block_amax, scale_of, tile_amax
from fp8scope.sums import RowSums
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, SCALE_POLICIES, TILE
from fp8scope_trainer.history import LONGEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Scaling choices of one FP8 linear."""

    policy: str = "current"
    """Where the activation's scale comes from: `current` or `delayed`."""
    history_length: int = LONGEST
    """Steps that a delayed scale looks back, 1 to 1024."""
    margin: int = 0
    """Bits of headroom that a delayed scale adds."""
    power_of_two: bool = False
    """Current scales rounded up to a power of two: at most one bit of range for exact re-quantization."""

    def __post_init__(self) -> None:
        if self.policy not in SCALE_POLICIES:
            raise Invalid("policy", self.policy, f"must be one of {', '.join(SCALE_POLICIES)}")
        if not 1 <= self.history_length <= LONGEST:
            raise Invalid("history_length", self.history_length, f"must be 1 to {LONGEST} steps")
        if not 0 <= self.margin <= 8:
            raise Invalid("margin", self.margin, "must be 0 to 8 bits; E4M3 has 17 from end to end")


def quantize_both(
    x: Tensor, recipe: Recipe, scale: Tensor | None = None, *, sums: RowSums | None = None
) -> tuple[Quantized, Quantized]:
    """x [R, C] in tiles along its rows, and x.t() [C, R] in tiles along its columns.

    scale: the delayed one, [1, 1], for every tile. sums: to which the round trip of the former is added.
    """
    two = recipe.power_of_two and scale is None
    rows = backend.quantize_tiles(x, E4M3, scales=scale, power_of_two=two, out=sums)
    return rows, backend.quantize_tiles(x.t(), E4M3, scales=scale, power_of_two=two)


def quantize_weight(weight: Tensor, recipe: Recipe) -> Quantized:
    """weight [N, K] in blocks."""
    return backend.quantize_blocks(weight, E4M3, power_of_two=recipe.power_of_two)


def tile_scales(x: Tensor, recipe: Recipe, scale: Tensor | None = None) -> Tensor:
    """The scales [R, ceil(C / 128)] with which x [R, C] would be quantized."""
    if scale is None:
        return scale_of(tile_amax(x), E4M3, power_of_two=recipe.power_of_two)
    return scale.expand(x.shape[0], -(-x.shape[1] // TILE))


def block_scales(weight: Tensor, recipe: Recipe) -> Tensor:
    """The scales [ceil(N / 128), ceil(K / 128)] with which weight [N, K] would be quantized."""
    return scale_of(block_amax(weight), E4M3, power_of_two=recipe.power_of_two)
