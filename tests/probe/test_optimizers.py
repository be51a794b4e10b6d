"""Optimizers as trainers use them: steps with a closure, wrapped optimizers, clipping in between."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

import fp8scope
from fp8scope.hosted import HostedScope
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid

STEPS = 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def batches() -> Tensor:
    return torch.randn(STEPS, 32, 16, generator=torch.Generator().manual_seed(1))


def plain() -> MemoryWorker:
    """What a plain loop measures."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.AdamW(model.parameters())
    with Scope(model, (optimizer,), worker=worker, every=1):
        for batch in batches():
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return worker


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_runs_before_gradients_are_read(keyword: bool, explicit: bool) -> None:
    """Forward and backward inside `optimizer.step`, as in Lightning: the same steps and numbers."""
    model, worker, wanted = network(), MemoryWorker(), plain()
    optimizer = torch.optim.AdamW(model.parameters())
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for batch in batches():
            def closure(batch: Tensor = batch) -> Any:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            if explicit:
                scope.step()
    assert [r.step for r in worker.records] == list(range(STEPS))
    for step in range(STEPS):
        assert worker.sentinels(step) == pytest.approx(wanted.sentinels(step))
        assert worker.metrics(step).keys() == wanted.metrics(step).keys()


def test_lbfgs_calls_its_closure_often() -> None:
    """Every evaluation counts as a micro-batch; the gradient norm is that of the last one."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batches()[0]).square().mean()
        loss.backward()
        return loss

    with Scope(model, (optimizer,), worker=worker, every=1):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    last = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert worker.sentinels(0)["grad_norm"] == pytest.approx(last.norm().item())
    assert worker.metrics(0)["0", "activation", "rowwise"]["calls"] > 1


@pytest.mark.parametrize("wrapper", ["accelerate", "lightning", "both"])
def test_the_optimizer_inside_a_wrapper_is_watched(wrapper: str) -> None:
    """Wrappers are optimizers without step hooks: the probe hooks what they wrap."""
    model, worker, wanted = network(), MemoryWorker(), plain()
    bare = torch.optim.AdamW(model.parameters())
    wrapped: torch.optim.Optimizer = bare
    if wrapper != "lightning":
        wrapped = Accelerator(cpu=True).prepare(wrapped)
    if wrapper != "accelerate":
        wrapped = LightningOptimizer(wrapped)  # type: ignore[assignment]
    with Scope(model, (wrapped,), worker=worker, every=1):
        for batch in batches():
            model(batch).square().mean().backward()
            bare.step()
            bare.zero_grad()
    assert [r.step for r in worker.records] == list(range(STEPS))
    assert worker.sentinels(2) == pytest.approx(wanted.sentinels(2))
    assert ("0.weight", "exp_avg_sq", "rowwise") in worker.metrics(2)


def test_what_is_no_optimizer_is_refused() -> None:
    """`attach` says so before it touches the model."""
    model = network()
    with pytest.raises(Invalid, match="optimizers"):
        fp8scope.attach(model, [model], run="r")  # type: ignore[list-item]
    assert not model[0]._forward_pre_hooks


def test_the_norm_before_clipping_can_be_read() -> None:
    """`read_gradients` between backward and clipping wins; the next step is read anew."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for step, batch in enumerate(batches()):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            if step != 1:
                scope.read_gradients(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item())
            assert not scope.stepped
            optimizer.step()
            assert scope.stepped
            scope.step()
    found = [worker.sentinels(step)["grad_norm"] for step in range(STEPS)]
    assert found == pytest.approx([norms[0], 1e-3, norms[2]], rel=1e-3)


def test_an_optimizer_that_steps_twice_is_read_twice() -> None:
    """A NaN that only the second step of one explicit step has is counted."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        scope.step(0)
        for value in (1.0, float("nan")):
            for p in model.parameters():
                p.grad = torch.full_like(p, value)
            optimizer.step()
        scope.step(1)
    assert worker.sentinels(1)["nonfinite_count"] > 0


def test_a_step_that_a_scaler_skipped_is_marked(tmp_path: Path, spooled: Any) -> None:
    """A trainer counts it; the optimizer inside the wrapper has not stepped."""
    model = network()
    Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = AcceleratedOptimizer(torch.optim.AdamW(model.parameters()), scaler=scaler)
    hosted = HostedScope({"run": "a", "every": 1, "collector": "offline", "spool": tmp_path})
    hosted.begin(model, (optimizer,), step=0)
    for step, factor in enumerate((1.0, math.inf, 1.0)):
        scaler.scale(model(batches()[0]).square().mean() * factor).backward()
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 1)
        optimizer.zero_grad()
        hosted.step(step)
    hosted.end()
    assert [(step.header.step, step.header.skipped) for step in spooled(tmp_path, "a")] == [
        (0, False), (1, True), (2, False)]
    assert not model[0]._forward_pre_hooks
