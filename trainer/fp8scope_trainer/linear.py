"""A linear layer that computes in FP8 and can change its precision in a live run.

    fp8     fprop, dgrad and wgrad of quantized operands; the activation's columnwise codes are what is saved
    bf16    operands rounded to BF16, from the tensors before quantization
    shadow  computes as bf16; the observer still gets the scales that FP8 would use, and histories go on

A call captures its precision, recipe and scale in forward and keeps them in backward, whatever is set in
between. A forward that runs inside a backward pass is a recomputation: it takes the precision of the last
forward outside of one. A backward pass that is split (zero-bubble schedules) comes here twice with one and
the same tensor, for the gradients of inputs and later for those of weights; the observer hears of it once.

Rejected: saving the high-precision input (an FP8 layer would then save no memory at all); keeping a
transposed weight; reading `precision` in backward.
"""

import weakref
from dataclasses import dataclass, replace
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8scope.gemm import WgradSample
from fp8scope.observer import LinearObserver
from fp8scope.quantize import Quantized
from fp8scope.sums import RowSums
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import TILE
from fp8scope_trainer import gemm
from fp8scope_trainer.history import AmaxHistory
from fp8scope_trainer.recipe import Recipe, block_scales, quantize_both, quantize_weight, tile_scales


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What one forward decided; its backward follows it."""

    precision: Precision
    recipe: Recipe
    scale: Tensor | None
    """Delayed activation scale, fp32 [1, 1]; None under current scaling."""
    observer: LinearObserver | None

    @property
    def watcher(self) -> LinearObserver | None:
        """The observer, if it wants this call's operands."""
        wanted = self.observer is not None and self.precision != "bf16" and self.observer.active
        return self.observer if wanted else None

    def sums(self, role: str, x: Tensor, *, policy: str) -> RowSums | None:
        """Where the quantizer of x is to add its round trip, if anywhere."""
        return None if (watcher := self.watcher) is None else watcher.sums(role, x, policy=policy)


