"""What the precision of layers does to gradients, against gradients taken by hand."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe


class Net(nn.Module):
    """Two FP8 layers, one with a delayed scale, with dropout and batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Fp8Linear(128, 256, recipe=Recipe(policy="delayed", history_length=4))
        self.norm = nn.BatchNorm1d(256)
        self.drop = nn.Dropout(0.5)
        self.last = Fp8Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.drop(self.norm(self.first(x))))
        return y


def data(seed: int) -> Tensor:
    return torch.randn(256, 128, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    loss: Tensor = model(data(seed)).square().mean()
    return loss


def gradients(model: Net, seed: int, precision: Any, rng: Tensor) -> dict[str, Tensor]:
    """By hand, with the given random numbers; the model stays as it was."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for layer in (model.first, model.last):
        layer.set_precision(precision)
    torch.set_rng_state(rng)
    found = torch.autograd.grad(loss_of(model, seed), list(model.parameters()))
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    for layer in (model.first, model.last):
        layer.set_precision("fp8")
    return dict(zip((name for name, _ in model.named_parameters()), found, strict=True))


def distance(g: Tensor, d: Tensor) -> float:
    return 1.0 - torch.cosine_similarity(g.double().flatten(), d.double().flatten(), dim=0).item()


def test_numbers_are_those_of_gradients_taken_by_hand() -> None:
    """1 - cosine, ratio of norms and noise of every parameter, with dropout the same in both precisions."""
    model, worker = Net(), MemoryWorker()
    model.first.history.observe(data(9))  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        rng = torch.get_rng_state()
        scope.grad_fidelity(lambda: loss_of(model, 1), lambda: loss_of(model, 2))
        scope.step(0)
    fp8, bf16 = (gradients(model, 1, precision, rng) for precision in ("fp8", "bf16"))
    for name in ("first.weight", "last.weight", "last.bias"):
        row = worker.metrics(0)[name, "wgrad", "rowwise"]
        assert row["grad_fidelity"] == pytest.approx(distance(bf16[name], fp8[name]), rel=1e-3, abs=1e-9)
        ratio = (fp8[name].norm() / bf16[name].norm()).item()
        assert row["grad_fidelity_norm_ratio"] == pytest.approx(ratio, rel=1e-5)
    weight = worker.metrics(0)["last.weight", "wgrad", "rowwise"]
    assert 1e-4 < weight["grad_fidelity"] < 0.01 < weight["grad_noise"], "FP8 changes less than another batch"


def test_training_goes_on_as_if_nothing_had_been_asked() -> None:
    """Gradients, buffers, histories, precisions and random numbers: two more steps give the same bits."""
    ends = []
    for asked in (False, True):
        model, worker = Net(), MemoryWorker()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(3)
        with Scope(model, (optimizer,), worker=worker, every=1) as scope:
            for step in range(3):
                torch.autograd.backward(loss_of(model, step))
                if asked and step == 1:  # gradients lie there
                    scope.grad_fidelity(partial(loss_of, model, 7), partial(loss_of, model, 8))
                optimizer.step()
                if asked and step == 1:  # and between a step and the forward that would close it
                    scope.grad_fidelity(partial(loss_of, model, 7))
                optimizer.zero_grad()
        assert [record.step for record in worker.records] == [0, 1, 2]
        ends.append([*model.state_dict().values(), *(b for b in model.buffers()), torch.get_rng_state()])
        calls = worker.metrics(1)["first", "activation", "rowwise"]["calls"]
        assert calls == 1, "the passes of a comparison are not measured"
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_loss_that_fails_is_an_event_and_everything_is_put_back() -> None:
    """The closure raises in its second pass, in BF16: the job is told, layers are in FP8 again."""
    model, worker, calls = Net(), MemoryWorker(), []

    def broken() -> Tensor:
        calls.append(model.last.precision)
        if len(calls) == 2:
            raise ValueError("no more data")
        return loss_of(model, 1)

    with Scope(model, (), worker=worker, every=1) as scope:
        scope.grad_fidelity(broken)
        scope.step(0)
    assert calls == ["fp8", "bf16"]
    assert (model.first.precision, model.last.precision) == ("fp8", "fp8")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [(e.kind, e.name) for e in worker.record(0).events if e.kind == "probe_error"] == [
        ("probe_error", "grad_fidelity")]


def test_an_interrupt_passes_and_measuring_goes_on() -> None:
    """Ctrl-C in the closure reaches the job, which may catch it and train on: the step is measured."""
    model, worker = Net(), MemoryWorker()

    def interrupted() -> Tensor:
        raise KeyboardInterrupt

    with Scope(model, (), worker=worker, every=1) as scope:
        with pytest.raises(KeyboardInterrupt):
            scope.grad_fidelity(interrupted)
        torch.autograd.backward(loss_of(model, 1))
        scope.step(0)
    assert worker.metrics(0)["first", "activation", "rowwise"]["calls"] == 1


def test_nothing_to_compare_is_said() -> None:
    """A model whose layers compute in one precision only: no extra pass, and the reason."""
    model, worker = nn.Sequential(nn.Linear(8, 8)), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        scope.grad_fidelity(lambda: pytest.fail("ran the model"))
        scope.step(0)
    assert any(e.name == "grad_fidelity" and e.kind == "unobserved" for e in worker.record(0).events)
    assert not any("grad_fidelity" in row for row in worker.metrics(0).values())


def test_a_gradient_of_zero_has_no_angle() -> None:
    """A parameter whose gradient is zero throughout says nothing; tiny gradients keep their digits."""
    model, worker = Net(), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        scope.grad_fidelity(lambda: loss_of(model, 1) * 1e-25)
        scope.step(0)
    weight = worker.metrics(0)["last.weight", "wgrad", "rowwise"]
    assert 0.0 < weight["grad_fidelity"] < 1.0
    with Scope(model, (), worker=worker, every=1) as scope:
        scope.grad_fidelity(lambda: loss_of(model, 1) * 0)
        scope.step(0)
    assert "grad_fidelity" not in worker.metrics(0)["last.weight", "wgrad", "rowwise"]
