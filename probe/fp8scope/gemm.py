"""What quantized operands do to a product: the relative error of Y = X W^T on a sample of rows.

    gemm_error = ||dX dW^T - X W^T|| / ||X W^T||      over SAMPLED_ROWS rows of X [M, K], W [N, K]

The rows are evenly spaced, the same for the same M on every rank and in every step. X is brought near 1 by
a power of two (a product of two tensors near 1e-30 is 0 in fp32); TF32, where the job allows it, adds 1e-3 in
quadrature to an error near 4e-2. The error has a floor: two independent relative
errors of E4M3 give sqrt(2) x 0.026.

NaN codes, or a reference that is not finite, read Inf: the product is lost. A zero product says nothing.
"""

import math

import torch
from torch import Tensor

from fp8scope.backend import quantize
from fp8scope.quantize import Quantized, dequantize
from fp8scope_protocol.formats import Format

SAMPLED_ROWS = 64


def gemm_error(
    x: Tensor, weight: Tensor, element: Format, *,
    x_scaling: str = "tile 1x128", weight_scaling: str = "block 128x128",
    x_scales: Tensor | None = None, weight_scales: Tensor | None = None,
) -> Tensor:
    """float64 []: -inf where there is nothing to compare. x [M, K], weight [N, K], high precision.

    Without scales: current ones. With: what was really used, by `x_scaling` and `weight_scaling`, or one
    scale for all. The sampled rows of x are quantized on their own: a current scale that spans rows is that
    of the sample.
    """
    if x.numel() == 0 or weight.numel() == 0:
        return torch.full((), -math.inf, dtype=torch.float64, device=x.device)
    rows = sampled_rows(x.shape[0], x.device)
    if x_scales is not None and x_scales.shape[0] == x.shape[0]:
        x_scales = x_scales[rows]
    x = x[rows].float()
    dx = dequantize(_quantize(x, element, x_scaling, x_scales))
    dw = dequantize(_quantize(weight, element, weight_scaling, weight_scales))
    power = _power_of_two(x)
    exact = (x / power) @ weight.float().t()
    error = (dx / power) @ dw.t() - exact
    size = torch.linalg.vector_norm(exact, dtype=torch.float64)
    ratio = torch.linalg.vector_norm(error, dtype=torch.float64) / size
    ratio = torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf)
    return torch.where(size == 0, -math.inf, ratio)


def sampled_rows(rows: int, device: torch.device) -> Tensor:
    """Indices of at most SAMPLED_ROWS evenly spaced rows, int64."""
    count = min(rows, SAMPLED_ROWS)
    return torch.arange(count, device=device) * rows // count


def _quantize(x: Tensor, element: Format, scaling: str, scales: Tensor | None) -> Quantized:
    if scales is not None and scales.numel() == 1:
        return quantize(x, element, "tensorwise", scales=scales)
    return quantize(x, element, scaling, scales=scales)


def _power_of_two(x: Tensor) -> Tensor:
    """A power of two near the largest finite |x|."""
    _, exponent = torch.frexp(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).abs().amax())
    return torch.ldexp(torch.ones((), dtype=torch.float32, device=x.device), exponent.clamp(-125, 127))
