"""Loops and models that a newcomer may have: the probe measures them, or says what it cannot do."""

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fp8scope
from fp8scope.nested import tensors_in
from fp8scope.scope import Scope
from fp8scope.settings import OFFLINE
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.series import NAME_LIMIT
from fp8scope_protocol.wire import ProbeEvent

ACTIVATION, GRADIENT = ("0", "activation", "rowwise"), ("0", "gradient", "rowwise")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    y: Tensor = model(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)))
    return y.square().mean()


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def told(worker: MemoryWorker) -> list[ProbeEvent]:
    return [event for record in worker.records for event in record.events]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any] | None = None,
            steps: int = 4) -> MemoryWorker:
    worker = MemoryWorker()
    with Scope(model, (optimizer,), worker=worker, every=1):
        for number in range(steps):
            backward(loss_of(model, number))
            (step or optimizer.step)()
            optimizer.zero_grad()
    return worker


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Dynamo, on builtins
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo's own classes, and in torch.jit
def test_a_compiled_optimizer_step() -> None:
    """`torch.compile(optimizer.step)` breaks its graph at the probe's hooks, which run as they are written:
    the sentinels of the plain step, and none of the probe's own code is compiled."""
    torch._dynamo.reset()
    found = []
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    for compiled in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
        step = torch.compile(optimizer.step, backend=backend) if compiled else None
        worker = trained(model, optimizer, step)
        assert told(worker) == []
        found.append([worker.sentinels(number) for number in range(4)])
    assert found[1] == [pytest.approx(one, rel=1e-5) for one in found[0]]
    assert graphs
    assert not [graph for graph in graphs if "fp8scope" in graph]


def test_an_optimizer_that_calls_the_model() -> None:
    """L-BFGS: what its closure runs in one step is one step, with the gradient norm of its last call."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    calls: list[int] = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(loss)
        calls.append(1)
        return loss.item()

    with Scope(model, (optimizer,), worker=worker, every=1):
        for _ in range(3):
            before = len(calls)
            optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert [record.step for record in worker.records] == [0, 1, 2]
    assert worker.metrics(2)[ACTIVATION]["calls"] == len(calls) - before
    assert worker.sentinels(2)["grad_norm"] > 0
    assert told(worker) == []


def test_a_model_in_several_threads() -> None:
    """Each call's output has its own gradient, whatever other threads do in the same layers meanwhile."""
    model, worker = network(), MemoryWorker()
    barrier = threading.Barrier(4)

    def run() -> None:
        barrier.wait()
        for seed in range(40):
            backward(loss_of(model, seed))

    with Scope(model, (), worker=worker, every=1) as scope:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(layer._forward_hooks) for layer in (model[0], model[2])] == [1, 1]  # for torch.compile
        scope.step(0)
    assert told(worker) == []
    row = worker.metrics(0)
    assert row[ACTIVATION]["calls"] == row[GRADIENT]["calls"] == 160


def test_two_models_with_one_optimizer() -> None:
    """Each has its probe; their steps close alike."""
    models, workers = (network(), network()), (MemoryWorker(), MemoryWorker())
    optimizer = torch.optim.AdamW([*models[0].parameters(), *models[1].parameters()])
    scopes = [Scope(model, (optimizer,), worker=worker, every=1)
              for model, worker in zip(models, workers, strict=True)]
    for seed in range(3):
        backward(loss_of(models[0], seed) + loss_of(models[1], seed))
        optimizer.step()
        optimizer.zero_grad()
    for scope, worker in zip(scopes, workers, strict=True):
        scope.close()
        assert [record.step for record in worker.records] == [0, 1, 2]
        assert told(worker) == []
        assert worker.metrics(2)[GRADIENT]["calls"] == 1


