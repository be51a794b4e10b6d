"""Weights are measured together where a measured step begins, once a step, and never in another's place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

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


class Three(nn.Module):
    """An embedding, and two layers that share its weight; the last one runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(128, 128)
        self.a, self.b = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
        self.a.weight = self.b.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(self.b(x + self.e.weight[:1]))
        return y


def full(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((128, 128), value))


def untie_by_loading(model: nn.Module) -> None:
    state = model.state_dict()
    model.load_state_dict({"a.weight": state["a.weight"] * 0 + 2, "b.weight": state["b.weight"] * 0 + 3},
                          assign=True)


def untie_second(model: Any) -> None:
    model.a.weight.data.fill_(2.0)
    model.b.weight = full(3.0)


def untie_first(model: Any) -> None:
    model.b.weight.data.fill_(3.0)
    model.a.weight = full(2.0)


def untie_both(model: Any) -> None:
    model.a.weight, model.b.weight = full(2.0), full(3.0)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("untie", [untie_by_loading, untie_first, untie_second, untie_both])
def test_a_weight_that_is_shared_no_more_has_its_own_name(
    pair: Pair, untie: Callable[[Pair], object], backwards: bool
) -> None:
    """Whichever of the two is replaced and whichever runs first: the owner's series is the owner's, and the
    other one is measured under its layer's name, from that step on and in every step once."""
    if backwards:  # the second layer runs first
        pair.forward = lambda x: pair.a(pair.b(x))  # type: ignore[method-assign]
    pair.b.weight = pair.a.weight
    worker = MemoryWorker()
    with Scope(pair, (), worker=worker, every=1) as scope:
        for index in range(5):
            if index == 2:
                untie(pair)
            step(pair, scope)
    for index in (2, 3, 4):
        assert amax(worker, index, "a.weight") == 2.0
        assert amax(worker, index, "b.weight") == 3.0
        assert calls(worker, index) == {"a.weight": 1, "b.weight": 1}
    layout = worker.record(4).layout
    assert layout is not None
    assert {one.name: one.module for one in layout.series if one.role == "weight"}["b.weight"] == "b"


def test_weights_that_are_shared_later_are_measured_once_each(pair: Pair) -> None:
    """Tied and untied again: two series, each counted once a step and with its own layer's values."""
    worker = MemoryWorker()
    with Scope(pair, (), worker=worker, every=1) as scope:
        for index in range(6):
            if index == 2:
                pair.a.weight = pair.b.weight = full(2.0)
            if index == 4:
                pair.b.weight = full(3.0)
            step(pair, scope)
    found = [(amax(worker, i, "a.weight"), amax(worker, i, "b.weight")) for i in (2, 3, 4, 5)]
    assert found == [(2.0, 2.0), (2.0, 2.0), (2.0, 3.0), (2.0, 3.0)]
    assert [calls(worker, i) for i in range(6)] == [{"a.weight": 1, "b.weight": 1}] * 6


def test_an_embedding_that_is_replaced_takes_its_name_along() -> None:
    """The layers keep the old matrix: under their own names. Tied to the new one, they have its name again;
    one that is only wrapped is the same one. Optimizer states have the same names."""
    model, worker = Three(), MemoryWorker()
    optimizer = torch.optim.Adam(model.parameters())
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for index in range(4):
            if index == 1:
                model.e = nn.Embedding(128, 128)
            if index == 2:
                model.a.weight = model.b.weight = model.e.weight
                optimizer.param_groups[0]["params"] = [model.e.weight]
            if index == 3:
                model.e = nn.Sequential(model.e)  # type: ignore[assignment]
                model.e.weight = model.e[0].weight  # type: ignore[index]
            model(torch.randn(4, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scope.step()
    live = [{name for name, count in calls(worker, i).items() if count} for i in range(4)]
    assert live == [{"e.weight"}, {"a.weight", "b.weight"}, {"e.weight"}, {"e.weight"}]
    states = [{key[0] for key, row in worker.metrics(i).items() if key[1] == "exp_avg" and row["calls"]}
              for i in range(3)]
    assert states == [{"e.weight"}, {"a.weight"}, {"e.weight"}]


def test_updates_follow_the_name_of_their_weight() -> None:
    """`update_gain` of a weight in BF16 goes on under the name that its states have."""
    model, worker = Three().bfloat16(), MemoryWorker()
    optimizer = torch.optim.Adam(model.parameters())
    found = []
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for index in range(3):
            if index == 2:
                model.e = nn.Embedding(128, 128).bfloat16()
            model(torch.randn(4, 128).bfloat16()).sum().backward()
            optimizer.step()
            scope.step()
            record = worker.record(index)
            assert record.layout is not None
            assert record.tables is not None
            rows = zip(record.layout.series, record.tables.counts[:, 1].tolist(), strict=True)
            found.append({one.name for one, count in rows if one.live and count})
    assert found == [{"e.weight"}, {"e.weight"}, {"a.weight"}]


class Computing(nn.Linear):
    """Sets its weight in its own forward."""

    def __init__(self) -> None:
        super().__init__(128, 128, bias=False)
        self.source = self._parameters.pop("weight")

    def forward(self, input: Tensor) -> Tensor:
        assert self.source is not None
        self.weight = self.source * 2
        return super().forward(input)


def prune_half(model: Pair) -> None:
    prune.random_unstructured(model.b, "weight", 0.5)  # type: ignore[no-untyped-call]


def normalize(model: Pair) -> None:
    torch.nn.utils.spectral_norm(model.b)


def compute_in_hook(model: Any) -> None:
    source = model.b._parameters.pop("weight")
    model.b.register_parameter("source", source)
    model.b.register_forward_pre_hook(lambda module, args: setattr(module, "weight", module.source * 2))


def compute_in_forward(model: Any) -> None:
    model.b.source, model.b.__class__ = model.b._parameters.pop("weight"), Computing


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("compute", [prune_half, normalize, compute_in_hook, compute_in_forward])
def test_a_computed_weight_is_the_one_that_is_multiplied(
    pair: Pair, compute: Callable[[Pair], object], late: bool
) -> None:
    """Whether it is computed before the probe came or after, in a hook or in the forward: the weight of this
    step, not of the one before, with the error of its product; nothing is listed as unobserved."""
    worker, multiplied = MemoryWorker(), []
    if not late:
        compute(pair)
    with Scope(pair, (), worker=worker, every=1) as scope:
        for index in range(4):
            if late and index == 1:
                compute(pair)
            with torch.no_grad():
                for parameter in pair.b.parameters():
                    parameter[torch.randint(128, ())] *= 3
            step(pair, scope)
            multiplied.append(float(pair.b.weight.detach().abs().max()))
    assert [amax(worker, i, "b.weight") for i in range(4)] == multiplied
    assert len(set(multiplied)) > 1
    assert [calls(worker, i)["b.weight"] for i in range(4)] == [1] * 4
    errors = [worker.metrics(i)["b", "activation", "rowwise"]["gemm_error"] for i in range(4)]
    assert all(0.001 < one < 0.1 for one in errors)
    assert [event for record in worker.records for event in record.events] == []
