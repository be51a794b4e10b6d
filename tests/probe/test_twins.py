"""Exact twins of stored moments: what rounding did to the update over a run, and when nothing can be said."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope.sample import MOST_KEPT
from fp8scope.scope import Scope
from fp8scope.settings import ProbeSettings
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.adamw import AdamW

SHAPE = (64, 256)
BETAS = (0.9, 0.95)


def gradients(steps: int, *, decades: float = 0.0, seed: int = 0) -> list[Tensor]:
    """Noise whose size is log-uniform over `decades` within every row."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (-decades * torch.rand(SHAPE, generator=generator))
    return [torch.randn(SHAPE, generator=generator) * size for _ in range(steps)]


class Run:
    """One matrix under some optimizer, with given gradients."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], *, every: int = 1,
                 dtype: torch.dtype = torch.float32, elements: int = 64 * 256) -> None:
        self.model = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype)
        nn.init.zeros_(self.model.weight)
        self.optimizer = make(self.model.parameters())
        self.worker = MemoryWorker()
        self.scope = Scope(self.model, (self.optimizer,), worker=self.worker, every=every,
                           twin_elements=elements)

    def train(self, grads: list[Tensor], closure: bool = False) -> "Run":
        for gradient in grads:
            def compute(gradient: Tensor = gradient) -> float:
                self.model.weight.grad = gradient.to(self.model.weight.dtype)
                return 0.0

            if not closure:
                compute()
            self.optimizer.step(compute if closure else None)
            self.scope.step()
        return self

    def found(self, step: int, key: str) -> Any:
        values = [one[key] for one in self.worker.metrics(step).values() if key in one]
        return values[0] if values else None

    def errors(self) -> list[str]:
        return [event.text for record in self.worker.records for event in record.events
                if event.kind == "probe_error"]

    def notes(self) -> list[str]:
        return [event.text for record in self.worker.records for event in record.events
                if "twins begin" in event.text]


def ours(parameters: Any, states: str = "fp8") -> AdamW:
    return AdamW(parameters, lr=1e-3, betas=BETAS, states=states)


def test_one_loop_in_float64_gives_the_same() -> None:
    """The twins are textbook moments over all gradients; the stored step is from the codes before it."""
    run, grads = Run(ours), gradients(12, decades=2)
    m, v = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    for t, gradient in enumerate(grads, start=1):
        state = run.optimizer.state[run.model.weight]
        stored_m, root = (torch.zeros(SHAPE) for _ in range(2))
        if state:
            stored_m, root = (state[key].float() * state[f"{key}_scale"].repeat_interleave(128, dim=1)
                              for key in ("exp_avg", "exp_avg_sq"))
        g = gradient.double()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        exact = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        m8, v8 = 0.9 * stored_m.double() + 0.1 * g, 0.95 * root.double().square() + 0.05 * g * g
        got = (m8 / (1 - 0.9**t)) / ((v8 / (1 - 0.95**t)).sqrt() + 1e-8)
        run.train([gradient])
        ratio, error = (x.norm().item() / exact.norm().item() for x in (got, got - exact))
        assert run.found(t - 1, "update_norm_ratio") == pytest.approx(ratio, rel=1e-4)
        assert run.found(t - 1, "update_error") == pytest.approx(error, rel=1e-3, abs=1e-6)
    assert run.found(0, "update_error") == 0.0
    assert run.errors() == []


def test_twins_see_every_gradient_not_only_sampled_ones() -> None:
    """The same numbers at any cadence, through a closure or not (which stores one step later)."""
    grads = gradients(21, decades=1)
    runs = [Run(ours, every=every).train(grads) for every in (1, 10)]
    assert runs[0].found(20, "update_error") == runs[1].found(20, "update_error") > 0
    late = Run(ours, every=10).train(grads, closure=True)
    assert late.found(20, "update_error") == runs[0].found(20, "update_error")
    assert late.found(20, "update_norm_ratio") == pytest.approx(1.0, abs=0.05)
    assert late.notes() == late.errors() == []


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: ours(p, states="fp32")])
def test_moments_in_fp32_need_no_twin(make: Any) -> None:
    """Nothing is measured, and no memory is held."""
    run = Run(make).train(gradients(3))
    assert run.found(2, "update_error") is None
    assert run.scope._twins.bytes == 0


@pytest.mark.parametrize("rows", [64, 2048, 8192])
def test_memory_is_eight_bytes_an_element_of_the_sample(rows: int) -> None:
    """6 KiB for a parameter, however large it is."""
    model = nn.Linear(4096, rows, bias=False)
    optimizer = ours(model.parameters())
    scope = Scope(model, (optimizer,), worker=MemoryWorker(), every=1)
    model.weight.grad = torch.randn(rows, 4096)
    optimizer.step()
    assert 0.9 * 6 * 1024 <= scope._twins.bytes <= 6 * 1024
    scope.close()


class LinearInt8AdamW(torch.optim.Optimizer):
    """AdamW whose second moment is stored as BF16 values that a linear INT8 code in blocks of 128 left over:
    what `trainer.md` warns of. Exact first moment; no floor on v."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p),
                                 exp_avg_sq=torch.zeros_like(p, dtype=torch.bfloat16))
                state["step"] += 1
                t = state["step"].item()
                m = state["exp_avg"].lerp_(p.grad, 0.1)
                v = state["exp_avg_sq"].float().lerp(p.grad.square(), 0.05)
                p.sub_(1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))
                blocks = v.view(-1, 128)
                scale = blocks.amax(dim=1, keepdim=True) / 127
                state["exp_avg_sq"].copy_(((blocks / scale).round() * scale).view_as(v))


