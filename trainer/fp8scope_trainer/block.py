"""The block-scaled FP8 product: 1 x 128 tiles of X and dY in both orientations, 128 x 128 blocks of W.

Kept for backward: the codes of X^T in tiles along the tokens, or on request in 128 x 128 blocks, one byte an
element, and those of W, which are transposed when dgrad needs them.
"""

from typing import Any

from torch import Tensor

from fp8scope.quantize import Quantized
from fp8scope_trainer import gemm
from fp8scope_trainer.call import Call, hand_over_forward, hand_over_gradient
from fp8scope_trainer.recipe import (
    quantize_both,
    quantize_for_wgrad,
    quantize_rows,
    quantize_weight,
    sanitized,
)
from fp8scope_trainer.shared import Offer


def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call, offer: Offer | None) -> Tensor:
    """Y [M, N] of x [M, K] and weight [N, K], in the dtype of x."""
    recipe, clean = call.recipe, sanitized(x, call.recipe)
    if call.history is not None:
        call.history.observe(clean)
    sums = call.sums("activation", x, policy=recipe.policy)
    row, w = quantize_rows(clean, recipe, call.scale, sums=sums), quantize_weight(weight, recipe)
    ctx.sample = None
    if call.differentiable or call.observer is not None:
        column = _columns(clean, call, offer)
        ctx.sample = hand_over_forward(call, x, weight, row.scales, column.scales, w.scales,
                                       summed=sums is not None)
        ctx.save_for_backward(column.codes, column.scales, w.codes, w.scales)
    else:
        ctx.save_for_backward(None, None, w.codes, w.scales)
    return gemm.fprop(row, w, dtype=x.dtype)


def backward(ctx: Any, dy: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """dX [M, K] and dW [N, K], those that are needed."""
    x_codes, x_scales, w_codes, w_scales = ctx.saved_tensors
    recipe, clean = call.recipe, sanitized(dy, call.recipe)
    for_x, for_weight = ctx.needs_input_grad[:2]
    sums = call.sums("gradient", dy, policy="current")
    row, column = quantize_both(clean, recipe, sums=sums)
    hand_over_gradient(call, dy, row.scales, column.scales, ctx.sample, summed=sums is not None)
    dx = dw = None
    if for_x:
        dx = gemm.dgrad(row, Quantized(w_codes, w_scales, "block 128x128"), dtype=dy.dtype)
    if for_weight:
        dw = gemm.wgrad(column, Quantized(x_codes, x_scales, recipe.wgrad_scaling), dtype=ctx.weight_dtype)
    return dx, dw


def _columns(x: Tensor, call: Call, offer: Offer | None) -> Quantized:
    """x.t() as wgrad takes it: the codes that another layer of the same input has saved, or its own."""
    if offer is not None and offer.found is not None:
        return Quantized(*offer.found, call.recipe.wgrad_scaling)
    column = quantize_for_wgrad(x, call.recipe, call.scale)
    if offer is not None:
        offer.keep(column.codes, column.scales)
    return column
