"""FP8 codes of a matrix under one scale, of the matrix and of its transpose.

The maths. y = x / s, rounded to the nearest code of E4M3 or E5M2 after clamping; d = q s.

    s = scale_of(amax)    current: amax is the largest |x| of the whole tensor
    s = given             delayed: from earlier steps (history.py); larger values saturate
    s = NaN               where any element is NaN or Inf: then d is NaN throughout, whatever the codes are

The last row keeps gradient scalers and NaN checks downstream working. The scale carries the NaN and not the
codes, because a delayed quantizer writes codes before it has seen all of x.

Layout. Codes are row-major; so are those of x.t(), which are the same codes in another order: one scale makes
the transpose exact. A quantizer that has x in registers writes both, at 1 byte an element each.

Bytes an element of x in bf16, both orientations: current scaling reads x twice, 2 + 2 + 1 + 1 = 6, delayed
once, 2 + 1 + 1 = 4. Codes of x alone and a transpose of them later: 7 and 5. A layer keeps 1 byte either way.

Rejected: NaN codes for the elements that are NaN or Inf and a finite scale (the finite neighbours of an Inf
would look healthy); one row of codes a row of x with `scale_of` in float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope.quantize import DTYPES, scale_of
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, E5M2, Format


class TensorCodes(NamedTuple):
    """One matrix under one scale."""

    codes: Tensor
    """[R, C]."""
    turned: Tensor | None
    """[C, R], the codes of x.t(), if they were asked for."""
    scale: Tensor
    """fp32 [1, 1]; NaN where x holds NaN or Inf."""
    amax: Tensor
    """fp32 [1], the largest |x|; NaN where x holds NaN or Inf."""


def quantize_tensor(
    x: Tensor, element: Format, *, scale: Tensor | None = None, power_of_two: bool = False,
    turned: bool = False,
) -> TensorCodes:
    """x [R, C] in E4M3 or E5M2: kernels on CUDA where they fit, plain torch elsewhere.

    scale: the delayed one, fp32 [1, 1]; None takes the current one, rounded up to a power of two if asked.
    turned: also the codes of x.t().
    """
    if element not in (E4M3, E5M2):
        raise Invalid("element", element.name, "must be e4m3 or e5m2")
    if x.is_cuda:
        from fp8scope_trainer import tensor_kernel

        if tensor_kernel.fits(x):
            return tensor_kernel.quantize_tensor(x, element, scale=scale, power_of_two=power_of_two,
                                                 turned=turned)
    return reference(x, element, scale=scale, power_of_two=power_of_two, turned=turned)


def reference(
    x: Tensor, element: Format, *, scale: Tensor | None = None, power_of_two: bool = False,
    turned: bool = False,
) -> TensorCodes:
    """`quantize_tensor` in plain torch, of any shape and floating dtype."""
    amax = amax_of(x)
    used = scale_of(amax, element, power_of_two=power_of_two) if scale is None else scale.float()
    used = torch.where(amax.isnan(), amax, used.view(1))
    y = (x.float() / used).clamp(-element.largest, element.largest)
    codes = y.to(DTYPES[element.name])
    other = codes.view(torch.uint8).t().contiguous().view(codes.dtype) if turned else None
    return TensorCodes(codes, other, used.view(1, 1), amax)


def amax_of(x: Tensor) -> Tensor:
    """The largest |x|, fp32 [1]; NaN where x holds NaN or Inf, 0 where it is empty."""
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    amax = x.abs().amax().float().view(1)
    return torch.where(amax.isfinite(), amax, torch.nan)
