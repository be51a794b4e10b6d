"""Shapes, values and dtypes that FP8 linears are known to get wrong, in the block recipe and on the GPU."""

import math
from typing import Any

import pytest
import torch
from tests.trainer.test_linear import Recorder
from tests.trainer.test_tensorwise import operand, relative
from torch import Tensor

from fp8scope import backend
from fp8scope.quantize import dequantize, quantize_blocks, quantize_tiles
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer import gemm
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="block-scaled GEMMs need compute capability 9.0",
)


def layer_of(**options: Any) -> Fp8Linear:
    torch.manual_seed(0)
    return Fp8Linear(256, 128, bias=False, recipe=Recipe(**options))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_tile_is_nan_and_nothing_else_is(bad: float) -> None:
    """The row of the output whose tile holds it, and the gradients of the weight that its column reaches."""
    layer, x = layer_of(), operand("random", 200, 256, 1)
    x[3, 7] = bad
    y = layer(x)
    y.sum().backward()
    lost = y.detach().isnan()
    assert bool(lost[3].all())
    assert int(lost.sum()) == 128
    assert layer.weight.grad is not None
    columns = layer.weight.grad.isnan().all(dim=0)
    assert columns.nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("scaling", ["block", "tensorwise"])
def test_sanitize_takes_them_as_zero_and_they_are_still_counted(scaling: str) -> None:
    """Opt-in: the output is that of an input with zeros there; the probe sees the NaN in either kind of step.
    """
    x = operand("random", 200, 256, 1)
    zeroed = x.clone()
    x[3, 7], zeroed[3, 7] = math.nan, 0.0
    layer = layer_of(scaling=scaling, sanitize=True)
    assert torch.equal(layer(x), layer(zeroed))
    worker = MemoryWorker()
    with Scope(layer, (), worker=worker, every=1, detail_every=2) as scope:
        for step in range(2):
            layer(x).sum().backward()
            scope.step(step)
    for step in range(2):
        row = next(row for key, row in worker.metrics(step).items() if key[1:] == ("activation", "rowwise"))
        assert row["nan_count"] == 1
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isfinite().all())


def test_minus_zero_keeps_its_sign() -> None:
    """Code 0x80, as the cast of the hardware gives."""
    x = torch.ones(1, 128)
    x[0, 5] = -0.0
    assert quantize_tiles(x, E4M3).codes.view(torch.uint8)[0, 5].item() == 0x80


@pytest.mark.parametrize("scaling", ["block", "tensorwise"])
def test_power_of_two_scales_are(scaling: str) -> None:
    """Of every operand, and at most twice what is needed."""
    layer = layer_of(scaling=scaling, power_of_two=True)
    layer.observer = recorder = Recorder()
    layer(operand("random", 128, 256, 1)).square().sum().backward()
    plain = layer_of(scaling=scaling)
    plain.observer = exact = Recorder()
    plain.load_state_dict(layer.state_dict())
    plain(operand("random", 128, 256, 1)).square().sum().backward()
    assert len(recorder.tensors) == (5 if scaling == "block" else 3)
    for key, (_, scales, *_) in recorder.tensors.items():
        assert torch.equal(scales.log2(), scales.log2().round())
        if key[0] != "gradient":
            ratio = scales / exact.tensors[key][1]
            assert bool(((ratio >= 1) & (ratio < 2)).all())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kind", ["random", "positive", "outliers"])
@pytest.mark.parametrize(("m", "n", "k"), [
    (128, 256, 384), (130, 256, 640), (1, 128, 128), (300, 384, 640), (256, 128, 65_536), (65_536, 128, 256)])
def test_block_products_on_the_gpu(m: int, n: int, k: int, kind: str) -> None:
    """All three within 1e-3 of float64 in fp32 and 4e-3 in BF16: 130 tokens, K/128 no multiple of 4, sums of
    one sign, K of 65,536, and as many tokens."""
    x, w, dy = (operand(kind, *shape).bfloat16().cuda() for shape in ((m, k, 0), (n, k, 1), (m, n, 2)))
    xq, dyq = backend.quantize_tiles(x, E4M3), backend.quantize_tiles(dy, E4M3)
    xt, dyt = backend.quantize_tiles(x.t(), E4M3), backend.quantize_tiles(dy.t(), E4M3)
    wq = backend.quantize_blocks(w, E4M3)
    d = [dequantize(q).double() for q in (xq, wq, dyq, xt, dyt)]
    exact = (d[0] @ d[1].t(), d[2] @ d[1], d[4] @ d[3].t())
    for dtype, most in ((torch.float32, 1e-3), (torch.bfloat16, 4e-3)):
        found = (gemm.fprop(xq, wq, dtype=dtype), gemm.dgrad(dyq, wq, dtype=dtype),
                 gemm.wgrad(dyt, xt, dtype=dtype))
        for name, y, wanted in zip(("fprop", "dgrad", "wgrad"), found, exact, strict=True):
            assert y.dtype == dtype
            assert relative(y, wanted) < most, f"{name} in {dtype}"


