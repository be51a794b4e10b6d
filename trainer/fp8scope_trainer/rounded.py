"""The BF16 product: operands rounded to BF16 from the tensors before quantization, sums in fp32.

In `shadow` the observer still gets the scales that FP8 would use, and histories go on.
"""

from typing import Any

import torch
from torch import Tensor

from fp8scope.gemm import WgradSample
from fp8scope_protocol.formats import E4M3, Format
from fp8scope_trainer import gemm
from fp8scope_trainer.call import Call, hand_over_forward, hand_over_gradient
from fp8scope_trainer.recipe import Recipe, block_scales, tile_scales
from fp8scope_trainer.shared import Offer
from fp8scope_trainer.tensorwise import tensor_scale


def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call, offer: Offer | None) -> Tensor:
    """Y [M, N] of x [M, K] and weight [N, K], in the dtype of x. Autograd shares x by itself."""
    y, ctx.sample = product(x, weight, call)
    ctx.save_for_backward(x.bfloat16(), weight)
    return y


def backward(ctx: Any, dy: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """dX [M, K] and dW [N, K], those that are needed."""
    x, weight = ctx.saved_tensors
    return gradients(dy, call, x, weight, ctx.sample, needed=ctx.needs_input_grad[:2])


def product(x: Tensor, weight: Tensor, call: Call) -> tuple[Tensor, WgradSample | None]:
    """Y, and what the observer keeps."""
    if call.history is not None:
        call.history.observe(x)
    sample = None
    if call.watcher is not None:
        row, column = _scales(x, E4M3, call.recipe, call.scale)
        if call.recipe.wgrad_activation == "block":
            column = block_scales(x.t(), call.recipe, call.scale)
        sample = hand_over_forward(call, x, weight, row, column, _weight_scales(weight, call.recipe))
    return gemm.rounded_matmul(x, weight.t(), dtype=x.dtype), sample


def gradients(
    dy: Tensor, call: Call, x: Tensor, weight: Tensor, sample: WgradSample | None, *,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """dX in the dtype of dy and dW in fp32, where `needed`, of x in BF16."""
    if call.gradient_history is not None:
        call.gradient_history.observe(dy)
    if call.watcher is not None:
        row, column = _scales(dy, call.recipe.gradient_element, call.recipe, call.gradient_scale)
        hand_over_gradient(call, dy, row, column, sample)
    dx = gemm.rounded_matmul(dy, weight, dtype=dy.dtype) if needed[0] else None
    dw = gemm.rounded_matmul(dy.t(), x, dtype=torch.float32) if needed[1] else None
    return dx, dw


def _scales(x: Tensor, element: Format, recipe: Recipe, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """With which x and x.t() would be quantized."""
    if recipe.scaling == "tensorwise":
        one = tensor_scale(x, element, recipe, scale)
        return one, one
    return tile_scales(x, recipe, scale), tile_scales(x.t(), recipe, scale)


def _weight_scales(weight: Tensor, recipe: Recipe) -> Tensor:
    whole = recipe.scaling == "tensorwise"
    return tensor_scale(weight, E4M3, recipe) if whole else block_scales(weight, recipe)