def test_parameters_that_come_and_freeze() -> None:
    """A group added in the middle, layers frozen and thawed: each step has what there was to measure."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.AdamW(model[0].parameters())
    with Scope(model, (optimizer,), worker=worker, every=1):
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-2})
            model[0].requires_grad_(step not in (3, 4))
            backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
    assert told(worker) == []
    states = {step: {key[0] for key, row in worker.metrics(step).items()
                     if key[1] == "exp_avg" and row["calls"]} for step in range(6)}
    assert states[1] == {"0.weight"}
    assert states[2] == states[5] == {"0.weight", "2.weight"}
    assert [worker.metrics(step)[GRADIENT]["calls"] for step in range(6)] == [1, 1, 1, 0, 0, 1]


def test_a_pruned_layer_is_measured_with_what_it_multiplies() -> None:
    """The weight is a masked copy of the parameter, made anew in each forward."""
    model = network()
    prune.l1_unstructured(model[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]
    worker = trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    row = worker.metrics(3)["0.weight", "weight", "rowwise"]
    assert (row["elements"], row["zero_ratio"]) == (128, 0.5)
    assert told(worker) == []


def test_layers_that_came_later_are_named() -> None:
    """A head or an adapter put in after the probe: named with what to do, beside the layer that has gone."""
    model = network()
    optimizer, worker = torch.optim.SGD(model.parameters(), lr=0.1), MemoryWorker()
    with Scope(model, (optimizer,), worker=worker, every=1):
        model[2] = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4))
        backward(loss_of(model))
        optimizer.step()
    said = {event.name: event.text for event in told(worker)}
    assert set(said) == {"2", "2.0", "2.1"}
    assert said["2"] == "is no longer in the model"
    assert "came into the model after the probe" in said["2.0"]
    assert "attach again" in said["2.0"]


class Adapted(nn.Module):
    """A low-rank adapter around a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(16, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def replace_layer(model: nn.Sequential) -> None:
    model[2] = nn.Linear(16, 4)


def wrap_layer(model: nn.Sequential) -> None:
    model[2] = Adapted(model[2])


def add_layer(model: nn.Sequential) -> None:
    model.add_module("head", nn.Linear(4, 4))


def adapt_in_place(model: nn.Sequential) -> None:
    model[0].adapter = nn.Linear(8, 16)


def remove_layer(model: nn.Sequential) -> None:
    del model[2]


@pytest.mark.parametrize(("change", "names", "text"), [
    (replace_layer, {"2"}, "was replaced after the probe was attached"),
    (wrap_layer, {"2.down", "2.up"}, "came into the model after the probe"),
    (add_layer, {"head"}, "came into the model after the probe"),
    (adapt_in_place, {"0.adapter"}, "came into the model after the probe"),
    (remove_layer, {"2"}, "is no longer in the model"),
])
def test_a_change_of_the_model_is_told_whenever_it_comes(
    change: Callable[[nn.Sequential], None], names: set[str], text: str
) -> None:
    """In the middle of a run: with the next measured step, once, by name; nothing before it."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Scope(model, (optimizer,), worker=worker, every=2):
        for step in range(9):
            if step == 4:
                change(model)
            backward(loss_of(model))
            optimizer.step()
    events = told(worker)
    assert {event.name for event in events} == names
    assert len(events) == len(names)
    assert all(text in event.text and event.step == 4 for event in events)
    assert worker.metrics(8)[ACTIVATION]["calls"] == 1


def test_a_layer_that_is_in_the_model_elsewhere_is_neither_new_nor_gone() -> None:
    """A wrapper put around part of the model, as sharding and checkpointing do."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Scope(model, (optimizer,), worker=worker, every=1):
        for step in range(4):
            if step == 2:
                model[0] = nn.Sequential(model[0])
            backward(loss_of(model))
            optimizer.step()
    assert told(worker) == []
    assert worker.metrics(3)[ACTIVATION]["calls"] == 1


def test_any_name_can_be_listed() -> None:
    """Long and unprintable names of modules are cut and escaped, each still a name of its own."""
    names = ["a" * 300, "a" * 301, "new\nline", "sp ace é{}"]
    model, worker = nn.ModuleDict({name: nn.Linear(8, 8) for name in names}), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        x = torch.randn(3, 8)
        for layer in model.values():
            x = layer(x)
        backward(x.sum())
        scope.step(0)
    assert told(worker) == []
    found = {key[0] for key in worker.metrics(0)}
    assert len(found) == 2 * len(names)
    assert {"new\\nline", "new\\nline.weight", "sp ace é{}"} <= found
    assert max(map(len, found)) <= NAME_LIMIT


def test_long_lists_are_walked_through_once() -> None:
    """Token ids as a list of Python's: not once more for each of them."""
    looked: list[int] = []

    class Watched(list[int]):
        def __iter__(self) -> Any:
            for one in super().__iter__():
                looked.append(one)
                yield one

    x = torch.ones(2)
    assert list(tensors_in((Watched(range(200_000)), x))) == [x]
    assert len(looked) == 200_000


@dataclass
class Late:
    """An output with a field that nobody has set."""

    y: Tensor
    cache: Any = field(init=False)


def test_a_field_that_is_not_set_is_passed_over() -> None:
    """The fields that are set are looked through."""
    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return Late(super().forward(input))

    model, worker = nn.Sequential(Layer(8, 8)), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        backward(model(torch.randn(3, 8)).y.sum())
        scope.step(0)
    assert told(worker) == []
    assert worker.metrics(0)[GRADIENT]["elements"] == 24


def test_a_probe_may_be_attached_in_inference_mode() -> None:
    """Its sums can be added to all the same."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        scope = Scope(model, (optimizer,), worker=worker, every=1)
    with scope:
        backward(loss_of(model))
        optimizer.step()
    assert told(worker) == []
    assert worker.metrics(0)[ACTIVATION]["elements"] == 24


def test_a_closed_scope_keeps_nothing() -> None:
    """The loop may go on logging into it."""
    scope = Scope(network(), (), worker=MemoryWorker(), every=1)
    scope.close()
    for _ in range(3):
        scope.log(loss=torch.ones(()))
    assert scope._sentinels._losses == []


def test_a_forgotten_scope_is_closed(tmp_path: Path, spooled: Callable[..., Any], until: Any) -> None:
    """A notebook's cell runs again: model and scope of the first run go, its threads end, what had been
    measured is on disk and may be sent by the next attach."""
    for _ in range(3):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fp8scope.attach(model, optimizer, run="r", every=1, collector=OFFLINE, spool=tmp_path)
        for seed in range(3):
            backward(loss_of(model, seed))
            optimizer.step()
    del model, optimizer
    gc.collect()
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith("fp8scope")])
    assert [one.header.step for one in spooled(tmp_path, "r")] == [0, 1] * 3


def test_attention_that_calls_no_layer_is_listed() -> None:
    """`nn.MultiheadAttention` multiplies by the weights of its output layer without calling it."""
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    worker = MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        backward(model(torch.randn(2, 5, 16)).sum())
        scope.step(0)
    (event,) = told(worker)
    assert event.name == "self_attn.out_proj"
    assert "called past its hooks" in event.text
    assert ("linear1", "gradient", "rowwise") in worker.metrics(0)


@pytest.mark.parametrize("ends", [True, False])
def test_a_job_whose_steps_never_end_is_told(
    ends: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Attached without the optimizer, and `scope.step` never called: a line at the end says what to do."""
    model = network()
    scope = fp8scope.attach(model, run="r", collector=OFFLINE, spool=tmp_path)
    for _ in range(3):
        backward(loss_of(model))
        if ends:
            scope.step()
    scope.close()
    assert ("no step has ended" in caplog.text) != ends


def test_an_optimizer_without_hooks_is_refused() -> None:
    """One that never called its base's `__init__`: named before anything is attached; a second try works."""
    class Own(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups: list[dict[str, Any]] = []

    model = network()
    with pytest.raises(Invalid, match=r"'Own': must call torch\.optim\.Optimizer\.__init__"):
        fp8scope.attach(model, Own(), run="r", collector=OFFLINE)
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize("size", ["2", "1", "many"])
def test_a_probe_before_the_process_group_is_told(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a launched job each rank would become a run of its own: a line says what to call first."""
    monkeypatch.setenv("WORLD_SIZE", size)
    fp8scope.attach(network(), run="r", collector=OFFLINE, spool=tmp_path).close()
    assert ("call torch.distributed.init_process_group before attach" in caplog.text) == (size == "2")


class Sampler(nn.Module):
    """Hands out one output after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.again(x)
            yield self.head(x)


def test_a_model_that_is_a_generator() -> None:
    """Its layers run after its forward has returned, and belong to the step they run in."""
    model, worker = Sampler(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Scope(model, (optimizer,), worker=worker, every=1):
        for _ in range(3):
            backward(torch.cat(list(model(torch.randn(3, 8)))).sum())
            optimizer.step()
    assert [record.step for record in worker.records] == [0, 1, 2]
    for step in range(3):
        assert {row["calls"] for key, row in worker.metrics(step).items() if key[1] != "weight"} == {3}


def test_two_parts_with_an_optimizer_each() -> None:
    """A generator and a critic that are called by themselves: one step for both."""
    model, worker = nn.ModuleDict({"make": nn.Linear(4, 8), "judge": nn.Linear(8, 1)}), MemoryWorker()
    make, judge = (torch.optim.Adam(part.parameters()) for part in model.values())
    with Scope(model, (make, judge), worker=worker, every=1):
        for _ in range(4):
            made = model["make"](torch.randn(3, 4))
            backward((model["judge"](torch.randn(3, 8)) - model["judge"](made.detach())).sum())
            judge.step()
            backward(model["judge"](model["make"](torch.randn(3, 4))).sum())
            make.step()
    assert [record.step for record in worker.records] == [0, 1, 2, 3]
    for step in range(4):
        calls = {key[0]: row["calls"] for key, row in worker.metrics(step).items() if key[1] == "activation"}
        assert calls == {"make": 2, "judge": 3}


@pytest.mark.parametrize("whole", [True, False])
def test_optimizers_inside_backward(whole: bool) -> None:
    """One for each parameter, stepping once its gradient is there: a step is a forward and its backward."""
    model, worker = network(), MemoryWorker()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    with Scope(model, tuple(optimizers.values()), worker=worker, every=1):
        for seed in range(3):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
            backward((model(x) if whole else model[2](model[1](model[0](x)))).sum())
    assert [record.step for record in worker.records] == [0, 1, 2]
    for number in range(3):
        assert {row["calls"] for row in worker.metrics(number).values()} == {1}
        assert worker.sentinels(number)["grad_norm"] > 0
