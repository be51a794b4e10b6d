"""fprop, dgrad and wgrad against the float64 product of the dequantized operands."""

import pytest
import torch
from torch import Tensor

from fp8scope.quantize import Quantized, dequantize, quantize_blocks, quantize_tiles
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer import gemm
from fp8scope_trainer.transpose import transposed

SHAPES = [(128, 256, 384), (132, 640, 512), (7, 128, 128), (300, 384, 640)]
"""(tokens, out features, in features); 384 and 640 have K/128 = 3 and 5, no multiples of 4."""


def operand(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if kind == "positive":
        return x.abs()
    if kind == "outliers":
        x[::5, ::7] *= 1e4
    return x


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", ["random", "positive", "outliers"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products_are_those_of_the_dequantized_operands(m: int, n: int, k: int, kind: str) -> None:
    """All three GEMMs are within 1e-3 of float64 in fp32, also where K/128 is no multiple of 4."""
    x, w, dy = operand(kind, m, k, 0), operand(kind, n, k, 1), operand(kind, m, n, 2)
    xq, wq, dyq = quantize_tiles(x, E4M3), quantize_blocks(w, E4M3), quantize_tiles(dy, E4M3)
    xt, dyt = quantize_tiles(x.t(), E4M3), quantize_tiles(dy.t(), E4M3)
    d = {name: dequantize(q).double() for name, q in
         {"x": xq, "w": wq, "dy": dyq, "xt": xt, "dyt": dyt}.items()}
    assert relative(gemm.fprop(xq, wq, dtype=torch.float32), d["x"] @ d["w"].t()) < 1e-3
    assert relative(gemm.dgrad(dyq, wq, dtype=torch.float32), d["dy"] @ d["w"]) < 1e-3
    assert relative(gemm.wgrad(dyt, xt), d["dyt"] @ d["xt"].t()) < 1e-3
    assert relative(gemm.fprop(xq, wq, dtype=torch.bfloat16), d["x"] @ d["w"].t()) < 4e-3


def test_error_against_full_precision_is_that_of_e4m3() -> None:
    """Quantizing both operands costs 3.75 % of a Gaussian product, no more and no less."""
    x, w = operand("random", 256, 512, 0), operand("random", 384, 512, 1)
    y = gemm.fprop(quantize_tiles(x, E4M3), quantize_blocks(w, E4M3), dtype=torch.float32)
    assert 0.035 < relative(y, x.double() @ w.double().t()) < 0.040


@pytest.mark.parametrize(("m", "n", "k"), [(132, 256, 384), (256, 512, 640), (130, 128, 128)])
def test_scale_layouts_are_accepted_by_torch(m: int, n: int, k: int) -> None:
    """What is handed to `scaled_mm` passes torch's own checks of shapes and strides, and pads odd rows."""
    x = Quantized(codes(m, k), torch.empty(m, k // 128, device="meta"), "tile 1x128")
    w = Quantized(codes(n, k), torch.empty(n // 128, k // 128, device="meta"), "block 128x128")
    dy = Quantized(codes(m, n), torch.empty(m, n // 128, device="meta"), "tile 1x128")
    y = gemm._by_block(x, w.codes.t(), w.scales, torch.bfloat16)
    dx = gemm._by_block(dy, transposed(w.codes).t(), w.scales.t(), torch.bfloat16)
    assert (y.shape, dx.shape) == ((m, n), (m, k))


def test_block_scales_are_padded_to_four() -> None:
    """b's scales are (L4, C/128) with stride (1, L4); the rows beyond S/128 are not read from elsewhere."""
    scales = torch.arange(1.0, 11.0).view(2, 5)  # C/128 = 2, S/128 = 5
    laid = gemm._padded_to_four(scales)
    assert (laid.shape, laid.stride()) == ((8, 2), (1, 8))
    assert torch.equal(laid[:5], scales.t())
    assert torch.equal(laid[5:], torch.ones(3, 2))


def test_tile_scales_have_their_rows_adjacent() -> None:
    """a's scales are (R, T) with stride (1, R), whatever they came in as."""
    expanded = torch.tensor([[2.0]]).expand(6, 3)
    for scales in (torch.rand(6, 3), expanded):
        laid = gemm._outer_major(scales)
        assert laid.stride() == (1, 6)
        assert torch.equal(laid, scales)


def test_bf16_products_round_their_operands() -> None:
    """The BF16 mode multiplies rounded operands; it neither skips the rounding nor loses the sum."""
    a, b = operand("random", 64, 256, 0), operand("random", 256, 32, 1)
    exact = a.bfloat16().double() @ b.bfloat16().double()
    found = gemm.rounded_matmul(a, b, dtype=torch.float32)
    assert relative(found, exact) < 1e-6
    assert relative(found, a.double() @ b.double()) > 1e-4


def codes(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")
