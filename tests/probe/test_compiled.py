"""Jobs under `torch.compile`: the numbers of the plain run, no graph break, no graph compiled twice."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.commands import Command, SetPrecision
from fp8scope_trainer.history import advance_histories
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # by Dynamo, of its own classes
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # by Dynamo, of inputs with a history
    pytest.mark.filterwarnings("ignore:None of the inputs"),  # by checkpointing, in evaluation
]

Call = Callable[[Tensor], Any]


class Block(nn.Module):
    """Two layers, an operation in place between them, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.relu(self.up(x), inplace=True))
        return y


class Checkpointed(Block):
    """The same, computed twice."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return y


class Nested(Block):
    """The same with inputs by keyword, and outputs inside a dict and a tuple."""

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return {"y": (super().forward(input), None)}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Nested.Layer(16, 32), Nested.Layer(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(input=x)["y"][0]
        y: Tensor = x + self.down(up.relu())["y"][0]
        return y


class Shared(Block):
    """One layer that is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def network(block: type[Block] = Block, *, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(blocks)))


def train(model: nn.Module, call: Call | None = None, *, steps: int = 3, every: int = 1,
          autocast: bool = False) -> MemoryWorker:
    """A plain loop with two micro-batches and an evaluation; steps close by themselves."""
    worker, call = MemoryWorker(), call or model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Scope(model, (optimizer,), worker=worker, every=every):
        for step in range(steps):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            for part in batch.chunk(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = call(part).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                call(batch)
            model.train()
    return worker


def assert_same(found: MemoryWorker, wanted: MemoryWorker, *, without: tuple[str, ...] = ()) -> None:
    """Every number of every series of every step, and nothing that was not observed."""
    assert [r.step for r in found.records] == [r.step for r in wanted.records]
    for step in (r.step for r in wanted.records):
        assert [e.text for e in found.record(step).events] == []
        one, other = found.metrics(step), wanted.metrics(step)
        assert one.keys() == other.keys()
        for key, values in other.items():
            expected = {name: value for name, value in values.items() if name not in without}
            actual = {name: value for name, value in one[key].items() if name not in without}
            assert actual == pytest.approx(expected, rel=1e-3, abs=1e-6), (step, key)


def counted(backend: str = "aot_eager") -> CompileCounterWithBackend:
    torch._dynamo.reset()
    return CompileCounterWithBackend(backend)


@pytest.fixture(autouse=True, scope="module")
def _one_compiler() -> Iterator[None]:
    """Inductor's pool of compilers costs more to start than a few kernels do."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.mark.parametrize(("block", "backend"), [
    *((block, "aot_eager") for block in (Block, Checkpointed, Nested, Shared)),
    *((block, "inductor") for block in (Block, Checkpointed, Shared)),  # what is nested is Dynamo's affair
])
def test_p6_a_compiled_model_has_the_numbers_of_the_plain_one(block: type[Block], backend: str) -> None:
    """P6: in one graph for training and one for evaluation, steps closing where they did.

    Errors of products are those of one call; of a layer with two, the compiler decides which."""
    counter, model = counted(backend), network(block)
    found = train(model, torch.compile(model, backend=counter, fullgraph=True))
    sampled = ("gemm_error", "wgrad_row_error_max") if block is Shared else ()
    assert_same(found, train(network(block)), without=sampled)
    assert counter.frame_count == 2


def whole(model: nn.Sequential, backend: Any) -> Call:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Sequential, backend: Any) -> Call:
    model.compile(backend=backend, fullgraph=True)
    return model


def by_block(model: nn.Sequential, backend: Any) -> Call:
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    return model


def submodule(model: nn.Sequential, backend: Any) -> Call:
    model[1] = torch.compile(model[1], backend=backend, fullgraph=True)  # type: ignore[assignment]
    return model


WAYS = {"whole": whole, "in place": in_place, "by block": by_block, "submodule": submodule}


@pytest.mark.parametrize("way", list(WAYS))
def test_p6_a_change_of_cadence_compiles_nothing(way: str) -> None:
    """P6: 50 steps with every tenth measured; as many graphs as without a probe, whatever was compiled."""
    without, model = counted(), network(blocks=10 if way == "by block" else 2)
    call = WAYS[way](model, without)
    for part in (1, 2):
        call(torch.randn(4, 16)).mean().backward()
        with torch.no_grad():
            call(torch.randn(4 * part, 16))
    counter, model = counted(), network(blocks=len(model))
    found = train(model, WAYS[way](model, counter), steps=50, every=10)
    assert_same(found, train(network(blocks=len(model)), steps=50, every=10))
    assert counter.frame_count <= without.frame_count


def test_evaluation_between_steps_breaks_no_graph(recwarn: pytest.WarningsRecorder) -> None:
    """Under `inference_mode`, where Dynamo finds nothing to compile in the probe's hook on the model and
    gives its frame up: what the hook calls later is not traced in pieces. Numbers are the plain run's."""
    def evaluating(model: nn.Module) -> Call:
        def call(x: Tensor) -> Any:
            model.eval()
            with torch.inference_mode():
                model(x)
            return model.train()(x)
        return call

    torch._dynamo.utils.counters.clear()
    model, other = network(), network()
    model.compile(backend="aot_eager")
    found = train(model, evaluating(model), steps=4)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not [one for one in recwarn if "Dynamo" in str(one.message)]
    assert_same(found, train(other, evaluating(other), steps=4))


def test_a_model_may_be_compiled_before_the_probe_comes_and_go_on_after_it_left() -> None:
    """Attached before the first call it is measured; after `detach` it trains on; a second probe may come."""
    counter, model = counted(), network()
    call = torch.compile(model, backend=counter, fullgraph=True)
    first = train(model, call, steps=2)
    plain_model = network()
    assert_same(first, train(plain_model, steps=2))
    frames = counter.frame_count
    x = torch.randn(8, 16)
    for run in (call, plain_model):
        run(x).square().mean().backward()
    for mine, wanted in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.allclose(mine.grad, wanted.grad)  # type: ignore[arg-type]
    assert counter.frame_count <= frames + 1
    second = train(model, call, steps=1)
    told = {e.name for e in second.record(0).events if "compiled before" in e.text}
    measured = {key[0] for key in second.metrics(0) if key[1] == "activation"}
    assert told | measured == {"0.up", "0.down", "1.up", "1.down"}
    assert not told & measured


@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_layers_in_plain_checkpointing_count_once(reentrant: bool) -> None:
    """The recomputation runs the compiled region again, within the backward pass.

    Not `fullgraph=True`: there torch 2.11 compiles what checkpointing does in Python until it hits its limit,
    with a probe or without."""
    counter = counted()
    models = [network(Checkpointed) for _ in range(2)]
    for block in (block for model in models for block in model.modules() if isinstance(block, Checkpointed)):
        block.reentrant = reentrant
    for layer in (layer for layer in models[0].modules() if isinstance(layer, nn.Linear)):
        layer.compile(backend=counter)

    def call(x: Tensor, model: nn.Module) -> Any:
        return model(x.clone().requires_grad_())

    found = train(models[0], lambda x: call(x, models[0]))
    assert_same(found, train(models[1], lambda x: call(x, models[1])))


def test_compiled_autocast_has_the_numbers_of_the_plain_one() -> None:
    """Layers get what the plain run gives them: fp32 in the first, BF16 after a BF16 product."""
    counter, model = counted(), network()
    found = train(model, torch.compile(model, backend=counter, fullgraph=True), autocast=True)
    assert_same(found, train(network(), autocast=True), without=("amin_nonzero",))


def test_p9_copies_of_a_compiled_model_are_inert() -> None:
    """P9: a copy can be compiled and run; neither its layers nor its forwards count."""
    model, worker = network(), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        twin = copy.deepcopy(model)
        backend = counted()
        torch.compile(twin, backend=backend, fullgraph=True)(torch.randn(3, 16)).sum().backward()
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(5, 16)).sum().backward()
        scope.step(0)
    assert worker.metrics(0)["0.up", "activation", "rowwise"]["elements"] == 5 * 16