class Fp8Linear(nn.Linear):
    """`nn.Linear` with block-scaled FP8 GEMMs: same parameters, same `state_dict` keys.

    Any number of tokens; both feature sizes multiples of 128. `observer` is set by a probe.
    """

    observer: LinearObserver | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe: Recipe | None = None,
        precision: Precision = "fp8", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if reason := unsuitable(in_features, out_features):
            raise Invalid("in_features, out_features", (in_features, out_features), reason)
        self.recipe = recipe or Recipe()
        self.observer = None
        self.history = (
            AmaxHistory(self.recipe.history_length, margin=self.recipe.margin, device=device)
            if self.recipe.policy == "delayed" else None
        )
        self.set_precision(precision)
        self._running = self.precision

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, recipe: Recipe, precision: Precision = "fp8") -> Self:
        """An FP8 layer that owns the very parameters of `linear`."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, recipe=recipe,
                    precision=precision, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        if layer.history is not None:
            layer.history = AmaxHistory(recipe.history_length, margin=recipe.margin,
                                        device=linear.weight.device)
        return layer.train(linear.training)

    def set_precision(self, precision: Precision) -> None:
        """Takes effect with the next forward. Call at a step boundary, on all ranks alike."""
        if precision not in get_args(Precision):
            raise Invalid("precision", precision, f"must be one of {', '.join(get_args(Precision))}")
        self.precision: Precision = precision

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a compiled model too the layer and its hooks run as they are written: the kernels are its own,
        and a switch of precision or a change of cadence compiles nothing again."""
        return super().__call__(*args, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() == 0:
            return nn.functional.linear(input, self.weight, self.bias)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        x = input.reshape(-1, self.in_features)
        y: Tensor = _BlockLinear.apply(x, self.weight, self._call(x))  # type: ignore[no-untyped-call]
        y = y.view(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision}, policy={self.recipe.policy}"

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled layer is unobserved: the observer belongs to the attached model."""
        return self.__dict__ | {"observer": None}

    def _call(self, x: Tensor) -> Call:
        if torch._C._current_graph_task_id() == -1:  # not inside a backward pass
            self._running = self.precision
        scale = None
        if self.history is not None and self._running != "bf16":
            scale = self.history.scale()
            if self.training:
                self.history.observe(x.detach())
        return Call(precision=self._running, recipe=self.recipe, scale=scale, observer=self.observer)


def unsuitable(in_features: int, out_features: int) -> str:
    """Why a layer of this size cannot run in FP8; empty if it can."""
    odd = [f"{name} {size}" for name, size in (("in_features", in_features), ("out_features", out_features))
           if size % TILE or not size]
    return f"{' and '.join(odd)}: not a multiple of {TILE}" if odd else ""


class _BlockLinear(torch.autograd.Function):
    """Y [M, N] = X [M, K] W^T, W [N, K], in the precision of its call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call) -> Tensor:
        ctx.call, ctx.weight_dtype, ctx.told = call, weight.dtype, _nothing
        with torch.autocast(x.device.type, enabled=False):
            return (_forward_fp8 if call.precision == "fp8" else _forward_bf16)(ctx, x, weight, call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        call = ctx.call if ctx.told() is not dy else replace(ctx.call, observer=None)
        ctx.told = weakref.ref(dy)
        with torch.autocast(dy.device.type, enabled=False):
            dx, dw = (_backward_fp8 if call.precision == "fp8" else _backward_bf16)(ctx, dy, call)
        return dx, dw if dw is None else dw.to(ctx.weight_dtype), None


def _nothing() -> None:
    """The gradient before the first one."""


def _forward_fp8(ctx: Any, x: Tensor, weight: Tensor, call: Call) -> Tensor:
    sums = call.sums("activation", x, policy=call.recipe.policy)
    x_row, x_column = quantize_both(x, call.recipe, call.scale, sums=sums)
    w = quantize_weight(weight, call.recipe)
    ctx.sample = _hand_over_forward(call, x, weight, x_row.scales, x_column.scales, w.scales,
                                    summed=sums is not None)
    ctx.save_for_backward(*x_column[:2], *w[:2])
    return gemm.fprop(x_row, w, dtype=x.dtype)


def _backward_fp8(ctx: Any, dy: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    x_codes, x_scales, w_codes, w_scales = ctx.saved_tensors
    sums = call.sums("gradient", dy, policy="current")
    dy_row, dy_column = quantize_both(dy, call.recipe, sums=sums)
    _hand_over_gradient(call, dy, dy_row.scales, dy_column.scales, ctx.sample, summed=sums is not None)
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = gemm.dgrad(dy_row, Quantized(w_codes, w_scales, "block 128x128"), dtype=dy.dtype)
    if ctx.needs_input_grad[1]:
        dw = gemm.wgrad(dy_column, Quantized(x_codes, x_scales, "tile 1x128"), dtype=ctx.weight_dtype)
    return dx, dw


def _forward_bf16(ctx: Any, x: Tensor, weight: Tensor, call: Call) -> Tensor:
    ctx.sample = None
    if call.watcher is not None:
        row, column = (tile_scales(y, call.recipe, call.scale) for y in (x, x.t()))
        ctx.sample = _hand_over_forward(call, x, weight, row, column, block_scales(weight, call.recipe))
    ctx.save_for_backward(x.bfloat16(), weight)
    return gemm.rounded_matmul(x, weight.t(), dtype=x.dtype)


def _backward_bf16(ctx: Any, dy: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    if call.watcher is not None:
        row, column = (tile_scales(y, call.recipe) for y in (dy, dy.t()))
        _hand_over_gradient(call, dy, row, column, ctx.sample)
    dx = gemm.rounded_matmul(dy, weight, dtype=dy.dtype) if ctx.needs_input_grad[0] else None
    dw = gemm.rounded_matmul(dy.t(), x, dtype=torch.float32) if ctx.needs_input_grad[1] else None
    return dx, dw


def _hand_over_forward(
    call: Call, x: Tensor, weight: Tensor, row_scales: Tensor, column_scales: Tensor, w_scales: Tensor, *,
    summed: bool = False,
) -> WgradSample | None:
    """Returns what the observer wants kept until backward. summed: the quantizer has measured x itself."""
    if (watcher := call.watcher) is None:
        return None
    policy, two = call.recipe.policy, call.recipe.power_of_two
    tile = {"scaling": "tile 1x128", "policy": policy}
    if not summed:
        watcher.tensor("activation", "rowwise", x, row_scales, **tile, power_of_two=two)
    watcher.tensor("activation", "columnwise", x.t(), column_scales, **tile, power_of_two=two)
    watcher.tensor("weight", "rowwise", weight, w_scales, scaling="block 128x128", policy="current",
                   power_of_two=two)
    watcher.gemm(x, weight, row_scales, w_scales)
    return watcher.sample(x, column_scales)


def _hand_over_gradient(
    call: Call, dy: Tensor, row_scales: Tensor, column_scales: Tensor, sample: WgradSample | None, *,
    summed: bool = False,
) -> None:
    if (watcher := call.watcher) is None:
        return
    tile = {"scaling": "tile 1x128", "policy": "current"}
    two = call.recipe.power_of_two
    if not summed:
        watcher.tensor("gradient", "rowwise", dy, row_scales, **tile, power_of_two=two)
    watcher.tensor("gradient", "columnwise", dy.t(), column_scales, **tile, power_of_two=two)
    if sample is not None:
        watcher.wgrad(dy, column_scales, sample)
