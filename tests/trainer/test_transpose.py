"""Bytes transposed by the kernel: in Triton's interpreter, and on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from fp8scope.quantize import quantize_blocks
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer.transpose import transposed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = [(128, 128), (256, 384), (8192, 128), (130, 64), (1, 5), (0, 128)]

CHILD = """
import torch
from fp8scope_trainer import transpose_kernel
x = torch.randint(0, 256, (256, 384), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
assert transpose_kernel.fits(x)
assert torch.equal(transpose_kernel.transposed(x), x.t())
for odd in (x[:, :130], x[:130], x.float()):
    assert not transpose_kernel.fits(odd)
"""


def test_the_kernel_transposes_in_the_interpreter() -> None:
    """Every byte is where it belongs, and what the kernel cannot take is refused."""
    pytest.importorskip("triton", reason="triton is not installed")
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], check=True,
                   env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=120)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_codes_keep_their_bytes_and_dtype(size: tuple[int, int], device: str) -> None:
    """Odd sizes too, which take the path of torch; NaN codes are moved as they are."""
    x = torch.randint(0, 256, size, dtype=torch.uint8).to(device).view(torch.float8_e4m3fn)
    y = transposed(x)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8).t())


def test_blocks_keep_their_scales_when_transposed() -> None:
    """Transposed codes and scales are those of the transposed weight: what dgrad relies on."""
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    q, turned = quantize_blocks(w, E4M3), quantize_blocks(w.t().contiguous(), E4M3)
    assert torch.equal(transposed(q.codes).view(torch.uint8), turned.codes.view(torch.uint8))
    assert torch.equal(q.scales.t(), turned.scales)