AdamWInt8 = type("AdamW", (LinearInt8AdamW,), {})


def test_a_linear_second_moment_over_decades_is_far_from_one() -> None:
    """Over three decades in a block v is lost to zero codes, updates explode. Over none all is well."""
    spread, flat = (Run(AdamWInt8).train(gradients(40, decades=decades)) for decades in (3.0, 0.0))
    assert spread.found(39, "update_norm_ratio") > 1.5
    assert spread.found(39, "update_error") > 1.0
    assert flat.found(39, "update_norm_ratio") == pytest.approx(1.0, abs=0.05)
    ratio = Run(ours).train(gradients(40, decades=3.0)).found(39, "update_norm_ratio")
    assert ratio == pytest.approx(1.0, abs=0.05)  # what our own optimizer stores


def test_a_late_attach_and_a_loaded_state_begin_with_what_is_stored() -> None:
    """The first step after it reads no error, and an event says so, once."""
    run, grads = Run(ours), gradients(6)
    run.train(grads[:3])
    assert run.found(2, "update_error") > 0
    assert run.notes() == []
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.train(grads[3:5])
    run.optimizer.load_state_dict(saved)
    run.train(grads[3:4])
    assert run.found(5, "update_error") == pytest.approx(0.0, abs=1e-6)
    assert len(run.notes()) == 1
    assert run.errors() == []


def test_a_parameter_without_a_gradient_waits() -> None:
    """An expert that no token reached: its twin does not decay, as its state does not."""
    model = nn.ModuleList(nn.Linear(128, 64, bias=False) for _ in range(2))
    optimizer, worker = ours(model.parameters()), MemoryWorker()
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for step in range(6):
            for i, linear in enumerate(model):
                missing = i == 1 and step in (2, 3)
                linear.weight.grad = None if missing else torch.randn(64, 128)
            optimizer.step()
            scope.step(step)
    for step in range(6):
        found = worker.metrics(step)
        assert "update_error" in found["0.weight", "exp_avg_sq", "rowwise"]
        assert ("update_error" in found["1.weight", "exp_avg_sq", "rowwise"]) == (step not in (2, 3))
        for values in found.values():
            assert values.get("update_error", 0.0) < 0.1


def test_bf16_states_have_a_twin() -> None:
    """torch keeps the moments of BF16 weights in BF16, where v stalls at beta2 = 0.999."""
    run = Run(lambda p: torch.optim.AdamW(p, betas=(0.0, 0.999)), dtype=torch.bfloat16)
    run.train([gradient.sign() * (0.01 if i else 1.0) for i, gradient in enumerate(gradients(30))])
    assert run.found(0, "update_error") == 0.0
    assert run.found(29, "update_norm_ratio") == pytest.approx(0.999**14.5, abs=3e-3)
    assert run.errors() == []
    (series,) = (key for key, one in run.worker.metrics(29).items() if "update_error" in one)
    assert series == ("weight", "exp_avg_sq", "rowwise")


