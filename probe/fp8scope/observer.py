"""How quantizing code tells the probe what it just did: the in-situ interface.

A module or optimizer that quantizes by itself carries an attribute `observer`, None until a probe attaches.
When it is set and `active`, the owner hands over each tensor together with the scales it *really used*, so
that the numbers describe the live recipe and not a guess about it. Handing over must cost nothing when
inactive: check `active` first. An observer never raises and never keeps a reference to `x`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from fp8scope_protocol.commands import Precision

if TYPE_CHECKING:  # what layers are found by asks for no kernels
    from fp8scope.gemm import WgradSample
    from fp8scope.sums import RowSums


class LinearObserver(Protocol):
    """Attached to one quantized linear layer as `module.observer`."""

    active: bool
    """True only in sampled steps and outside of activation recomputation."""

    def sums(self, role: str, x: Tensor, *, policy: str) -> "RowSums | None":
        """The row to which the quantizer adds the round trip of x [R, C] in [1,128] tiles, with current
        scales and but for the histogram; `tensor` is then not told of it. None: the observer reads x itself.
        """
        return None

    def tensor(
        self, role: str, orientation: str, x: Tensor, scales: Tensor, *, scaling: str, policy: str,
        power_of_two: bool = False, format: str = "e4m3",
    ) -> None:
        """One quantization. x [R, C] high-precision, as quantized (columnwise: already transposed; left out
        under one scale a tensor, where it has the codes of rowwise); scales as in `quantize.Quantized`; role
        activation, weight or gradient. power_of_two: current scales were rounded up to powers of two."""

    def gemm(
        self, x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, *,
        scaling: str = "tile 1x128", weight_scaling: str = "block 128x128",
    ) -> None:
        """The operands of one fprop: x [M, K], weight [N, K], both high-precision, and the scales used."""

    def sample(self, x: Tensor, column_scales: Tensor) -> "WgradSample | None":
        """What a forward is to keep of x [M, K] until backward; mostly None. Scales are those of x.t()."""

    def wgrad(
        self, dy: Tensor, column_scales: Tensor, sample: "WgradSample", *, scaling: str = "tile 1x128",
        format: str = "e4m3",
    ) -> None:
        """The operands of the wgrad of the call that kept `sample`: dy [M, N], and the scales of dy.t(), in
        `format`; the sample is in E4M3."""


@runtime_checkable
class GraphObserver(Protocol):
    """A linear's observer that goes with compiled code, where hooks do not run and the layer calls it."""

    def begins(self) -> None:
        """A forward of the layer begins."""

    def ends(self) -> None:
        """It is over."""

    def keep(self, call: int, sample: "WgradSample | None") -> None:
        """The sample of a forward, for the backward pass that asks with the same number."""

    def kept(self, call: int) -> "WgradSample | None":
        """The sample of that forward."""


class StateObserver(Protocol):
    """Attached to an optimizer with quantized states as `optimizer.observer`."""

    active: bool

    def state(self, parameter: Tensor, role: str, x: Tensor, scales: Tensor, *, scaling: str,
              rounding: str, format: str, codes: Tensor) -> None:
        """One quantized state of `parameter` (local shard). x [R, C] is what was encoded, `codes` the
        result, one to an element, in `format`. For exp_avg_sq the role's x is sqrt(v). A format or scaling
        that the probe has no name for is told as not observed."""


class Told(NamedTuple):
    """How an operand will be handed over, in the words of a series."""

    format: str
    scaling: str
    policy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How neighbouring ranks share a linear that computes with plain tensors; its attribute `cut`."""

    dim: int
    """What of the weight [N, K] is cut: 0 its rows, 1 its columns."""
    parts: int
    part: int
    """That of this rank."""

    def repeats(self, role: str) -> bool:
        """Whether another rank counts this operand: all parts have the activation in common if rows are cut,
        the gradient if columns are."""
        return self.part > 0 and role == ("activation", "gradient")[self.dim]


@runtime_checkable
class Announcing(Protocol):
    """A quantized linear that knows beforehand what it will tell its observer."""

    def operands(self) -> Mapping[tuple[str, str], Told]:
        """By role and orientation."""


@runtime_checkable
class Withholding(Protocol):
    """A quantized linear that may be unable to tell its observer of an operand."""

    def withheld(self) -> Mapping[str, str]:
        """Reasons by role, as things are now."""


@runtime_checkable
class Switchable(Protocol):
    """A layer whose precision can be changed in a live run."""

    precision: Precision

    def set_precision(self, precision: Precision) -> None:
        """Takes effect with the next forward. Call at a step boundary, on all ranks alike."""


def switchable_layers(model: nn.Module) -> dict[str, Switchable]:
    """Every switchable layer of `model` by its qualified name (wrapper prefixes not yet stripped)."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Switchable)}
