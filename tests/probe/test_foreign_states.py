"""States of torchao and bitsandbytes: read with their live codes and scales; what is unknown is missing."""

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope.scope import Scope
from fp8scope.stored import MOMENTS
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.recipes import parse_recipe

SHAPE = (32, 512)
OPTIONS: Any = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
UNKNOWN = {"underflow_ratio", "underflow_nonzero_ratio", "distortion", "gain", "sqnr_db", "saturation_ratio",
           "bad_block_ratio", "gemm_error"}
"""What nobody can know of a state whose original is gone."""

Decoded = dict[str, tuple[Tensor, Tensor, Tensor]]
"""Moment -> (values, quotients, scales), all as the library itself decodes them."""


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its steps, which asks for a compiler."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def torchao(name: str) -> Callable[..., torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = getattr(imported("torchao.optim"), name)(parameters, **OPTIONS)
        return found

    return make


def bitsandbytes(parameters: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = imported("bitsandbytes").optim.AdamW8bit(parameters, **OPTIONS)
    return found


def imported(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs
            return importlib.import_module(name)
    except ImportError as error:
        return pytest.skip(f"{name} is not installed: {error}")


def decoded(state: Any) -> Decoded:
    """By each library's own means."""
    found = {}
    for number, key in enumerate(MOMENTS, start=1):
        if "state1" in state:
            functional = importlib.import_module("bitsandbytes.functional")
            codes, scales, table = (state[f"{name}{number}"] for name in ("state", "absmax", "qmap"))
            values = functional.dequantize_blockwise(codes, absmax=scales, code=table, blocksize=256)
            y = table[codes.long()]
        else:
            one = state[key]
            values, scales = one.dequantize(), one.scale
            y = (values.view(-1, one.block_size) / scales.unsqueeze(1)).view(SHAPE)
        found[key] = (values.double(), y, scales.double())
    return found


CASES = {
    "AdamW8bit": (torchao("AdamW8bit"), {"exp_avg": "dynamic8", "exp_avg_sq": "dynamic8"}, 256),
    "AdamW4bit": (torchao("AdamW4bit"), {"exp_avg": "dynamic4", "exp_avg_sq": "linear4"}, 128),
    "AdamWFp8": (torchao("AdamWFp8"), {"exp_avg": "e4m3", "exp_avg_sq": "e4m3"}, 256),
    "bitsandbytes": (bitsandbytes, {"exp_avg": "dynamic8", "exp_avg_sq": "dynamic8"}, 256),
}


class Run:
    """One matrix, gradients over three decades, some columns without any."""

    def __init__(self, make: Any, *, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype)
        self.optimizer = make(self.model.parameters())
        self.worker = MemoryWorker()
        self.scope = Scope(self.model, (self.optimizer,), worker=self.worker, every=1,
                           twin_elements=self.model.weight.numel())
        self.size = 10 ** (-3 * torch.rand(SHAPE))
        self.size[:, :256] *= (torch.arange(256) % 16 != 0)
        self.size[0] = 0.0  # blocks of zeros

    def step(self) -> None:
        self.model.weight.grad = (torch.randn(SHAPE) * self.size).to(self.model.weight.dtype)
        self.optimizer.step()
        self.scope.step()

    def state(self) -> Any:
        return self.optimizer.state[self.model.weight]

    def errors(self) -> list[str]:
        return [e.text for record in self.worker.records for e in record.events if e.kind == "probe_error"]


@pytest.mark.parametrize("name", CASES)
def test_stored_codes_and_scales_are_read(name: str) -> None:
    """Every metric that can be known equals that of the library's own decoding; no other one is there."""
    make, formats, block = CASES[name]
    run = Run(make)
    for _ in range(3):
        run.step()
    assert run.errors() == []
    found, layout = run.worker.metrics(2), run.worker.record(2).layout
    assert layout is not None
    for key, (values, y, scales) in decoded(run.state()).items():
        (series,) = (one for one in layout.series if one.role == key)
        assert (series.format, series.scaling, series.live) == (formats[key], f"flat {block}", True)
        metrics = found["weight", key, "rowwise"]
        assert UNKNOWN & metrics.keys() == set()
        nonzero, x = values[values != 0].abs(), values.flatten()
        live = scales[scales > 1.1e-12]
        wanted = {
            "elements": x.numel(), "calls": 1, "nan_count": 0, "inf_count": 0,
            "zero_block_count": len(scales) - len(live), "zero_ratio": (y == 0).double().mean().item(),
            "amax": nonzero.max().item(), "amin_nonzero": nonzero.min().item(),
            "rms": x.square().mean().sqrt().item(), "mean_abs": x.abs().mean().item(),
            "kurtosis": (x.numel() * x.pow(4).sum() / x.square().sum() ** 2).item(),
            "scale_min": live.min().item(), "scale_max": live.max().item(),
            "scale_log2_mean": live.log2().mean().item(),
            "scale_log2_std": live.log2().std(correction=0).item(),
        }
        assert {k: metrics[k] for k in wanted} == pytest.approx(wanted, rel=1e-5), key
        assert set(metrics) <= set(wanted) | {"update_error", "update_norm_ratio"}
        record = run.worker.record(2)
        assert record.tables is not None
        histogram = record.tables.histogram[layout.series.index(series)]
        exponents = torch.frexp(y[y != 0])[1] - 1
        counted = torch.bincount(exponents.clamp(-24, 15) + 24, minlength=40)
        assert torch.equal(histogram, counted)


@pytest.mark.parametrize("name", CASES)
def test_twins_of_foreign_states(name: str) -> None:
    """update_error and update_norm_ratio against a float64 run beside the library's own codes."""
    run, betas = Run(CASES[name][0]), (0.9, 0.95)
    m = v = torch.zeros(SHAPE, dtype=torch.float64)
    for t in range(1, 9):
        old = decoded(run.state()) if run.state() else None
        run.step()
        assert run.model.weight.grad is not None
        g = run.model.weight.grad.double()
        directions = []
        for m0, v0 in ((m, v), (old["exp_avg"][0], old["exp_avg_sq"][0]) if old else (m, v)):
            m1, v1 = betas[0] * m0 + 0.1 * g, betas[1] * v0 + 0.05 * g * g
            directions.append((m1 / (1 - betas[0]**t)) / ((v1 / (1 - betas[1]**t)).sqrt() + 1e-8))
            if m0 is m:
                kept = m1, v1
        m, v = kept
        exact, got = directions
        metrics = run.worker.metrics(t - 1)["weight", "exp_avg_sq", "rowwise"]
        ratio, error = (x.norm().item() / exact.norm().item() for x in (got, got - exact))
        assert metrics["update_norm_ratio"] == pytest.approx(ratio, rel=1e-3)
        assert metrics["update_error"] == pytest.approx(error, rel=1e-2, abs=1e-5)
    assert run.errors() == []


def test_linear_codes_of_v_are_what_update_norm_ratio_warns_of() -> None:
    """torchao's 4-bit v cannot be zero: small gradients beside large ones stand nearly still."""
    run = Run(CASES["AdamW4bit"][0])
    for _ in range(20):
        run.step()
    assert run.worker.metrics(19)["weight", "exp_avg_sq", "rowwise"]["update_norm_ratio"] < 0.7


def test_a_code_of_zero_in_v_is_seen() -> None:
    """`v_zero_share` and `update_max` of the 8-bit dynamic map, which has a zero, over many decades."""
    run = Run(CASES["AdamW8bit"][0])
    run.size = 10 ** (-6 * torch.rand(SHAPE))
    for _ in range(5):
        run.step()
    states = decoded(run.state())
    m, v = (states[key][0] for key in MOMENTS)
    found = run.worker.sentinels(4)
    assert found["v_zero_share"] == pytest.approx(((v == 0) & (m != 0)).double().mean().item(), rel=1e-6)
    assert found["v_zero_share"] > 0.001
    assert found["update_max"] > 10


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_gain_of_bf16_weights_under_torchao(stochastic: bool) -> None:
    """torchao's own stochastic rounding keeps the updates that rounding to nearest drops."""
    def make(parameters: Any) -> Any:
        optim = imported("torchao.optim")
        return optim.AdamW8bit(parameters, lr=1e-4, bf16_stochastic_round=stochastic)

    run = Run(make, dtype=torch.bfloat16)
    run.model.weight.data.normal_(0, 0.02)
    run.size = torch.ones(SHAPE)
    for _ in range(4):
        run.step()
    gain = run.worker.metrics(3)["weight", "weight", "rowwise"]["update_gain"]
    assert gain == pytest.approx(1.0, abs=0.1) if stochastic else gain < 0.9
    assert run.errors() == []


def test_small_parameters_have_ordinary_states() -> None:
    """Both libraries keep fewer than 4,096 elements in fp32: what-ifs as of any optimizer, no twins."""
    for name in ("AdamW8bit", "bitsandbytes"):
        model, worker = nn.Linear(32, 32, bias=False), MemoryWorker()
        with Scope(model, (CASES[name][0](model.parameters()),), worker=worker, every=1) as scope:
            model.weight.grad = torch.randn(32, 32)
            scope._optimizers[0].step()
        assert [e.text for record in worker.records for e in record.events if e.kind == "probe_error"] == []
        assert not any("update_error" in one for one in worker.metrics(0).values())
        assert math.isfinite(worker.sentinels(0)["update_max"])


def test_formats_of_stored_codes_are_no_what_ifs() -> None:
    """They are read, and asking for them is refused by name."""
    with pytest.raises(Invalid, match="dynamic8"):
        parse_recipe("dynamic8")
