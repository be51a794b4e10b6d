"""SwiGLU's kernel against plain torch: in Triton's interpreter, and as compiled code on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8scope_trainer.swiglu import plain, swiglu

CHILD = "from tests.trainer.test_swiglu import compare; compare('cpu')"
SHAPES = [((3, 5, 256), 64), ((7, 24), 4), ((1, 4096), 2048), ((0, 128), 64)]


def compare(device: str) -> None:
    """Forward and gradient within the rounding of the type; infinities and NaN where plain torch has them."""
    from fp8scope_trainer import swiglu_kernel

    torch.manual_seed(0)
    for shape, run in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x = (8 * torch.randn(shape, device=device)).to(dtype)
            if x.numel():
                x.view(-1)[:3] = torch.tensor([90.0, -90.0, float("nan")], device=device)
            exact = x.double().requires_grad_()
            y = plain(exact, run)
            dy = torch.randn(y.shape, device=device).to(dtype)
            (dx,) = torch.autograd.grad(y, exact, dy.double())
            unit = 4e-3 if device == "cuda" else 8e-3  # the interpreter cuts off what it should round
            for found, wanted in ((swiglu_kernel.forward(x, run), y),
                                  (swiglu_kernel.gradient(dy, x, run), dx)):
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), wanted, equal_nan=True, atol=1e-6,
                                           rtol=unit if dtype == torch.bfloat16 else 2e-6)


def test_the_kernel_is_plain_torch() -> None:
    """In the interpreter, in runs of any power of two and with nothing at all."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], check=True, timeout=200,
                   env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_is_plain_torch_on_a_gpu() -> None:
    """As compiled code, and through autograd as one operation."""
    compare("cuda")
    x = torch.randn(4, 512, device="cuda", requires_grad=True)
    (dx,) = torch.autograd.grad(swiglu(x, 64).square().sum(), x)
    (wanted,) = torch.autograd.grad(plain(x, 64).square().sum(), x)
    torch.testing.assert_close(dx, wanted, rtol=1e-5, atol=1e-6)
    whole = torch.compile(lambda x: swiglu(x + 1, 64), fullgraph=True)
    torch.testing.assert_close(whole(x), plain(x + 1, 64), rtol=1e-5, atol=1e-6)