def test_a_step_that_a_fused_optimizer_skips_moves_no_twin() -> None:
    """Not even to NaN, which a gradient that a scaler rejects may hold; the next step goes on from there."""
    run = Run(lambda p: torch.optim.AdamW(p, fused=True), dtype=torch.bfloat16, every=100)
    optimizer: Any = run.optimizer
    grads = gradients(4)
    run.train(grads[:2])
    twins = run.scope._twins._twins[id(optimizer)].values()
    (twin,) = [twin for twin in twins if twin is not None]
    before = twin.m.clone(), twin.v.clone()
    grads[2][3, 5] = torch.nan
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    run.train(grads[2:3])
    assert torch.equal(twin.m, before[0])
    assert torch.equal(twin.v, before[1])
    optimizer.found_inf = torch.tensor(0.0)
    run.train(grads[3:])
    assert torch.allclose(twin.m, before[0].lerp(grads[3].bfloat16().float().flatten() / 2, 0.1))
    assert run.errors() == []


def test_twins_divide_by_what_the_optimizer_divides_by() -> None:
    """Gradients that our optimizer clips while it reads them: the ratio stays 1 within 2 %."""
    run = Run(lambda p: AdamW(p, lr=1e-3, betas=BETAS))
    for size, gradient in zip((1.0, 30.0) * 10, gradients(20), strict=True):
        run.model.weight.grad = size * gradient
        assert isinstance(run.optimizer, AdamW)
        run.optimizer.clip_gradients(50.0)
        run.optimizer.step()
        run.scope.step()
        run.optimizer.zero_grad()
    assert run.found(19, "update_norm_ratio") == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("states", "format", "scaling"), [
    ("fp8", "e4m3", "tile 1x128"), ("int8", "uint8", "rowwise"), ("int16", "int16", "rowwise"),
    ("int4", "uint4", "flat 64"), ("bf16", "bf16", "none")])
@pytest.mark.parametrize("warmup_steps", [0, 10])
def test_every_format_of_our_optimizers_has_a_twin(
    states: str, format: str, scaling: str, warmup_steps: int
) -> None:
    """update_norm_ratio is there, under the true name of the root's codes, from the first step in codes on: 1
    within 2 %, of 4 bits within a half."""
    run = Run(lambda p: AdamW(p, lr=1e-3, betas=BETAS, states=states, warmup_steps=warmup_steps,
                              block=64 if states == "int4" else None))
    run.train(gradients(30))
    assert run.errors() == run.notes() == []
    first, last = run.worker.record(0).layout, run.worker.record(29).layout
    for layout, there in ((first, not warmup_steps), (last, True)):
        live = {(one.format, one.scaling, one.rounding) for one in (layout.series if layout else ())
                if one.role == "exp_avg_sq" and one.live}
        assert live == ({(format, scaling, "stochastic")} if there else set())
    assert (run.found(0, "update_norm_ratio") is None) == (warmup_steps > 0)
    ratio = run.found(29, "update_norm_ratio")
    assert ratio == pytest.approx(1.0, abs=0.5 if states == "int4" else 0.02)


@pytest.mark.parametrize("states", ["fp8", "int8", "bf16"])
def test_a_sample_tells_what_the_whole_matrix_does(states: str) -> None:
    """Of 768 elements out of 16,384, over three decades: the ratio within 4 %, the error within a third."""
    def make(parameters: Any) -> torch.optim.Optimizer:
        return ours(parameters, states)

    grads = gradients(30, decades=3.0)
    part, whole = (Run(make, elements=elements).train(grads) for elements in (MOST_KEPT, 64 * 256))
    assert part.scope._twins.bytes <= 8 * MOST_KEPT < whole.scope._twins.bytes
    for step in (10, 20, 29):
        ratios, errors = ([run.found(step, key) for run in (part, whole)]
                          for key in ("update_norm_ratio", "update_error"))
        assert ratios[0] == pytest.approx(ratios[1], rel=0.04)
        assert errors[0] == pytest.approx(errors[1], rel=0.34)
        assert errors[0] != errors[1]


def test_the_setting_is_what_a_scope_takes_by_default() -> None:
    """Settings know no torch, so the number stands in two places."""
    assert ProbeSettings().twin_elements == MOST_KEPT
    with pytest.raises(Invalid, match="twin_elements"):
        ProbeSettings(twin_elements=7)
