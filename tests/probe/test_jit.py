"""`torch.jit.trace` and `torch.jit.script` of a model that has a probe: they work as without one, and what
they run is not measured."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope.scope import Scope
from fp8scope.scripting import NAME
from fp8scope.testing import MemoryWorker
from fp8scope_trainer.linear import Fp8Linear

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # deprecated in torch 2.13
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]


class Block(nn.Module):
    """A layer inside of a module without hooks, and one that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.last = nn.Linear(16, 16)
        self.again = self.last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(self.last(self.first(x)))
        return y


class Prepared(nn.Linear):
    """A layer that answers `torch.jit.script` by itself."""

    def __prepare_scriptable__(self) -> nn.Module:
        answer = nn.Linear(self.in_features, self.out_features)
        answer.weight, answer.bias = self.weight, self.bias
        return answer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(16, 4))


@pytest.mark.parametrize("way", ["trace", "script"])
def test_a_model_with_a_probe_is_traced_and_scripted(way: str) -> None:
    """In a measured training step, right after the optimizer's: same outputs, the parameters are the model's,
    no step closes, nothing is counted, and the probe goes on."""
    net, worker, x = model(), MemoryWorker(), torch.randn(3, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    modules, hooks = list(net.modules()), [len(m._forward_pre_hooks) for m in net.modules()]
    with Scope(net, (optimizer,), worker=worker, every=1):
        hooks = [len(m._forward_pre_hooks) for m in net.modules()]
        net(x).sum().backward()
        optimizer.step()
        made: Any = torch.jit.trace(net, x) if way == "trace" else torch.jit.script(net)  # type: ignore[no-untyped-call]
        assert worker.records == []
        assert torch.equal(made(x), net(x))
        assert [r.step for r in worker.records] == [0]
        assert all(a is b for a, b in zip(net.modules(), modules, strict=True))
        assert [len(m._forward_pre_hooks) for m in net.modules()] == hooks
        assert {p.data_ptr() for p in made.parameters()} == {p.data_ptr() for p in net.parameters()}
    metrics = worker.metrics(0)
    assert metrics["0.first.0", "activation", "rowwise"]["elements"] == 3 * 16
    assert metrics["0.last", "activation", "rowwise"]["calls"] == 2
    assert [e for e in worker.record(0).events if e.kind == "probe_error"] == []


def test_a_scripted_part_leaves_the_model_as_it_is() -> None:
    """torch puts what modules answer in place of submodules: not in the model, whose layers stay measured."""
    net, worker = model(), MemoryWorker()
    with Scope(net, (), worker=worker, every=1) as scope:
        modules = list(net.modules())
        torch.jit.script(net[0])
        assert all(a is b for a, b in zip(net.modules(), modules, strict=True))
        net(torch.randn(5, 16))
        scope.step(0)
    assert worker.metrics(0)["0.first.0", "activation", "rowwise"]["elements"] == 5 * 16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_are_scripted_too(copied: Any) -> None:
    """What an EMA or a checkpoint holds can be exported, while the probe is there and after."""
    net, x = model(), torch.randn(3, 16)
    with Scope(net, (), worker=MemoryWorker(), every=1):
        twin = copied(net)
        assert torch.equal(torch.jit.script(twin)(x), net(x))
        with torch.no_grad():
            net.get_parameter("1.weight").zero_()
            assert not torch.equal(torch.jit.script(twin)(x), net(x))
    assert torch.equal(torch.jit.script(twin)(x), twin(x))


def test_what_a_class_answers_counts() -> None:
    """A module that has an answer of its own is asked for it, at the top and below."""
    for net in (Prepared(16, 16), nn.Sequential(Prepared(16, 16))):
        with Scope(net, (), worker=MemoryWorker(), every=1):
            made = torch.jit.script(net)
            names = [one.original_name for one in made.modules()]
            assert "Prepared" not in names
            assert "Linear" in names


def test_detach_leaves_nothing_behind() -> None:
    """No module answers any more, also of layers that report by themselves."""
    net = nn.Sequential(Fp8Linear(128, 128), Block())
    before = [dict(vars(module)) for module in net.modules()]
    with Scope(net, (), worker=MemoryWorker(), every=1):
        assert all(NAME in vars(module) for module in net.modules())
    assert [vars(module).keys() for module in net.modules()] == [one.keys() for one in before]
