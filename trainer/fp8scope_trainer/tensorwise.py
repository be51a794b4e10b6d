"""The tensorwise FP8 product: one scale a tensor, and therefore transposes that are exact.

    forward     X quantized in both orientations from one read of codes; Y = X W^T; the codes of X^T are kept
    backward    dY quantized in both orientations; dX = dY W with the weight's codes transposed now,
                dW = dY^T X

Kept for backward: the codes of X^T, one byte an element, and those of W, [N, K]. Keeping the codes of X and
transposing them in backward keeps as many bytes and moves one more an element (tensor.py).
"""

from typing import Any

import torch
from torch import Tensor

from fp8scope.gemm import WgradSample
from fp8scope.quantize import scale_of
from fp8scope_protocol.formats import E4M3, Format
from fp8scope_trainer import gemm
from fp8scope_trainer.call import Call, hand_over_forward, hand_over_gradient
from fp8scope_trainer.recipe import Recipe, sanitized
from fp8scope_trainer.shared import Offer
from fp8scope_trainer.tensor import TensorCodes, amax_of, quantize_tensor
from fp8scope_trainer.transpose import transposed


def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call, offer: Offer | None) -> Tensor:
    """Y [M, N] of x [M, K] and weight [N, K], in the dtype of x."""
    recipe, found = call.recipe, None if offer is None else offer.found
    if found is None:
        q = quantize_tensor(sanitized(x, recipe), E4M3, scale=call.scale, power_of_two=recipe.power_of_two,
                            turned=call.differentiable)
        if offer is not None and q.turned is not None:
            offer.keep(q.turned, q.scale)
    else:
        q = quantize_tensor(sanitized(x, recipe), E4M3, scale=found[1])
        q = TensorCodes(q.codes, found[0], found[1], q.amax)
    w = quantize_tensor(weight, E4M3, power_of_two=recipe.power_of_two)
    y, ctx.sample = product(x, weight, call, q, w)
    ctx.save_for_backward(q.turned, q.scale, w.codes, w.scale)
    return y


def backward(ctx: Any, dy: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """dX [M, K] and dW [N, K], those that are needed."""
    turned, scale, w_codes, w_scale = ctx.saved_tensors
    return gradients(dy, call, (turned, scale), (w_codes, w_scale), ctx.sample,
                     needed=ctx.needs_input_grad[:2], dtype=ctx.weight_dtype)


def product(
    x: Tensor, weight: Tensor, call: Call, q: TensorCodes, w: TensorCodes
) -> tuple[Tensor, WgradSample | None]:
    """Y of the codes of x and weight, and what the observer keeps."""
    if call.history is not None:
        call.history.merge(q.amax)
    sample = hand_over_forward(call, x, weight, q.scale, q.scale, w.scale)
    return gemm.tensorwise(q.codes, q.scale, w.codes, w.scale, dtype=x.dtype, fast=True), sample


def gradients(
    dy: Tensor, call: Call, column: tuple[Tensor | None, Tensor], w: tuple[Tensor, Tensor],
    sample: WgradSample | None, *, needed: tuple[bool, bool], dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """dX in the dtype of dy and dW in `dtype`, where `needed`, of codes and scales of x.t() and weight."""
    recipe = call.recipe
    q = quantize_tensor(sanitized(dy, recipe), recipe.gradient_element, scale=call.gradient_scale,
                        power_of_two=recipe.power_of_two, turned=needed[1])
    if call.gradient_history is not None:
        call.gradient_history.merge(q.amax)
    hand_over_gradient(call, dy, q.scale, q.scale, sample)
    dx = dw = None
    if needed[0]:
        dx = gemm.tensorwise(q.codes, q.scale, transposed(w[0]), w[1], dtype=dy.dtype)
    if needed[1]:
        turned, scale = column
        assert q.turned is not None
        assert turned is not None
        dw = gemm.tensorwise(q.turned, q.scale, turned, scale, dtype=dtype)
    return dx, dw


def tensor_scale(x: Tensor, element: Format, recipe: Recipe, scale: Tensor | None = None) -> Tensor:
    """The scale [1, 1] with which x would be quantized."""
    if scale is not None:
        return scale
    return scale_of(amax_of(x), element, power_of_two=recipe.power_of_two).view(1, 1)
