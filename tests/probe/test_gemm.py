"""Errors of products against float64 loops; their kernel in Triton's interpreter, and on a GPU."""

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope.gemm import SAMPLED_COLUMNS, gemm_error, sample_columns, wgrad_row_error_max
from fp8scope.quantize import dequantize, quantize_blocks, quantize_tiles
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope.watch import TURNS
from fp8scope_protocol.formats import E4M3

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="the casts need a CUDA device of compute capability 8.9",
)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def worst_row(dy: Tensor, x: Tensor) -> float:
    """Row by row, in float64."""
    columns = x[:, [i * x.shape[1] // SAMPLED_COLUMNS for i in range(SAMPLED_COLUMNS)]]
    da = dequantize(quantize_tiles(dy.t(), E4M3)).double()
    db = dequantize(quantize_tiles(columns.t(), E4M3)).double()
    worst = 0.0
    for row, coded in zip(dy.t().double(), da, strict=True):
        exact = row @ columns.double()
        if exact.norm() > 0:
            worst = max(worst, ((coded @ db.t() - exact).norm() / exact.norm()).item())
    return worst


@pytest.mark.parametrize("tokens", [2, 130, 512])
@pytest.mark.parametrize("factor", [1.0, 1e-30])
def test_worst_row_equals_a_loop(tokens: int, factor: float) -> None:
    """One output feature has gradients of which most underflow: its row is the worst, at any magnitude."""
    dy, x = gaussian(tokens, 96) * factor, gaussian(tokens, 200, seed=1)
    dy[:, 5] *= torch.logspace(-7, 0, tokens)
    dy[:, 7] = 0.0
    found = wgrad_row_error_max(dy, sample_columns(x), E4M3).item()
    assert found == pytest.approx(worst_row(dy, x), rel=1e-4)


def test_a_lost_row_reads_one_and_nothing_reads_minus_infinity() -> None:
    """A row that its scales round to zero is lost whole (Adam no longer trains it); zeros say nothing."""
    dy, x = gaussian(128, 64), gaussian(128, 200, seed=1)
    dy[:, 3] *= 1e-9
    scales = quantize_tiles(gaussian(64, 128), E4M3).scales  # one for each row of dy.t(), as if delayed
    assert wgrad_row_error_max(dy, sample_columns(x), E4M3, dy_scales=scales).item() == pytest.approx(1.0)
    assert wgrad_row_error_max(dy * 0, sample_columns(x), E4M3).item() == -math.inf
    assert wgrad_row_error_max(dy[:0], sample_columns(x[:0]), E4M3).item() == -math.inf
    dy[0, 0] = math.nan
    assert wgrad_row_error_max(dy, sample_columns(x), E4M3).item() == math.inf


def test_layers_take_turns_and_the_call_is_paired_with_its_own_gradient() -> None:
    """Of TURNS + 2 layers each is measured once in TURNS detailed steps, with the x and dY of one call."""
    layers = [nn.Linear(128, 128, bias=False) for _ in range(TURNS + 2)]
    model, worker = nn.Sequential(*layers), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, kept = gaussian(130, 128), list[Tensor]()
    layers[0].register_forward_hook(lambda module, args, y: y.register_hook(kept.append) and None)
    with Scope(model, (optimizer,), worker=worker, every=1):
        for _ in range(TURNS):
            model(x).square().mean().backward()
            optimizer.step()
    measured = [[name for (name, role, way), row in worker.metrics(step).items()
                 if "wgrad_row_error_max" in row] for step in range(TURNS)]
    assert [len(names) for names in measured] == [2, 2, 1, 1, 1, 1, 1, 1]
    assert {name for names in measured for name in names} == {str(i) for i in range(TURNS + 2)}
    row = worker.metrics(0)["0", "gradient", "columnwise"]
    assert row["wgrad_row_error_max"] == pytest.approx(worst_row(kept[0], x), rel=1e-4)


def test_light_steps_leave_out_what_is_dear() -> None:
    """Of four measured steps the first and third are detailed; the others hold rowwise tiles and weights, the
    same numbers, and say nothing (not zero) about the rest."""
    model, worker = nn.Sequential(nn.Linear(128, 128)), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = gaussian(130, 128)
    with Scope(model, (optimizer,), worker=worker, every=1, detail_every=2):
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
    first, light, again = (worker.metrics(step) for step in (0, 1, 2))
    assert first.keys() == again.keys() == light.keys()
    dear = {"channel_outlier_ratio", "gemm_error", "wgrad_row_error_max"}
    for (name, role, way), row in first.items():
        assert again[name, role, way].keys() | dear >= row.keys()
        if way == "columnwise":
            assert light[name, role, way]["elements"] == 0
            assert "underflow_ratio" not in light[name, role, way]
        else:
            assert light[name, role, way] == {key: row[key] for key in row.keys() - dear}
    tables = [worker.record(step).tables for step in range(4)]
    assert [bool(one.histogram.any()) for one in tables if one is not None] == [True, False, True, False]


CHILD = """
import sys, torch
from fp8scope.product_kernel import product_error
from fp8scope_protocol.formats import E4M3
answers = {}
for key, (a, b, options) in torch.load(sys.argv[1]).items():
    answers[key] = product_error(a, b, E4M3, **options)
torch.save(answers, sys.argv[2])
"""


def rounded_down(*shape: int, seed: int) -> Tensor:
    """Codes of E4M3 a little enlarged, so that all round down, as the interpreter's cast can; each tile's
    largest is 448, so that its scale is 1."""
    x = quantize_tiles(gaussian(*shape, seed=seed) * 20, E4M3).codes.float() * 1.02
    x[:, ::128] = 448.0
    return x.clamp(-448.0, 448.0)


def product_cases() -> dict[str, tuple[Tensor, Tensor, dict[str, Any]]]:
    a, b = rounded_down(70, 256, seed=0), rounded_down(130, 256, seed=1)
    whole: dict[str, Any] = {"rows": 64, "blocks": True, "worst": False}
    rows = {"rows": 70, "blocks": False, "worst": True}
    return {
        "sampled rows": (a, b, whole),
        "strided": (a.t().contiguous().t(), b.repeat(1, 2)[:, :256], whole),
        "few rows": (a[:5], b, whole | {"rows": 5}),
        "tiny": (a * 1e-30, b, whole | {"a_scales": torch.full((1, 1), 1e-30)}),
        "worst row": (a * 2.0 ** -torch.arange(70.0).unsqueeze(1), b[:64], rows),
        "zero": (a * 0, b, whole),
        "not finite": (a.where(a > -440.0, math.nan), b, whole),
    }


def reference(a: Tensor, b: Tensor, options: dict[str, Any]) -> float:
    """In float64, from the quantizers' own codes."""
    rows = options["rows"]
    a = a[torch.arange(rows) * len(a) // rows].float()
    scales = options.get("a_scales")
    da = dequantize(quantize_tiles(a, E4M3, scales=scales)).double()
    db = dequantize((quantize_blocks if options["blocks"] else quantize_tiles)(b.float(), E4M3)).double()
    exact = a.double() @ b.double().t()
    error = da @ db.t() - exact
    ratio = (error.norm(dim=1) / exact.norm(dim=1)).max() if options["worst"] else error.norm() / exact.norm()
    return float(ratio)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernel_agrees_with_float64_in_the_interpreter(tmp_path: Path) -> None:
    """Masks, strides, sampled rows, blocks and tiles, given scales, 1e-30, zeros and NaN."""
    torch.save(product_cases(), tmp_path / "cases.pt")
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path / "cases.pt"),
                    str(tmp_path / "answers.pt")], check=True,
                   env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=240)
    answers = torch.load(tmp_path / "answers.pt")
    assert answers.pop("zero").item() == -math.inf
    assert answers.pop("not finite").item() == math.inf
    for key, found in answers.items():
        assert found.item() == pytest.approx(reference(*product_cases()[key]), rel=2e-3), key


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(300, 384, 200), (64, 1000, 128), (5, 129, 130)])
def test_kernel_agrees_with_the_reference_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Both errors, of Gaussian operands with outlying columns, equal those of the plain-torch twin."""
    m, k, n = shape
    x, w, dy = gaussian(m, k).to(dtype), gaussian(n, k, seed=1).to(dtype), gaussian(m, n, seed=2).to(dtype)
    x[:, ::50] *= 100
    dy *= torch.logspace(-12, 0, m).to(dtype).unsqueeze(1)
    pairs = [
        (gemm_error(x, w, E4M3), gemm_error(x.cuda(), w.cuda(), E4M3)),
        (wgrad_row_error_max(dy, sample_columns(x), E4M3),
         wgrad_row_error_max(dy.cuda(), sample_columns(x.cuda()), E4M3)),
    ]
    for here, there in pairs:
        assert there.item() == pytest.approx(here.item(), rel=1e-3)
