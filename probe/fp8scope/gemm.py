"""What quantized operands do to a product: its relative error on a sample.

    gemm_error            ||dX dW^T - X W^T|| / ||X W^T||    over SAMPLED_ROWS rows of X [M, K], W [N, K]
    wgrad_row_error_max   the same of dY^T X [N, K] for each row n, the worst row, over SAMPLED_COLUMNS
    columns of X

Rows and columns are evenly spaced, the same for the same shape on every rank and in every step. The left
operand is brought near 1 by a power of two (a product of two tensors near 1e-30 is 0 in fp32); TF32, where
the job allows it, adds 1e-3 in quadrature to an error near 4e-2. The error has a floor: two independent
relative errors of E4M3 give sqrt(2) x 0.026.

A row of dW belongs to one output feature. Adam scales each weight by its own gradients, so a row that is
lost stops learning however small it is beside the others: hence the worst row and not the whole. All rows
are looked at, which takes one more read of dY, and of X a thin copy [M, SAMPLED_COLUMNS] that is made in the
forward pass.

NaN codes, or a reference that is not finite, read Inf: the product is lost. A zero product says nothing.
On CUDA `product_kernel` computes both without copies of the operands.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope.backend import quantize, runs_kernels
from fp8scope.quantize import Quantized, dequantize
from fp8scope_protocol.formats import Format

TILE, BLOCK = "tile 1x128", "block 128x128"
SAMPLED_ROWS = 64
SAMPLED_COLUMNS = 64


class WgradSample(NamedTuple):
    """What a forward keeps of x [M, K] for the error of its weight's gradient."""

    columns: Tensor  # [M, SAMPLED_COLUMNS], a copy
    scales: Tensor | None  # their rows of the scales of x.t(), or one for all; None: current ones

    def sample(self) -> "WgradSample":
        """Itself: what is kept of an input may also be where it is found later, see saved_input.py."""
        return self


def gemm_error(
    x: Tensor, weight: Tensor, element: Format, *,
    x_scaling: str = TILE, weight_scaling: str = BLOCK,
    x_scales: Tensor | None = None, weight_scales: Tensor | None = None,
) -> Tensor:
    """float64 []: -inf where there is nothing to compare. x [M, K], weight [N, K], high precision.

    Without scales: current ones. With: what was really used, by `x_scaling` and `weight_scaling`, or one
    scale for all. The sampled rows of x are quantized on their own: a current scale that spans rows is that
    of the sample.
    """
    if x.numel() == 0 or weight.numel() == 0:
        return _nothing(x)
    if x_scaling == TILE and weight_scaling in (TILE, BLOCK) and _has_kernel(element, x, weight):
        from fp8scope.product_kernel import product_error

        return product_error(x, weight, element, rows=min(len(x), SAMPLED_ROWS), worst=False,
                             blocks=weight_scaling == BLOCK, a_scales=x_scales, b_scales=weight_scales)
    rows = evenly(x.shape[0], SAMPLED_ROWS, x.device)
    if x_scales is not None and x_scales.shape[0] == x.shape[0]:
        x_scales = x_scales[rows]
    error, size = _squares(x[rows], weight, _quantize(x[rows], element, x_scaling, x_scales),
                           _quantize(weight, element, weight_scaling, weight_scales))
    return _ratio(error.sum(), size.sum())


def wgrad_row_error_max(
    dy: Tensor, sample: WgradSample, element: Format, *, x_element: Format | None = None,
    dy_scaling: str = TILE, x_scaling: str = TILE, dy_scales: Tensor | None = None,
) -> Tensor:
    """float64 []: the relative error of the worst row of dY^T X; -inf where every row is zero.

    dy [M, N], high precision; scalings are of dy.t() and x.t(), dy_scales too (None: current ones).
    x_element: the format of x, if it is not that of dy.
    """
    if dy.numel() == 0 or sample.columns.numel() == 0 or len(dy) != len(sample.columns):
        return _nothing(dy)
    a, b = dy.t(), sample.columns.t()
    other = x_element or element
    if dy_scaling == x_scaling == TILE and other is element and _has_kernel(element, a, b):
        from fp8scope.product_kernel import product_error

        return product_error(a, b, element, rows=len(a), blocks=False, worst=True, a_scales=dy_scales,
                             b_scales=sample.scales)
    error, size = _squares(a, b, _quantize(a, element, dy_scaling, dy_scales),
                           _quantize(b, other, x_scaling, sample.scales))
    return _ratio(error, size).amax()


def sample_columns(x: Tensor, scales: Tensor | None = None) -> WgradSample:
    """Evenly spaced columns of x [M, K], and their rows of the scales of x.t() [K, ceil(M / 128)]."""
    columns = evenly(x.shape[1], SAMPLED_COLUMNS, x.device)
    if scales is not None and len(scales) > 1:
        scales = scales[columns]
    return WgradSample(x[:, columns], scales)


def evenly(length: int, most: int, device: torch.device) -> Tensor:
    """At most `most` evenly spaced indices below `length`, int64."""
    count = min(length, most)
    return torch.arange(count, device=device) * length // count


def _nothing(x: Tensor) -> Tensor:
    return torch.full((), -math.inf, dtype=torch.float64, device=x.device)


def _squares(a: Tensor, b: Tensor, qa: Quantized, qb: Quantized) -> tuple[Tensor, Tensor]:
    """Of each row of A B^T: the square of its error and its own, float64 [R]."""
    a, b = a.float(), b.float()
    power = _power_of_two(a)
    exact = (a / power) @ b.t()
    error = (dequantize(qa) / power) @ dequantize(qb).t() - exact
    squares = [torch.linalg.vector_norm(one, dim=1, dtype=torch.float64).square() for one in (error, exact)]
    return squares[0], squares[1]


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    ratio = torch.nan_to_num((error / size).sqrt(), nan=math.inf, posinf=math.inf)
    return torch.where(size == 0, -math.inf, ratio)


def _has_kernel(element: Format, *operands: Tensor) -> bool:
    return all(runs_kernels(x, element) for x in operands)


def _quantize(x: Tensor, element: Format, scaling: str, scales: Tensor | None) -> Quantized:
    if scales is not None and scales.numel() == 1:
        return quantize(x, element, "tensorwise", scales=scales)
    return quantize(x, element, scaling, scales=scales)


def _power_of_two(x: Tensor) -> Tensor:
    """A power of two near the largest finite |x|."""
    _, exponent = torch.frexp(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).abs().amax())
    return torch.ldexp(torch.ones((), dtype=torch.float32, device=x.device), exponent.clamp(-125, 127))
