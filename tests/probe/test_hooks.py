"""What hooks see and what they leave alone: nested inputs, copies, recomputation, NaNs, empty batches."""

import copy
import gc
import io
import math
import multiprocessing
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from fp8scope.nested import tensors_in
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid


def watched(model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[Scope, MemoryWorker]:
    worker = MemoryWorker()
    return Scope(model, optimizers, worker=worker, every=1), worker


def roles(worker: MemoryWorker, name: str, step: int = 0) -> set[tuple[str, str]]:
    return {key[1:] for key in worker.metrics(step) if key[0] == name}


BOTH = {("activation", "rowwise"), ("activation", "columnwise"),
        ("gradient", "rowwise"), ("gradient", "columnwise")}


def test_a_plain_linear_is_measured_as_a_what_if() -> None:
    """Activation and gradient in both orientations, the weight in blocks, and the error of the product."""
    model = nn.Sequential(nn.Linear(130, 67))
    scope, worker = watched(model)
    x = torch.randn(3, 5, 130)
    model(x).square().sum().backward()
    scope.step(0)
    metrics = worker.metrics(0)
    assert roles(worker, "0") == BOTH
    assert metrics["0", "activation", "rowwise"]["elements"] == 15 * 130
    assert metrics["0", "gradient", "columnwise"]["elements"] == 15 * 67
    assert metrics["0", "activation", "rowwise"]["amax"] == x.abs().max().item()
    assert metrics["0.weight", "weight", "rowwise"]["elements"] == 130 * 67
    assert 0.02 < metrics["0", "activation", "rowwise"]["gemm_error"] < 0.06
    layout = worker.record(0).layout
    assert layout is not None
    assert {s.live for s in layout.series} == {False}
    assert {s.scaling for s in layout.series if s.role == "weight"} == {"block 128x128"}


def test_training_is_not_changed_by_the_probe() -> None:
    """Loss, gradients and updated weights are the same to the bit with and without a probe."""
    def train(probe: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        scope = watched(model, optimizer)[0] if probe else None
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(6, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if scope is not None:
            scope.close()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


def test_p2_shared_module_has_one_row_with_all_its_calls() -> None:
    """P2: one module used twice is one series with calls=2; the underflow of the first, tiny call is not lost
    to the second one, which has none."""
    shared = nn.Linear(128, 128, bias=False)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with torch.no_grad():
        shared.weight.zero_()[:, 0] = 2.0
    scope, worker = watched(model)
    x = torch.full((2, 128), 1e-6)
    x[:, 0] = 1.0
    assert (model[:2](x) == 2.0).all()  # what the second call is given
    (model(x) + 0).sum().backward()
    scope.step(0)
    metrics = worker.metrics(0)
    row = metrics["0", "activation", "rowwise"]
    assert (row["calls"], row["elements"], row["amax"]) == (3, 3 * 2 * 128, 2.0)
    assert row["underflow_ratio"] == pytest.approx(2 * 127 / (3 * 128))  # two of the calls are tiny
    assert metrics["0", "gradient", "rowwise"]["calls"] == 2
    assert not [key for key in metrics if key[0].startswith("2")]
    assert metrics["0.weight", "weight", "rowwise"]["calls"] == 1
    layout = worker.record(0).layout
    assert layout is not None
    assert next(s for s in layout.series if s.role == "activation").aliases == ("2",)


def test_p2_tied_parameters_have_one_name() -> None:
    """P2: a weight that two modules share is measured once and lists its other name; so are its states."""
    model = nn.ModuleDict({"embed": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer, worker = torch.optim.Adam(model.parameters()), MemoryWorker()
    scope = Scope(model, (optimizer,), worker=worker, every=1)
    model["head"](model["embed"](torch.arange(5))).sum().backward()
    optimizer.step()
    scope.step(0)
    layout = worker.record(0).layout
    assert layout is not None
    tied = [s for s in layout.series if s.role not in ("activation", "gradient")]
    assert {s.role for s in tied} == {"weight", "exp_avg", "exp_avg_sq"}
    for one in tied:
        assert (one.name, one.aliases, one.module) == ("embed.weight", ("head.weight",), "head")


@dataclass
class Output:
    """What a model may return."""

    y: Tensor | None
    rest: tuple[Any, ...] = ()


class Nested(nn.Linear):
    """A linear that returns its output inside `wrap`."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__(8, 8)
        self.wrap = wrap

    def forward(self, input: Tensor) -> Any:
        return self.wrap(super().forward(input))


class Pair(NamedTuple):
    """Another thing that a model may return."""

    y: Tensor
    more: Any = None


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda y: {"x": y}, lambda out: out["x"]),
    "list": (lambda y: [None, [y]], lambda out: out[1][0]),
    "tuple with None": (lambda y: (y, None), lambda out: out[0]),
    "dataclass": (lambda y: Output(y=y, rest=(y,)), lambda out: out.y),
    "dataclass with None": (lambda y: Output(y=None, rest=(y, {"z": y})), lambda out: out.rest[0]),
    "named tuple": (lambda y: Pair(y), lambda out: out.y),
    "ModelOutput": (lambda y: CausalLMOutput(logits=y), lambda out: out.logits),
}


@pytest.mark.parametrize("name", list(WRAPS))
def test_p4_nested_outputs_have_their_gradient_measured_once(name: str) -> None:
    """P4: the gradient of an output inside a dict, list, tuple or dataclass is recorded, and once."""
    wrap, unwrap = WRAPS[name]
    model = nn.Sequential(Nested(wrap))
    scope, worker = watched(model)
    torch.autograd.backward(unwrap(model(torch.randn(3, 8))).sum())
    scope.step(0)
    assert roles(worker, "0") == BOTH
    for role in ("activation", "gradient"):
        row = worker.metrics(0)["0", role, "rowwise"]
        assert (row["calls"], row["elements"]) == (1, 24)
    assert worker.record(0).events == ()


def test_p4_each_of_several_outputs_is_measured_once() -> None:
    """P4: two tensors in one output are two gradients of one series, not four and not one."""
    model = nn.Sequential(Nested(lambda y: {"a": y * 2, "b": [y.relu(), (y.detach(), None)]}))
    scope, worker = watched(model)
    out = model(torch.randn(3, 8))
    torch.autograd.backward((out["a"] + out["b"][0]).sum())
    scope.step(0)
    row = worker.metrics(0)["0", "gradient", "rowwise"]
    assert (row["calls"], row["elements"]) == (2, 48)


class Unpacking(nn.Linear):
    """A linear whose input comes inside of something."""

    def forward(self, input: Any) -> Tensor:
        return super().forward(next(tensors_in(input)))


@pytest.mark.parametrize("call", [
    lambda layer, x: layer(input=x), lambda layer, x: layer({"x": x}), lambda layer, x: layer([None, (x,)]),
    lambda layer, x: layer(input=Output(y=x)), lambda layer, x: layer(CausalLMOutput(logits=x))])
def test_p4_inputs_by_keyword_and_in_containers_are_seen(call: Callable[[Any, Tensor], Tensor]) -> None:
    """P4: `layer(input=x)` has no positional input and is measured all the same, once; so are dicts."""
    model = nn.ModuleList([Unpacking(8, 8)])
    scope, worker = watched(model)
    torch.autograd.backward(call(model[0], torch.randn(3, 8)).sum())
    scope.step(0)
    assert roles(worker, "0") == BOTH
    for role in ("activation", "gradient"):
        row = worker.metrics(0)["0", role, "rowwise"]
        assert (row["calls"], row["elements"]) == (1, 24)


def test_p4_what_has_no_gradient_is_listed() -> None:
    """P4: a layer without an observable gradient, and one that never ran, are named; neither reads 0."""
    model = nn.ModuleDict({"blind": Nested(lambda y: None), "idle": nn.Linear(8, 8), "seen": nn.Linear(8, 8)})
    scope, worker = watched(model)
    model["blind"](torch.randn(3, 8))
    model["seen"](torch.randn(3, 8)).sum().backward()
    scope.step(0)
    told = {event.name: event.text for event in worker.record(0).events if event.kind == "unobserved"}
    assert set(told) == {"blind", "idle"}
    assert "gradient not observed" in told["blind"]
    assert "did not run" in told["idle"]
    assert ("gradient", "rowwise") not in roles(worker, "blind")
    assert roles(worker, "idle") == set()


def test_p8_evaluation_and_no_grad_leave_nothing() -> None:
    """P8: neither `no_grad` in training mode nor `eval` counts; the step counter does not move."""
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope, worker = watched(model, optimizer)
    left: list[weakref.ref[Tensor]] = []
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
        step = scope.current
        with torch.no_grad():
            left += [weakref.ref(y := model(x := torch.randn(50, 8))), weakref.ref(x)]
        model.eval()
        left += [weakref.ref(y := model(x := torch.randn(50, 8))), weakref.ref(x)]
        del x, y
        assert scope.current == step
        model.train()
    assert scope.current == 1
    gc.collect()
    assert [one() for one in left] == [None] * 8  # nothing of them is kept
    scope.close()
    assert [record.step for record in worker.records] == [0, 1]
    for step in (0, 1):
        row = worker.metrics(step)["0", "activation", "rowwise"]
        assert (row["calls"], row["elements"]) == (1, 24)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("in_situ", [True, False])
def test_recomputation_is_not_counted(reentrant: bool, in_situ: bool) -> None:
    """Under both kinds of activation checkpointing each tensor is seen once, with its gradient."""
    layer: nn.Module = Reporting(128, 128) if in_situ else nn.Linear(128, 128)
    model = nn.Sequential(layer, nn.ReLU())
    scope, worker = watched(model)
    for _ in range(2):
        x = torch.randn(3, 128, requires_grad=True)
        y: Tensor = checkpoint(model, x, use_reentrant=reentrant)
        torch.autograd.backward(y.sum())
    scope.step(0)
    metrics = worker.metrics(0)
    assert metrics["0", "activation", "rowwise"]["calls"] == 2
    assert metrics["0", "gradient", "rowwise"]["calls"] == 2


class Report(torch.autograd.Function):
    """y = x W^T that tells an observer what went in, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, observer: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.observer = observer
        if observer is not None and observer.active:
            scales = torch.full((x.shape[0], 1), 2.0**-6)
            observer.tensor("activation", "rowwise", x, scales, scaling="tile 1x128", policy="delayed")
            observer.tensor("weight", "rowwise", weight, torch.ones(1, 1), scaling="block 128x128",
                            policy="current")
            observer.gemm(x, weight, scales, torch.ones(1, 1))
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        if ctx.observer is not None and ctx.observer.active:
            ctx.observer.tensor("gradient", "rowwise", dy, torch.ones(1, 1), scaling="tile 1x128",
                                policy="current")
        return dy @ weight, dy.t() @ x, None


class Reporting(nn.Linear):
    """A layer that reports by itself."""

    observer: Any = None

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = Report.apply(input, self.weight, self.observer)  # type: ignore[no-untyped-call]
        return y


def test_in_situ_layers_are_measured_with_their_own_scales() -> None:
    """The scales a layer reports decide saturation and staleness; its series are live, with their policy."""
    model = nn.Sequential(Reporting(128, 128))
    scope, worker = watched(model)
    x = torch.ones(2, 128)
    x[0, 0] = 28.0  # 448 x 2^-6 = 7: two bits over the largest code
    for _ in range(2):
        model(x).sum().backward()
    scope.step(0)
    row = worker.metrics(0)["0", "activation", "rowwise"]
    assert row["scale_staleness_bits"] == 2.0
    assert row["saturation_ratio"] == 2 / 512
    assert row["scale_max"] == 2.0**-6
    assert row["calls"] == 2
    assert worker.metrics(0)["0.weight", "weight", "rowwise"]["calls"] == 1
    assert row["gemm_error"] > 0
    assert worker.sentinels(0)["scale_staleness_bits"] == 2.0
    layout = worker.record(0).layout
    assert layout is not None
    assert {(s.role, s.policy, s.live) for s in layout.series} == {
        ("activation", "delayed", True), ("gradient", "current", True), ("weight", "current", True)}
    assert model[0].observer is not None
    scope.detach()
    assert model[0].observer is None


def test_p9_copies_are_inert() -> None:
    """P9: a hooked model can be copied, saved and pickled; the copy's forwards are not recorded."""
    model = nn.Sequential(nn.Linear(8, 8), Reporting(8, 8))
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope, worker = watched(model, optimizer)
    assert list(model.state_dict()) == keys
    ema = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    loaded = pickle.loads(pickle.dumps(model))
    copy.deepcopy(optimizer)
    for copied in (ema, loaded):
        assert copied[1].observer is None
        copied(torch.randn(3, 8)).sum().backward()
        assert list(copied.state_dict()) == keys
        optimizer.step()
    model(torch.randn(5, 8)).sum().backward()
    scope.step(0)
    assert worker.metrics(0)["0", "activation", "rowwise"]["elements"] == 40


def run_copy(model: nn.Module, seen: Any) -> None:
    """In a process of its own: a step of what was handed over."""
    model(torch.ones(2, 8)).sum().backward()
    hooks = [hook for layer in model.modules() for hook in layer._forward_pre_hooks.values()]
    seen.put((sorted(model.state_dict()), len(hooks)))


def test_p9_a_hooked_model_can_be_handed_to_a_spawned_process() -> None:
    """P9: as data loaders and launchers do; there it trains without a probe, with the same keys."""
    model = nn.Sequential(nn.Linear(8, 8), Reporting(8, 8))
    keys = sorted(model.state_dict())
    scope, worker = watched(model)
    context = multiprocessing.get_context("spawn")
    seen = context.SimpleQueue()
    child = context.Process(target=run_copy, args=(model, seen))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    found, _ = seen.get()
    assert found == keys
    model(torch.randn(5, 8)).sum().backward()
    scope.step(0)
    assert worker.metrics(0)["0", "activation", "rowwise"]["elements"] == 40


def test_an_attribute_of_that_name_is_left_alone() -> None:
    """A module whose `observer` means something else keeps it, and is measured as a what-if."""
    layer = nn.Linear(8, 8)
    layer.observer = "telescope"  # type: ignore[assignment]
    model = nn.Sequential(layer)
    scope, worker = watched(model)
    model(torch.randn(3, 8)).sum().backward()
    scope.step(0)
    scope.close()
    assert layer.observer == "telescope"
    assert roles(worker, "0") == BOTH


POISON = {"one NaN": (math.nan, 1, 1), "one Inf": (math.inf, 1, 1), "all NaN": (math.nan, 24, 24),
          "huge": (1e16, 24, 0)}


@pytest.mark.parametrize("name", list(POISON))
def test_p12_bad_gradients_are_recorded_not_raised(name: str) -> None:
    """P12: NaN, Inf and huge gradients are counted in their row and in the sentinel; training goes on."""
    value, elements, bad = POISON[name]
    model = nn.Sequential(nn.Linear(4, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scope, worker = watched(model, optimizer)
    gradient = torch.ones(3, 8)
    gradient.view(-1)[:elements] = value
    model(torch.randn(3, 4)).backward(gradient)
    optimizer.step()
    scope.step(0)
    row = worker.metrics(0)["0", "gradient", "rowwise"]
    assert row["nan_count"] + row["inf_count"] == bad
    assert ("rms" in row) == (bad < 24)
    assert (worker.sentinels(0)["nonfinite_count"] > 0) == (bad > 0)
    assert [event for event in worker.record(0).events if event.kind == "probe_error"] == []


def test_q9_empty_batches_have_a_count_and_no_ratio() -> None:
    """Q9: a batch without rows is one call with 0 elements; no ratio is made of it."""
    model = nn.Sequential(nn.Linear(128, 8))
    scope, worker = watched(model)
    model(torch.zeros(0, 128, requires_grad=True)).sum().backward()
    scope.step(0)
    row = worker.metrics(0)["0", "activation", "rowwise"]
    assert (row["elements"], row["calls"]) == (0, 1)
    assert "underflow_ratio" not in row
    assert "distortion" not in row


def test_q9_an_expert_without_tokens_is_missing_for_that_step() -> None:
    """Q9: a layer that ran before and not in this step keeps its row, without values."""
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    scope, worker = watched(model)
    for step, experts in enumerate([(0, 1), (0,)]):
        sum(model[i](torch.randn(3, 8)).sum() for i in experts).backward()
        scope.step(step)
    row = worker.metrics(1)["1", "activation", "rowwise"]
    assert (row["calls"], row["elements"]) == (0, 0)
    assert "underflow_ratio" not in row
    assert "amax" not in row


class Experts(nn.Module):
    """Two experts and a router that sends all tokens to the first, or each to its own."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.skips = skips

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (where == number).nonzero().flatten()
            if len(mine) or not self.skips:
                out = out.index_add(0, mine, expert(x[mine]))
        return out


@pytest.mark.parametrize("skips", [True, False])
def test_q9_an_expert_that_gets_no_token(skips: bool) -> None:
    """Q9: not called or called with no rows: a count of 0 and no ratio in that step; over all its
    micro-batches the numbers are those of the tokens that there were."""
    model = Experts(skips=skips)
    scope, worker = watched(model)
    x = torch.randn(6, 8)
    for wheres in ([[0] * 6], [[0] * 6, [0, 1, 0, 1, 0, 1]]):
        for where in wheres:
            model(x, torch.tensor(where)).sum().backward()
        scope.step()
    if skips:
        assert ("experts.1", "activation", "rowwise") not in worker.metrics(0)
    else:
        row = worker.metrics(0)["experts.1", "activation", "rowwise"]
        assert row["elements"] == 0
        assert not {"underflow_ratio", "distortion", "rms", "amax", "gemm_error"} & set(row)
    row = worker.metrics(1)["experts.1", "activation", "rowwise"]
    assert (row["elements"], row["amax"]) == (24, x[1::2].abs().max().item())
    assert row["rms"] == pytest.approx(x[1::2].square().mean().sqrt().item())
    assert [e.text for record in worker.records for e in record.events if e.kind == "probe_error"] == []


@pytest.mark.parametrize("view", [lambda x: x[:, :, 10:15, :], lambda x: x.transpose(1, 2), lambda x: x[::2]])
def test_q12_an_input_that_is_a_view_measures_as_its_copy(view: Callable[[Tensor], Tensor]) -> None:
    """Q12: slices and transposes of four dimensions, in both orientations, which the series state."""
    base, found = torch.randn(2, 3, 20, 160), []
    for x in (view(base), view(base).contiguous()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(160, 16))
        scope, worker = watched(model)
        model(x).square().sum().backward()
        scope.step(0)
        found.append(worker.metrics(0))
    assert found[0] == found[1]
    assert {key[1:] for key in found[0] if key[0] == "0"} == BOTH


def test_q2_a_weight_of_zeros_makes_no_nan() -> None:
    """Q2: LoRA's second matrix begins at zero: a number, or none, but never NaN."""
    model = nn.Sequential(nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False))
    nn.init.zeros_(model[1].get_parameter("weight"))
    scope, worker = watched(model)
    for _ in range(2):
        (model(torch.randn(6, 64)) + 1).square().sum().backward()
    scope.step(0)
    metrics = worker.metrics(0)
    assert metrics["1.weight", "weight", "rowwise"]["zero_block_count"] == 1
    assert metrics["0", "gradient", "rowwise"]["underflow_ratio"] == 0.0  # all zeros
    assert [key for key, row in metrics.items() if any(math.isnan(value) for value in row.values())] == []


def test_a_fault_in_the_probe_is_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception inside a hook reaches no training code; it becomes an event with its count."""
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("fp8scope.watch.round_trip", broken)
    model = nn.Sequential(nn.Linear(8, 8))
    scope, worker = watched(model)
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
    scope.step(0)
    (event,) = [event for event in worker.record(0).events if event.kind == "probe_error"]
    assert (event.name, event.text) == ("0", "RuntimeError: out of luck (4 times)")


def test_a_layer_called_past_its_hooks_is_listed() -> None:
    """`layer.forward(x)` runs no hook: the layer is named as one that did not run, and has no numbers."""
    model = nn.ModuleDict({"direct": nn.Linear(8, 8), "called": nn.Linear(8, 8)})
    scope, worker = watched(model)
    model["called"](model["direct"].forward(torch.randn(3, 8))).sum().backward()
    scope.step(0)
    (event,) = worker.record(0).events
    assert (event.kind, event.name) == ("unobserved", "direct")
    assert "did not run" in event.text
    assert roles(worker, "direct") == set()
    assert roles(worker, "called") == BOTH


def test_two_attaches_are_refused_until_detached() -> None:
    """A model has one probe; after `detach` nothing of it is left and another may come."""
    model = nn.Sequential(nn.Linear(8, 8))
    scope, worker = watched(model)
    with pytest.raises(Invalid, match="has a probe already"):
        watched(model)
    scope.detach()
    model(torch.randn(3, 8)).sum().backward()
    scope.step(0)
    assert worker.metrics(0) == {}
    assert not model[0]._forward_pre_hooks
    assert not model[0]._forward_hooks
    watched(model)


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_is_measured_by_what_its_own_product_gets_and_gives(first: bool) -> None:
    """Whether the job's own hooks, which double input and output, were there before the probe or not."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))

    def double(*given: Any) -> Any:
        return 2 * given[-1] if isinstance(given[-1], Tensor) else (2 * given[-1][0],)

    def hook() -> None:
        model[0].register_forward_pre_hook(double)
        model[0].register_forward_hook(double)

    if first:
        hook()
    scope, worker = watched(model)
    if not first:
        hook()
    x = torch.rand(3, 8)
    model(x).sum().backward()
    scope.step(0)
    metrics = worker.metrics(0)
    assert metrics["0", "activation", "rowwise"]["amax"] == 2 * x.max().item()
    assert metrics["0", "gradient", "rowwise"]["amax"] == 2.0


class Halving(nn.Linear):
    """Halves its input in place when it has used it."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input.clone())
        input.data.mul_(0.5)
        return y


@pytest.mark.parametrize(("kind", "hooks"), [(nn.Linear, 1), (Reporting, 1), (Halving, 2)])
def test_only_a_layer_that_may_change_its_input_has_two_hooks(kind: type[nn.Linear], hooks: int) -> None:
    """Off cadence each call of a hook is paid for; all three are measured by what they were given."""
    model = nn.Sequential(kind(8, 8))
    scope, worker = watched(model)
    assert len(model[0]._forward_hooks) + len(model[0]._forward_pre_hooks) == hooks
    x = torch.rand(3, 8)
    largest = x.max().item()
    model(x).sum().backward()
    scope.step(0)
    assert worker.metrics(0)["0", "activation", "rowwise"]["amax"] == largest
    scope.close()
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_probe_on_a_part_is_a_probe() -> None:
    """A model that holds an attached layer is refused, though that has no pre-hook."""
    layer = nn.Linear(8, 8)
    watched(nn.Sequential(layer))
    with pytest.raises(Invalid, match="has a probe already"):
        watched(nn.ModuleList([layer]))