def test_operations_keep_no_activation() -> None:
    """What a layer was given lives no longer for being measured."""
    model, worker = network(), MemoryWorker()
    with Scope(model, (), worker=worker, every=1):
        layer = model.get_submodule("0.up")
        key: Any = next(iter(layer._forward_hooks.values()))
        x = torch.randn(4, 16)
        token = torch.ops.fp8scope.operands(x, layer.get_parameter("weight").detach(), key.key)
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert token.numel() == 1
        assert gone() is None


def test_what_was_compiled_does_not_keep_a_scope() -> None:
    """After `close` nothing of the probe is found by the keys that graphs hold."""
    model, backend = network(), counted()
    call = torch.compile(model, backend=backend, fullgraph=True)
    scope = Scope(model, (), worker=MemoryWorker(), every=1)
    call(torch.randn(3, 16)).sum().backward()
    watch = weakref.ref(scope._watch)
    scope.close()
    del scope
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("recipe", [
    Recipe(), Recipe(policy="delayed"), Recipe(scaling="tensorwise", policy="delayed"),
], ids=lambda recipe: f"{recipe.scaling}-{recipe.policy}")
def test_f6_a_switch_in_a_compiled_model_takes_effect(recipe: Recipe) -> None:
    """F6: BF16 at step 3 and FP8 again at step 6 change outputs and metrics as in the plain model; the graph
    is whole, and one more is compiled for the switch and none for the way back."""
    def switched(compile_it: bool, *, switch: bool = True) -> tuple[list[Tensor], list[int], MemoryWorker]:
        torch.manual_seed(0)
        first, last = (Fp8Linear(128, 128, recipe=recipe) for _ in range(2))
        model = nn.Sequential(first, nn.GELU(), last)
        counter, worker = counted(), MemoryWorker()
        call = torch.compile(model, backend=counter, fullgraph=True) if compile_it else model
        outputs, frames = [], []
        with Scope(model, (), worker=worker, every=2) as scope:
            for id_, (step, precision) in enumerate(((3, "bf16"), (6, "fp8")) if switch else ()):
                worker.commands[step - 2] = (Command(
                    id=id_, issued_by="user",
                    action=SetPrecision(modules=("0",), precision=precision)),)  # type: ignore[arg-type]
            for step in range(8):
                y = call(torch.randn(128, 128, generator=torch.Generator().manual_seed(step)))
                y.square().mean().backward()
                outputs.append(y.detach())
                frames.append(counter.frame_count)
                advance_histories(model)
                scope.step(step)
        return outputs, frames, worker

    (outputs, frames, found), (wanted, _, expected) = switched(True), switched(False)
    for one, other in zip(outputs, wanted, strict=True):
        assert torch.equal(one, other)
    assert (frames[2], frames[-1]) == (1, 2)
    assert_same(found, expected)
    kept, _, _ = switched(True, switch=False)
    same = [torch.equal(one, other) for one, other in zip(outputs, kept, strict=True)]
    assert same[:6] == [step < 3 for step in range(6)]
    assert same[6:] == [recipe.policy == "current"] * 2  # a history of the next layer remembers
