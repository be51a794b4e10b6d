"""The tensorwise FP8 product: one scale a tensor, and therefore transposes that are exact.

    forward     X quantized in both orientations from one read of codes; Y = X W^T; the codes of X^T are kept
    backward    dY quantized in both orientations; dX = dY W with the weight's codes transposed now,
                dW = dY^T X

Kept for backward: the codes of X^T, one byte an element, and those of W, [N, K]. Keeping the codes of X and
transposing them in backward keeps as many bytes and moves one more an element (tensor.py).
"""

from typing import Any

from torch import Tensor

from fp8scope.quantize import scale_of
from fp8scope_protocol.formats import E4M3, Format
from fp8scope_trainer import gemm
from fp8scope_trainer.call import Call, hand_over_forward, hand_over_gradient
from fp8scope_trainer.recipe import Recipe, sanitized
from fp8scope_trainer.shared import Offer
from fp8scope_trainer.tensor import amax_of, quantize_tensor
from fp8scope_trainer.transpose import transposed


def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call, offer: Offer | None) -> Tensor:
    """Y [M, N] of x [M, K] and weight [N, K], in the dtype of x."""
    recipe = call.recipe
    two = recipe.power_of_two
    found = None if offer is None else offer.found
    q = quantize_tensor(sanitized(x, recipe), E4M3, scale=call.scale if found is None else found[1],
                        power_of_two=two, turned=call.differentiable and found is None)
    turned = q.turned if found is None else found[0]
    if offer is not None and q.turned is not None:
        offer.keep(q.turned, q.scale)
    w = quantize_tensor(weight, E4M3, power_of_two=two)
    if call.history is not None:
        call.history.merge(q.amax)
    ctx.sample = hand_over_forward(call, x, weight, q.scale, q.scale, w.scale)
    ctx.save_for_backward(turned, q.scale if found is None else found[1], w.codes, w.scale)
    return gemm.tensorwise(q.codes, q.scale, w.codes, w.scale, dtype=x.dtype, fast=True)


def backward(ctx: Any, dy: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """dX [M, K] and dW [N, K], those that are needed."""
    turned, scale, w_codes, w_scale = ctx.saved_tensors
    recipe = call.recipe
    for_x, for_weight = ctx.needs_input_grad[:2]
    q = quantize_tensor(sanitized(dy, recipe), recipe.gradient_element, scale=call.gradient_scale,
                        power_of_two=recipe.power_of_two, turned=for_weight)
    if call.gradient_history is not None:
        call.gradient_history.merge(q.amax)
    hand_over_gradient(call, dy, q.scale, q.scale, ctx.sample)
    dx = dw = None
    if for_x:
        dx = gemm.tensorwise(q.codes, q.scale, transposed(w_codes), w_scale, dtype=dy.dtype)
    if for_weight:
        assert q.turned is not None
        dw = gemm.tensorwise(q.turned, q.scale, turned, scale, dtype=ctx.weight_dtype)
    return dx, dw


def tensor_scale(x: Tensor, element: Format, recipe: Recipe, scale: Tensor | None = None) -> Tensor:
    """The scale [1, 1] with which x would be quantized."""
    if scale is not None:
        return scale
    return scale_of(amax_of(x), element, power_of_two=recipe.power_of_two).view(1, 1)