@pytest.mark.parametrize("count", [1, 130, 256])
@pytest.mark.parametrize("policy", ["current", "delayed"])
def test_wgrad_takes_the_activation_in_blocks(count: int, policy: str) -> None:
    """Opt-in: dW is the float64 product of tiles of dY^T and blocks of X^T, which the observer is told, in
    FP8 and in shadow; fprop and dgrad are as before."""
    layer, plain = layer_of(wgrad_activation="block", policy=policy), layer_of(policy=policy)
    x, dy = operand("outliers", count, 256, 1), operand("random", count, 128, 2)
    layer.observer = recorder = Recorder()
    y = layer(x)
    y.backward(dy)
    assert torch.equal(y, plain(x))
    scales = torch.ones(1, 1) if policy == "delayed" else None
    blocks = quantize_blocks(x.t(), E4M3, scales=scales)
    exact = dequantize(quantize_tiles(dy.t(), E4M3)).double() @ dequantize(blocks).double().t()
    assert relative(layer.weight.grad, exact) < 1e-5
    for precision in ("fp8", "shadow"):
        layer.set_precision(precision)
        layer(x)
        _, told, scaling, _ = recorder.tensors["activation", "columnwise"]
        assert scaling == "block 128x128"
        assert torch.equal(told.expand_as(blocks.scales), blocks.scales)


def test_a_probe_measures_blocks_of_the_activation() -> None:
    """The columnwise activation is a series of blocks, and the error of wgrad is that of blocks."""
    layer, worker = layer_of(wgrad_activation="block"), MemoryWorker()
    x = operand("outliers", 130, 256, 1)
    with Scope(layer, (), worker=worker, every=1) as scope:
        layer(x).square().sum().backward()
        scope.step(0)
    record = worker.record(0)
    assert record.layout is not None
    assert [e for e in record.events if e.kind == "probe_error"] == []
    assert {s.scaling for s in record.layout.series if (s.role, s.orientation) == ("activation", "columnwise")
            } == {"block 128x128"}
    errors = [row["wgrad_row_error_max"] for key, row in worker.metrics(0).items()
              if key[1:] == ("gradient", "columnwise")]
    assert 0 < errors[0] < 1


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kind", ["random", "positive", "outliers"])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 384), (130, 256, 640), (640, 128, 256),
                                           (65_536, 128, 256)])
def test_wgrad_by_blocks_on_the_gpu(m: int, n: int, k: int, kind: str) -> None:
    """The layout of scales: M/128 no multiple of 4, tokens that are padded, sums over 65,536 of them."""
    x, dy = (operand(kind, *shape).bfloat16().cuda() for shape in ((m, k, 0), (m, n, 2)))
    xt, dyt = backend.quantize_blocks(x.t(), E4M3), backend.quantize_tiles(dy.t(), E4M3)
    exact = dequantize(dyt).double() @ dequantize(xt).double().t()
    assert relative(gemm.wgrad(dyt, xt), exact) < 1e-3
    assert relative(gemm.wgrad(dyt, xt, dtype=torch.bfloat16), exact) < 4e-3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 130, 512])
def test_a_block_layer_on_the_gpu_is_that_of_the_cpu(count: int, dtype: torch.dtype) -> None:
    """Output and gradients agree with the emulated products, in every dtype of parameters."""
    results: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        layer = layer_of().to(device, dtype)
        x = operand("random", count, 256, 1).to(device, dtype).requires_grad_()
        y = layer(x)
        y.backward(operand("random", count, 128, 2).to(device, dtype))
        assert x.grad is not None
        assert layer.weight.grad is not None
        results.append([y.detach().cpu(), x.grad.cpu(), layer.weight.grad.cpu()])
    for ours, theirs in zip(*results, strict=True):
        assert relative(theirs, ours.double()) < 5e-3
