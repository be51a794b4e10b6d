"""The transpose of FP8 codes, made when a GEMM needs it and never stored.

The reference, and where a tensor lives decides: `transpose_kernel` on CUDA, plain torch elsewhere.
"""

import torch
from torch import Tensor


def transposed(codes: Tensor) -> Tensor:
    """codes [R, C] of one byte each -> [C, R], contiguous, of the same dtype."""
    if codes.is_cuda:
        from fp8scope_trainer import transpose_kernel

        if transpose_kernel.fits(codes):
            return transpose_kernel.transposed(codes)
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)
