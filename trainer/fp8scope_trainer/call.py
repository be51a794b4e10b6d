"""What one forward of an FP8 linear decided, and what an observer hears of it and of its backward."""

from typing import NamedTuple

from torch import Tensor

from fp8scope.gemm import WgradSample
from fp8scope.observer import LinearObserver
from fp8scope.sums import RowSums
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.formats import TILE
from fp8scope_trainer.history import AmaxHistory
from fp8scope_trainer.recipe import Recipe


class Call(NamedTuple):
    """What one forward decided; its backward follows it."""

    precision: Precision
    recipe: Recipe
    observer: LinearObserver | None = None
    watcher: LinearObserver | None = None
    """The observer, if it wants the operands of this pass."""
    scale: Tensor | None = None
    """Delayed activation scale, fp32 [1, 1]; None under current scaling."""
    gradient_scale: Tensor | None = None
    history: AmaxHistory | None = None
    """Which is to hear the amax of the activation; None under current scaling and in evaluation."""
    gradient_history: AmaxHistory | None = None
    differentiable: bool = True
    """Whether a backward pass can follow that asks for the gradient of the weight."""

    @property
    def shareable(self) -> bool:
        """Whether what this call saves can serve other layers of the same input."""
        return self.differentiable and self.scale is None and self.precision == "fp8"

    def in_backward(self, *, heard: bool) -> "Call":
        """As its backward pass sees it; `heard`: the observer has that gradient already."""
        return self._replace(watcher=None if heard else watching(self.observer, self.precision))

    def sums(self, role: str, x: Tensor, *, policy: str) -> RowSums | None:
        """Where the quantizer of x is to add its round trip, if anywhere. A sanitized x is not what is to be
        measured."""
        if self.watcher is None or self.recipe.sanitize:
            return None
        return self.watcher.sums(role, x, policy=policy)


def watching(observer: LinearObserver | None, precision: Precision) -> LinearObserver | None:
    """The observer, if it wants what is computed now."""
    return observer if observer is not None and precision != "bf16" and observer.active else None


def hand_over_forward(
    call: Call, x: Tensor, weight: Tensor, row: Tensor, column: Tensor, weight_scales: Tensor, *,
    summed: bool = False,
) -> WgradSample | None:
    """The scales of x, x.t() and the weight. Returns what the observer wants kept until backward.

    summed: the quantizer has measured x itself. One scale a tensor gives x.t() the codes of x: it is not
    handed over a second time.
    """
    if (watcher := call.watcher) is None:
        return None
    recipe = call.recipe
    scaling, two = recipe.operand_scaling, recipe.power_of_two
    if not summed:
        watcher.tensor("activation", "rowwise", x, row, scaling=scaling, policy=recipe.policy,
                       power_of_two=two)
    if recipe.scaling == "block":
        watcher.tensor("activation", "columnwise", x.t(), column, scaling=recipe.wgrad_scaling,
                       policy=recipe.policy, power_of_two=two)
    exact = getattr(weight, "exact", weight)
    if exact is not None:  # of a weight that was gathered in FP8 nothing but codes is here
        watcher.tensor("weight", "rowwise", exact, weight_scales, scaling=recipe.weight_scaling,
                       policy="current", power_of_two=two)
        watcher.gemm(x, exact, row, weight_scales, scaling=scaling, weight_scaling=recipe.weight_scaling)
    if recipe.wgrad_activation == "block":  # as tiles, all rows of a block with one scale
        column = column.repeat_interleave(TILE, dim=0)[:x.shape[1]]
    return watcher.sample(x, column)


def hand_over_gradient(
    call: Call, dy: Tensor, row: Tensor, column: Tensor, sample: WgradSample | None, *, summed: bool = False,
) -> None:
    """The scales of dy and dy.t(); see `hand_over_forward`."""
    if (watcher := call.watcher) is None:
        return
    recipe = call.recipe
    scaling, policy, two = recipe.operand_scaling, recipe.gradient_policy, recipe.power_of_two
    element = recipe.gradient_format
    if not summed:
        watcher.tensor("gradient", "rowwise", dy, row, scaling=scaling, policy=policy, power_of_two=two,
                       format=element)
    if recipe.scaling == "block":
        watcher.tensor("gradient", "columnwise", dy.t(), column, scaling=scaling, policy=policy,
                       power_of_two=two, format=element)
    if sample is not None:
        watcher.wgrad(dy, column, sample, scaling=scaling, format=element)
