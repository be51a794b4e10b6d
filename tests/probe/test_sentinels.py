"""Sentinels: what they cost in every step, and steps that an optimizer skips by itself."""

import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8scope
from fp8scope.derive import derive_sentinels
from fp8scope.sentinels import Sentinels

VIEWS = {"aten.detach.default", "aten.view.default", "aten.select.int", "aten.slice.Tensor"}


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would be launched: every operation that is no view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in VIEWS:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def step_of(sentinels: Sentinels, optimizer: torch.optim.Optimizer) -> None:
    sentinels.log({"loss": torch.ones(())})
    sentinels.read_gradients(optimizer, sampled=False)
    sentinels.after_step(optimizer)
    sentinels.take()


def optimizer_of(parameters: int) -> torch.optim.Optimizer:
    found = [nn.Parameter(torch.zeros(4)) for _ in range(parameters)]
    for parameter in found:
        parameter.grad = torch.ones(4)
    return torch.optim.SGD(found, lr=0.1)


def test_a_step_launches_few_operations_however_many_parameters() -> None:
    """One norm for all gradients, and at most thirty small operations beside it."""
    counts = []
    for parameters in (3, 300):
        sentinels, optimizer = Sentinels(torch.device("cpu"), world=1), optimizer_of(parameters)
        step_of(sentinels, optimizer)
        for reads in (0, 0, 0, 1):
            with torch.no_grad(), Operations() as found:
                step_of(sentinels, optimizer)
            assert found.names.count("aten._foreach_norm.Scalar") == reads
        counts.append(len(found.names))
    assert counts[0] == counts[1]
    assert counts[0] <= 30


def test_gradients_are_read_in_every_fourth_step_at_least() -> None:
    """And in sampled ones; of both optimizers of a step. In between nothing is said, not even 0."""
    sentinels, optimizers = Sentinels(torch.device("cpu"), world=1), [optimizer_of(3), optimizer_of(1)]
    found = []
    for step in range(12):
        sentinels.log({"loss": 1.0} if step == 2 else {})
        for optimizer in optimizers:
            sentinels.read_gradients(optimizer, sampled=step == 6)
            sentinels.after_step(optimizer)
        found.append(derive_sentinels(sentinels.take(), deque()))
    read = [step for step, taken in enumerate(found) if "grad_norm" in taken]
    assert read == [0, 4, 6, 10]
    assert {found[step]["grad_norm"] for step in read} == {4.0}
    assert [step for step, taken in enumerate(found) if "nonfinite_count" in taken] == [0, 2, 4, 6, 10]


def test_gradients_are_not_read_where_the_job_knows_their_norm() -> None:
    """Off cadence, once a step has logged it; if it no longer does, they are read as in any other job."""
    sentinels, optimizer = Sentinels(torch.device("cpu"), world=1), optimizer_of(3)
    norms = []
    for logged in (2.0, math.nan, 2.0, 2.0, None, None):
        with torch.no_grad(), Operations() as found:
            sentinels.read_gradients(optimizer, sampled=False)
            sentinels.after_step(optimizer)
            if logged is not None:
                sentinels.log({"grad_norm": logged})
            taken = derive_sentinels(sentinels.take(), deque())
        norms.append(("aten._foreach_norm.Scalar" in found.names, taken.get("grad_norm"),
                      taken.get("nonfinite_count")))
    assert norms[0] == (True, 2.0, 0.0)
    assert not norms[1][0]
    assert norms[1][2] == 1.0
    assert norms[2] == norms[3] == (False, 2.0, 0.0)
    assert norms[4] == (False, None, None)
    assert norms[5] == (True, math.sqrt(12), 0.0)


def test_values_are_those_of_the_moment_they_were_logged() -> None:
    """A running loss that the job goes on changing in place."""
    sentinels, loss = Sentinels(torch.device("cpu"), world=1), torch.ones((), dtype=torch.float64)
    sentinels.log({"loss": loss})
    loss.zero_()
    assert derive_sentinels(sentinels.take(), deque())["loss"] == 1.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_fused_optimizer_skips_is_marked(fused: bool, tmp_path: Path, spooled: Any) -> None:
    """Under a scaler a fused step is called and skips by itself, on the device; others are never called."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scope = fp8scope.attach(model, optimizer, run="a", every=2, collector="offline", spool=tmp_path)
    x: Tensor = torch.randn(8, 16)
    for step, factor in enumerate((1.0, math.inf, 1.0, math.inf)):
        scaler.scale(model(x).square().mean() * factor).backward()
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (factor != 1.0)
        optimizer.zero_grad()
        scope.step(step, skipped=not scope.stepped)
    scope.close()
    marks = [(step.header.step, step.header.skipped) for step in spooled(tmp_path, "a")]
    assert marks == [(0, False), (1, True), (2, False), (3, True)]
    assert all("skipped" not in step.header.sentinels for step in spooled(tmp_path, "a"))
