"""What a step did to the weights: the gain of weights in few bits, and the update's sentinels on a sample."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker


def trained(
    dtype: torch.dtype, *, lr: float = 1e-4, steps: int = 4, size: float = 0.02, stochastic: bool = False,
    make: Any = torch.optim.AdamW,
) -> MemoryWorker:
    """One matrix under Adam with gradients of noise; `stochastic` rounds an exact step in its place."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(512, 512, bias=False)
    weight = model.weight
    weight.data = (size * torch.randn(512, 512, generator=generator)).to(dtype)
    worker, optimizer = MemoryWorker(), make(model.parameters(), lr=lr)
    exact = weight.detach().float()
    reference = torch.optim.AdamW([exact], lr=lr)

    @torch.no_grad()
    def round_instead(*_: Any) -> None:
        reference.step()
        weight.copy_(rounded_stochastically(exact, generator))
        exact.copy_(weight)

    if stochastic:
        optimizer.register_step_post_hook(round_instead)  # runs before the probe's own
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for step in range(steps):
            weight.grad = torch.randn(512, 512, generator=generator).to(dtype)
            exact.grad = weight.grad.float()
            optimizer.step()
            scope.step(step)
    return worker


def rounded_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to BF16: random bits are added below the last place that stays."""
    bits = x.view(torch.int32) + torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32)
    return (bits & -65536).view(torch.float32).bfloat16()


def gain_of(worker: MemoryWorker, step: int) -> Any:
    found = {series: values for series, values in worker.metrics(step).items() if "update_gain" in values}
    return next(iter(found.values()))["update_gain"] if found else None


@pytest.mark.parametrize(("size", "low", "high"), [(0.02, 0.5, 0.95), (0.1, 0.1, 0.6)])
def test_bf16_rounded_to_nearest_loses_updates(size: float, low: float, high: float) -> None:
    """Of updates of lr 1e-4 weights near `size` take a part, the larger the less; as counted by hand."""
    worker = trained(torch.bfloat16, size=size)
    assert low < gain_of(worker, 3) < high


def test_bf16_rounded_stochastically_loses_none() -> None:
    """Within the noise of 262,144 coin tosses."""
    worker = trained(torch.bfloat16, stochastic=True)
    assert gain_of(worker, 3) == pytest.approx(1.0, abs=0.05)


def test_the_gain_is_that_of_a_plain_loop() -> None:
    """Exact Adam beside BF16 weights: sum(applied intended) / sum(intended^2) in float64."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(64, 32, bias=False)
    weight = model.weight
    weight.data = (0.05 * torch.randn(32, 64, generator=generator)).bfloat16()
    worker, optimizer = MemoryWorker(), torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.1)
    m = v = torch.zeros(32, 64, dtype=torch.float64)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for step in range(5):
            weight.grad = torch.randn(32, 64, generator=generator).bfloat16()
            g, before = weight.grad.double(), weight.detach().double()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            u = m / (1 - 0.9**(step + 1)) / ((v / (1 - 0.999**(step + 1))).sqrt() + 1e-8)
            intended = -2e-4 * (u + 0.1 * before)
            optimizer.step()
            applied = weight.detach().double() - before
            scope.step(step)
            exact = ((applied * intended).sum() / intended.square().sum()).item()
            assert gain_of(worker, step) == pytest.approx(exact, rel=0.02)  # its moments are in BF16


def test_weights_in_fp32_are_not_asked() -> None:
    """They keep everything; a row of ones would say nothing."""
    assert gain_of(trained(torch.float32), 3) is None


@pytest.mark.parametrize("make", [
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.SGD, torch.optim.Adafactor,
    lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True)])
def test_other_steps_are_not_taken_for_adams(make: Any) -> None:
    """Whose moments look alike but whose steps are others: no number is better than a wrong one."""
    worker = trained(torch.bfloat16, make=make)
    assert gain_of(worker, 3) is None
    assert "update_max" not in worker.sentinels(3)


@pytest.mark.parametrize("fused", [False, True])
def test_coupled_decay_is_in_the_moments(fused: bool) -> None:
    """Adam's own decay changes the gradient, so the gain of a matrix that may move freely is still 1."""
    worker = trained(torch.bfloat16, lr=0.5, make=lambda p, lr: torch.optim.Adam(
        p, lr=lr, weight_decay=0.1, fused=fused))
    assert gain_of(worker, 0) == pytest.approx(1.0, abs=0.01)


def test_sentinels_of_large_parameters_are_estimates() -> None:
    """From 128 blocks of 16,384: ratios within a few percent of the whole."""
    generator = torch.Generator().manual_seed(0)
    model, worker = nn.Sequential(nn.Linear(2048, 1024)), MemoryWorker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) ** 3
        optimizer.step()
        scope.step(0)
    moved = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    found = worker.sentinels(0)
    assert found["update_weight_ratio"] == pytest.approx((moved.norm() / weights.norm()).item(), rel=0.02)
    assert found["update_max"] == pytest.approx(moved.abs().max().item() / 1e-2, rel=1e-3)
