"""Weights are measured together where a measured step begins, once a step, and never in another's place."""

import pytest
import torch
from torch import Tensor, nn

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker


class Pair(nn.Module):
    """a, then b unless it is told to leave it out; before b runs, its weight may be doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
        self.with_b, self.doubles = True, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.doubles:
            with torch.no_grad():
                self.b.weight.mul_(2.0)
        return self.b(x) if self.with_b else x


def step(model: Pair, scope: Scope, **how: bool) -> None:
    for name, value in how.items():
        setattr(model, name, value)
    model(torch.ones(4, 128)).sum().backward()
    scope.step()


def calls(worker: MemoryWorker, index: int) -> dict[str, int]:
    """Weight -> how often it was measured in a step."""
    record = worker.record(index)
    assert record.layout is not None
    assert record.tables is not None
    rows = zip(record.layout.series, record.tables.counts[:, 1].tolist(), strict=True)
    return {one.name: count for one, count in rows if one.role == "weight"}


def amax(worker: MemoryWorker, index: int, name: str) -> float:
    return float(worker.metrics(index)[name, "weight", "rowwise"]["amax"])


@pytest.fixture
def pair() -> Pair:
    torch.manual_seed(0)
    return Pair()


def test_weights_are_those_at_the_beginning_of_the_step(pair: Pair) -> None:
    """From the second measured step on, the second layer's is read before the first layer runs."""
    worker, first = MemoryWorker(), float(pair.b.weight.detach().abs().max())
    with Scope(pair, (), worker=worker, every=1) as scope:
        for _ in range(3):
            step(pair, scope, doubles=True)
    assert amax(worker, 0, "b.weight") == pytest.approx(2 * first)  # nobody knew of it yet
    assert amax(worker, 1, "b.weight") == pytest.approx(2 * first)
    assert amax(worker, 2, "b.weight") == pytest.approx(4 * first)


def test_every_weight_is_measured_once_a_step(pair: Pair) -> None:
    """A layer that no longer runs is measured once more; one that runs again, in that very step."""
    worker = MemoryWorker()
    with Scope(pair, (), worker=worker, every=1, detail_every=2) as scope:
        for with_b in (True, True, False, False, True, True):
            step(pair, scope, with_b=with_b)
    found = [calls(worker, i) for i in range(6)]
    assert [one["a.weight"] for one in found] == [1] * 6
    assert [one["b.weight"] for one in found] == [1, 1, 1, 0, 1, 1]


def test_a_weight_that_was_moved_or_replaced_is_measured_by_its_layer(pair: Pair) -> None:
    """What lies elsewhere at the beginning, or is no plain parameter, waits for its layer's forward."""
    worker = MemoryWorker()
    with Scope(pair, (), worker=worker, every=1) as scope:
        step(pair, scope)
        pair.b.weight = nn.Parameter(torch.full((128, 128), 3.0))
        step(pair, scope)
        pair.b.weight.data = torch.full((128, 128), 5.0)
        step(pair, scope, doubles=True)
    assert amax(worker, 1, "b.weight") == 3.0
    assert amax(worker, 2, "b.weight") == 10.0
    assert all(calls(worker, i)["b.weight"] == 1 for i in range(3))


def test_tied_weights_are_one_series(pair: Pair) -> None:
    """One weight in two layers is measured once."""
    pair.b.weight = pair.a.weight
    worker = MemoryWorker()
    with Scope(pair, (), worker=worker, every=1) as scope:
        for _ in range(3):
            step(pair, scope)
    assert [calls(worker, i) for i in range(3)] == [{"a.weight": 1}] * 3
