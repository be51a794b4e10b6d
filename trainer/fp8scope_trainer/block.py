"""The block-scaled FP8 product: 1 x 128 tiles of X and dY in both orientations, 128 x 128 blocks of W.

Kept for backward: the codes of X^T in tiles along the tokens, or on request in 128 x 128 blocks, one byte an
element, and those of W, which are transposed when dgrad needs them.
"""

from typing import Any

import torch
from torch import Tensor

from fp8scope.gemm import WgradSample
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

WEIGHT = "block 128x128"


def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call, offer: Offer | None) -> Tensor:
    """Y [M, N] of x [M, K] and weight [N, K], in the dtype of x."""
    column = _found(call, offer)
    w = quantize_weight(weight, call.recipe)
    y, made, ctx.sample = product(x, weight, call, w, column)
    if offer is not None and column is None and made is not None:
        offer.keep(made.codes, made.scales)
    codes, scales = (None, None) if made is None else made[:2]
    ctx.save_for_backward(codes, scales, w.codes, w.scales)
    return y


def backward(ctx: Any, dy: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """dX [M, K] and dW [N, K], those that are needed."""
    codes, scales, w_codes, w_scales = ctx.saved_tensors
    return gradients(dy, call, (codes, scales), Quantized(w_codes, w_scales, WEIGHT), ctx.sample,
                     needed=ctx.needs_input_grad[:2], dtype=ctx.weight_dtype)


def product(
    x: Tensor, weight: Tensor, call: Call, w: Quantized, column: Quantized | None
) -> tuple[Tensor, Quantized | None, WgradSample | None]:
    """Y, x.t() as wgrad takes it, and what the observer keeps. `column`: the former, if it is there already.

    Without a backward pass or an observer nothing is made of x.t().
    """
    recipe, clean = call.recipe, sanitized(x, call.recipe)
    if call.history is not None:
        call.history.observe(clean)
    sums = call.sums("activation", x, policy=recipe.policy)
    wanted = column is None and (call.differentiable or call.watcher is not None)
    if wanted and recipe.wgrad_activation == "tile":
        row, column = quantize_both(clean, recipe, call.scale, sums=sums)
    else:
        row = quantize_rows(clean, recipe, call.scale, sums=sums)
        column = quantize_for_wgrad(clean, recipe, call.scale) if wanted else column
    sample = None
    if column is not None:
        sample = hand_over_forward(call, x, weight, row.scales, column.scales, w.scales,
                                   summed=sums is not None)
    return gemm.fprop(row, w, dtype=x.dtype), column, sample


def gradients(
    dy: Tensor, call: Call, column: tuple[Tensor | None, Tensor | None], w: Quantized,
    sample: WgradSample | None, *, needed: tuple[bool, bool], dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """dX in the dtype of dy and dW in `dtype`, where `needed`; `column` holds codes and scales of x.t()."""
    recipe, clean = call.recipe, sanitized(dy, call.recipe)
    sums = call.sums("gradient", dy, policy="current")
    row, turned = quantize_both(clean, recipe, sums=sums)
    hand_over_gradient(call, dy, row.scales, turned.scales, sample, summed=sums is not None)
    dx = gemm.dgrad(row, w, dtype=dy.dtype) if needed[0] else None
    if not needed[1]:
        return dx, None
    codes, scales = column
    assert codes is not None
    assert scales is not None
    return dx, gemm.wgrad(turned, Quantized(codes, scales, recipe.wgrad_scaling), dtype=dtype)


def _found(call: Call, offer: Offer | None) -> Quantized | None:
    """x.t() of another layer of the same input."""
    if offer is None or offer.found is None:
        return None
    return Quantized(*offer.found, call.recipe.wgrad_scaling)
