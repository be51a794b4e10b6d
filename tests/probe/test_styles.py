"""Ways of writing a training loop: each has the numbers of the plain one, which has none of them.

Compiled jobs are in test_compiled.py, sharded ones in test_sharded.py and test_tensor_parallel.py, several
micro-batches (P11) in test_scope.py, layers that are called past their hooks in test_hooks.py.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fp8scope.scope import Scope
from fp8scope.sums import StepRecord
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid

STEPS = 3
MAGNITUDES = ("amax", "amin_nonzero", "rms", "mean_abs", "scale_min", "scale_max", "scale_log2_mean")
PRODUCTS = ("gemm_error", "wgrad_row_error_max", "channel_outlier_ratio")
"""Of the worst call, on a sample of its rows."""
TURNS = ("wgrad_row_error_max",)
"""Layers take turns, by a count that begins with the probe."""


class Block(nn.Module):
    """Two layers with an activation between them, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


def network(block: type[Block] = Block) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(block(), block())


def batch(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


Forward = Callable[[nn.Module, Tensor], Tensor]
"""A micro-batch -> the model's output."""


def called(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y


def trained(
    model: nn.Module, forward: Forward = called, *, steps: int = STEPS, accumulate: int = 1,
    after: Callable[[nn.Module], None] = lambda model: None, optimizer: torch.optim.Optimizer | None = None,
    first: int = 0, every: int = 1,
) -> MemoryWorker:
    """The loop; `after` happens after each step, before the next forward."""
    worker = MemoryWorker()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with Scope(model, (optimizer,), worker=worker, every=every, start_step=first):
        for step in range(first, first + steps):
            for part in batch(step).chunk(accumulate):
                torch.autograd.backward(loss_of(forward(model, part)) / accumulate)
            optimizer.step()
            optimizer.zero_grad()
            after(model)
    return worker


def assert_same(
    found: MemoryWorker, wanted: MemoryWorker, *, without: tuple[str, ...] = (),
    orientations: tuple[str, ...] = ("rowwise", "columnwise"),
) -> None:
    """Every number of every series and every sentinel of every step; nothing went wrong or unobserved."""
    assert [r.step for r in found.records] == [r.step for r in wanted.records]
    for record in wanted.records:
        assert found.record(record.step).events == ()
        one, other = found.metrics(record.step), wanted.metrics(record.step)
        assert one.keys() == other.keys()
        for key, values in other.items():
            expected = {name: value for name, value in values.items() if name not in without}
            actual = {name: value for name, value in one[key].items() if name not in without}
            if key[2] not in orientations:
                expected, actual = ({"elements": row["elements"]} for row in (expected, actual))
            assert actual == pytest.approx(expected, rel=1e-5, abs=1e-9), (record.step, key)
        assert found.sentinels(record.step) == pytest.approx(wanted.sentinels(record.step), rel=1e-5)


def kept(*records: StepRecord) -> MemoryWorker:
    """A worker that has seen only these."""
    worker = MemoryWorker()
    worker.records += records
    return worker


@pytest.fixture(scope="module")
def plain() -> MemoryWorker:
    return trained(network())


def test_gradient_accumulation(plain: MemoryWorker) -> None:
    """Four micro-batches a step: four calls, the numbers of one."""
    found = trained(network(), accumulate=4)
    assert found.metrics(0)["0.up", "gradient", "rowwise"]["calls"] == 4
    smallest = "amin_nonzero"  # of sums that are added in another order
    assert_same(found, plain, without=("calls", smallest, *PRODUCTS), orientations=("rowwise",))


def whole(model: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    y: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
    return y


def by_layer(model: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    x = x.requires_grad_()
    for block in model.children():
        up: Tensor = checkpoint(block.up, x, use_reentrant=reentrant)
        x = x + checkpoint(block.down, up.relu(), use_reentrant=reentrant)
    return x


def in_segments(model: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    y: Tensor = checkpoint_sequential(  # type: ignore[no-untyped-call]
        model, 2, x.requires_grad_(), use_reentrant=reentrant)
    return y


def by_parts(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.children():
        x = block(x)
    return x


def past_the_hooks(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model.forward(x)
    return y


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("way", [by_parts, past_the_hooks, partial(whole, reentrant=True)])
@pytest.mark.parametrize("cadence", [1, 2])
def test_a_model_that_is_never_called_as_a_whole(way: Forward, accumulate: int, cadence: int) -> None:
    """Its steps close where they would: at the first forward of one of its layers after the optimizer."""
    found, wanted = (trained(network(), forward, steps=5, accumulate=accumulate, every=cadence)
                     for forward in (way, called))
    assert [r.step for r in found.records if r.tables is not None] == list(range(0, 5, cadence))
    assert_same(found, wanted)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", [whole, by_layer, in_segments])
def test_activation_checkpointing(plain: MemoryWorker, way: Callable[..., Tensor], reentrant: bool) -> None:
    """What is computed twice is measured once, wherever the job cuts."""
    assert_same(trained(network(), partial(way, reentrant=reentrant)), plain)


class Casting(nn.Linear):
    """What autocast makes of a linear, written out."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return linear(input.bfloat16(), self.weight.bfloat16(), bias)


class CastingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.__class__ = self.down.__class__ = Casting


def test_autocast() -> None:
    """The numbers of casts that are written out."""
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return called(model, x)

    assert_same(trained(network(), forward), trained(network(CastingBlock)))


def test_gradient_scaler(plain: MemoryWorker) -> None:
    """P10: gradients are 65536 times as large, and nothing that is relative changes, nor the norm."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with Scope(model, (optimizer,), worker=worker, every=1):
        for step in range(STEPS):
            torch.autograd.backward(scaler.scale(loss_of(model(batch(step)))))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for step in range(STEPS):
        factors = [worker.metrics(step)["0.up", "gradient", "rowwise"][name]
                   / plain.metrics(step)["0.up", "gradient", "rowwise"][name] for name in ("amax", "rms")]
        assert factors == pytest.approx([65536.0] * 2, rel=1e-5)
    assert_same(worker, plain, without=MAGNITUDES)


class InPlace(Block):
    """The same arithmetic, over its own inputs and outputs."""

    def forward(self, x: Tensor) -> Tensor:
        up = torch.relu_(self.up(x))
        y: Tensor = self.down(up).add_(x)
        return y


class Overwriting(Block):
    """What goes into a layer is overwritten as soon as it has been used."""

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            y = super().forward(input.clone())
            input.data.zero_()
            return y

    def __init__(self) -> None:
        super().__init__()
        self.up.__class__ = self.down.__class__ = Overwriting.Layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x.clone()).relu().clone())
        return y


@pytest.mark.parametrize("block", [InPlace, Overwriting])
def test_operations_in_place(plain: MemoryWorker, block: type[Block]) -> None:
    """A layer is measured by what it was given, and its output may be changed in place."""
    assert_same(trained(network(block)), plain)


class Nested(Block):
    """Inputs by keyword and inside of containers, outputs in them."""

    class Layer(nn.Linear):
        def forward(self, input: Any) -> Any:
            return {"y": [super().forward(input["x"]), None]}

    def __init__(self) -> None:
        super().__init__()
        self.up.__class__ = self.down.__class__ = Nested.Layer

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(input={"x": x})["y"][0]
        y: Tensor = x + self.down({"x": up.relu()})["y"][0]
        return y


def test_nested_inputs_and_outputs(plain: MemoryWorker) -> None:
    """Containers change nothing."""
    assert_same(trained(network(Nested)), plain)


def test_shared_modules() -> None:
    """One layer called twice has the sums of two layers with the same weight, called once each."""
    def made(shared: bool) -> MemoryWorker:
        torch.manual_seed(0)
        first = nn.Linear(16, 16, bias=False)
        second = first if shared else copy.deepcopy(first)
        model, worker = nn.Sequential(first, nn.Tanh(), second), MemoryWorker()
        with Scope(model, (), worker=worker, every=1) as scope:
            torch.autograd.backward(loss_of(model(batch(0))))
            scope.step(0)
        return worker

    record, apart = made(True).record(0), made(False).record(0)
    assert record.tables is not None
    assert record.layout is not None
    assert apart.tables is not None
    assert apart.layout is not None
    rows = {one.key: apart.tables.row(i) for i, one in enumerate(apart.layout.series)}
    for i, one in enumerate(record.layout.series):
        found, wanted = record.tables.row(i), rows[one.key]
        if one.role != "weight":
            wanted.add(rows["2", *one.key[1:]])
        assert torch.equal(found.counts, wanted.counts), one
        assert torch.equal(found.histogram, wanted.histogram), one
        torch.testing.assert_close(found.sums, wanted.sums, rtol=1e-6, atol=0.0)
        assert torch.equal(found.maxes[:4], wanted.maxes[:4]), one


def evaluate(model: nn.Module) -> None:
    model.eval()
    model(torch.full((50, 16), 1e4))
    with torch.no_grad():
        model(torch.full((50, 16), 1e4))
    with torch.inference_mode():
        model(torch.full((50, 16), 1e4))
    model.train()
    with torch.no_grad():
        model(torch.full((50, 16), 1e4))


def duplicate(model: nn.Module) -> None:
    twins: list[Any] = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins.append(torch.load(file, weights_only=False))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    for twin in twins:
        assert list(twin.state_dict()) == list(model.state_dict())
        twin(torch.full((50, 16), 1e4)).sum().backward()


def attach_again(model: nn.Module) -> None:
    with pytest.raises(Invalid, match="has a probe already"):
        Scope(model, (), worker=MemoryWorker(), every=1)
    with pytest.raises(Invalid, match="has a probe already"):
        Scope(next(model.children()), (), worker=MemoryWorker(), every=1)


@pytest.mark.parametrize("between", [evaluate, duplicate, attach_again])
def test_what_happens_between_steps(plain: MemoryWorker, between: Callable[[nn.Module], None]) -> None:
    """Evaluation, copies (P9) and a second attach leave no trace in any step."""
    assert_same(trained(network(), after=between), plain)


def test_detach_and_attach_again(plain: MemoryWorker) -> None:
    """A second probe measures from where the first one stopped; unobserved steps are just trained."""
    def advance(model: nn.Module, step: int) -> None:
        torch.autograd.backward(loss_of(model(batch(step))))
        optimizer.step()
        optimizer.zero_grad()

    model, first, second = network(), MemoryWorker(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Scope(model, (optimizer,), worker=first, every=1):
        advance(model, 0)
    advance(model, 1)
    with Scope(model, (optimizer,), worker=second, every=1, start_step=2):
        advance(model, 2)
    first.records += second.records
    assert [record.step for record in first.records] == [0, 2]
    for record in (first.records[0], first.records[-1]):
        record_of = {one.step: one for one in plain.records}
        assert_same(kept(record), kept(record_of[record.step]), without=TURNS)


def test_resume() -> None:
    """Saved after two steps and loaded into a new model and optimizer: steps 2 and 3 as if never stopped."""
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = made()
    wanted = trained(model, optimizer=optimizer, steps=4)
    model, optimizer = made()
    before = trained(model, optimizer=optimizer, steps=2)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, states = torch.load(file)
    model, optimizer = made()
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    after = trained(model, optimizer=optimizer, steps=2, first=2)
    before.records += after.records
    twins = ("update_error", "update_norm_ratio")  # compare with states that have run beside these ones
    assert_same(before, wanted, without=(*twins, *TURNS))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(wrap: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module:
    for block in model.children():
        for name, layer in list(block.named_children()):
            block.set_submodule(name, wrap(layer))
    return model


def shard(model: nn.Module) -> nn.Module:
    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    return model


def compiled(layer: nn.Module) -> nn.Module:
    one: nn.Module = torch.compile(layer, backend="eager")  # type: ignore[assignment]
    return one


class Wrapper(nn.Module):
    """As frameworks wrap a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": Wrapper,
    "twice": lambda model: Wrapper(Wrapper(model)),
    "DDP": DistributedDataParallel,
    "DDP of a wrapper": lambda model: DistributedDataParallel(Wrapper(model)),
    "checkpoint_wrapper": checkpoint_wrapper,
    "checkpoint_wrapper by layer": partial(wrapped, checkpoint_wrapper),
    "FSDP2": shard,
    "FSDP1": partial(FullyShardedDataParallel, sharding_strategy=ShardingStrategy.NO_SHARD,
                     use_orig_params=True, device_id=torch.device("cpu")),
    "compiled by layer": partial(wrapped, compiled),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by Dynamo, of its own classes
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", list(WRAPPED))
def test_p6_wrappers_change_no_name_and_no_number(plain: MemoryWorker, name: str) -> None:
    """P6: the same layer has one name, bare or in `module.`, `_orig_mod.` and the like, and its numbers."""
    torch._dynamo.reset()
    assert_same(trained(WRAPPED[name](network())), plain)
