"""The input that autograd keeps: the columns of a copy without one, and none where it is not to be had."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8scope.gemm import WgradSample, sample_columns
from fp8scope.saved_input import SavedInput, saved_input
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope.watch import matrix


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12, 160), (3, 4, 160)])
def test_columns_are_those_of_a_copy(bias: bool, shape: tuple[int, ...]) -> None:
    """When the gradient of the output comes; nothing holds the input but autograd, and then nothing does."""
    layer, x = nn.Linear(160, 8, bias=bias), torch.randn(shape)
    wanted = sample_columns(matrix(x)).columns
    y = layer(x)
    kept, alive = saved_input(y, matrix(x)), weakref.ref(x.untyped_storage())
    assert kept is not None
    del x
    equal: list[bool] = []

    def look(gradient: Tensor) -> None:
        sample = kept.sample()
        equal.append(sample is not None and torch.equal(sample.columns, wanted))

    y.register_hook(look)
    y.sum().backward()
    assert equal == [True]
    gc.collect()
    assert kept.sample() is None
    assert alive() is None


def test_an_input_that_was_changed_gives_none() -> None:
    """Its product's own backward raises then."""
    layer, x = nn.Linear(160, 8), torch.randn(12, 160)
    kept = saved_input(layer(x), x)
    assert isinstance(kept, SavedInput)
    x.mul_(2)
    assert kept.sample() is None


def test_what_is_not_there_to_be_seen_is_left_alone() -> None:
    """Hooks of others on what autograd saves are not called; autocast's copy is not the input; and so on."""
    layer, x, called = nn.Linear(160, 8), torch.randn(12, 160), []

    def unpack(packed: Any) -> Any:
        called.append(1)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        assert saved_input(layer(x), x) is None
    assert called == []
    with torch.autocast("cpu", torch.bfloat16):
        assert saved_input(layer(x), x) is None
    with torch.no_grad():
        assert saved_input(layer(x), x) is None
    assert saved_input(layer(x), torch.randn(12, 160)) is None
    layer.weight.requires_grad_(False)
    assert saved_input(layer(x.requires_grad_()), x) is None


def errors(way: Any, monkeypatch: pytest.MonkeyPatch, *, copies: bool) -> dict[Any, float]:
    with monkeypatch.context() as patch:
        if copies:
            patch.setattr("fp8scope.layer_probe.saved_input", lambda *_: None)
        torch.manual_seed(0)
        model, worker = nn.Sequential(nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 32)), MemoryWorker()
        with Scope(model, (), worker=worker, every=1) as scope:
            for step in range(8):
                way(model, torch.randn(4, 16, 160))
                scope.step(step)
    assert [e.text for record in worker.records for e in record.events] == []
    return {(step, key): row["wgrad_row_error_max"] for step in range(8)
            for key, row in worker.metrics(step).items() if "wgrad_row_error_max" in row}


def plain(model: nn.Module, x: Tensor) -> None:
    torch.autograd.backward(model(x).square().mean())


def checkpointed(model: nn.Module, x: Tensor) -> None:
    torch.autograd.backward(checkpoint(model, x, use_reentrant=False).square().mean())


def twice(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


@pytest.mark.parametrize("way", [plain, checkpointed, twice])
def test_errors_are_those_of_copies(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, every layer once in eight detailed steps."""
    found = errors(way, monkeypatch, copies=False)
    assert found == errors(way, monkeypatch, copies=True)
    assert len(found) == 2


def test_a_measured_call_keeps_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forward and backward of a plain linear."""
    made: list[weakref.ref[Tensor]] = []

    def columns(x: Tensor, scales: Tensor | None = None) -> WgradSample:
        sample = sample_columns(x, scales)
        made.append(weakref.ref(sample.columns))
        return sample

    monkeypatch.setattr("fp8scope.layer_probe.sample_columns", columns)
    monkeypatch.setattr("fp8scope.saved_input.sample_columns", columns)
    model, worker = nn.Sequential(nn.Linear(160, 32)), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        for step in range(8):
            loss = model(torch.randn(16, 160)).sum()
            assert made == []
            loss.backward()
            if made:
                assert made.pop()() is None
            scope.step(step)
