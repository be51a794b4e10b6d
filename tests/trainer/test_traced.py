"""FP8 layers inside `torch.compile`: the bits of the plain layers, in whole graphs; what those keep."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from tests.probe.test_compiled import assert_same
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.commands import Precision
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.history import AmaxHistory, advance_histories
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe, recipe_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # by Dynamo, of its own classes
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # by Dynamo, of inputs with a history
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # by Inductor
    pytest.mark.filterwarnings("ignore:None of the inputs"),  # by checkpointing, in evaluation
]

RECIPES = {
    "block": Recipe(), "block, delayed": Recipe(policy="delayed"),
    "block, wgrad of blocks": Recipe(wgrad_activation="block", power_of_two=True, sanitize=True),
    "tensorwise": Recipe(scaling="tensorwise", gradient_format="e5m2"),
    "tensorwise, delayed": Recipe(scaling="tensorwise", policy="delayed", margin=1),
}
WIDTH = 128


class Block(nn.Module):
    """Three layers of one input, one with a bias after them, and a residual."""

    reentrant: bool | None = None
    """None: nothing is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        q: Tensor = self.q(x).relu()
        y: Tensor = self.out(q + self.k(x) + self.v(x))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return x + self.inner(x)
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x + y


def network(recipe: Recipe, *, blocks: int = 2, precision: Precision = "fp8") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    convert(model, Conversion(recipe=recipe, precision=precision))
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


def counted(backend: str = "aot_eager") -> CompileCounterWithBackend:
    torch._dynamo.reset()
    return CompileCounterWithBackend(backend)


def compiled(model: nn.Sequential, **options: Any) -> CompileCounterWithBackend:
    """Block by block, each a whole graph."""
    counter = counted(options.pop("backend", "aot_eager"))
    for block in model:
        block.compile(backend=counter, fullgraph=True, **options)
    return counter


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [t for t in found if t is not None]


def histories(model: nn.Module) -> list[Tensor]:
    return [m.amaxes.clone() for m in model.modules() if isinstance(m, AmaxHistory)]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(autouse=True, scope="module")
def _one_compiler() -> Iterator[None]:
    """Inductor's pool of compilers costs more to start than a few kernels do."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.mark.parametrize(("name", "backend"), [
    *((name, "aot_eager") for name in RECIPES), ("block", "inductor"), ("tensorwise, delayed", "inductor")])
def test_outputs_gradients_and_histories_are_those_of_the_plain_model(name: str, backend: str) -> None:
    """To the bit, in one graph for all blocks, over steps and shapes: 2-D, 3-D, an odd number of tokens."""
    model, plain = (network(RECIPES[name]) for _ in range(2))
    counter = compiled(model, backend=backend, dynamic=False)
    shapes = [(130,), (130,), (2, 65)] if backend == "aot_eager" else [(130,), (130,)]
    for number, shape in enumerate(shapes):
        x = tokens(*shape, seed=number)
        found, wanted = step(model, x), step(plain, x)
        if backend == "inductor":  # which adds up the gradient of a bias in an order of its own
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)
            found, wanted = ([t for t in some if t.dim() > 1] for some in (found, wanted))
        assert_equal(found, wanted)
        for one in (model, plain):
            advance_histories(one)
    assert_equal(histories(model), histories(plain))
    assert counter.frame_count == len(set(shapes))


@pytest.mark.parametrize("precision", ["bf16", "shadow"])
def test_other_precisions_have_the_bits_of_the_plain_model(precision: Precision) -> None:
    """Operands rounded to BF16; in shadow histories go on."""
    recipe = RECIPES["tensorwise, delayed"]
    model, plain = (network(recipe, precision=precision) for _ in range(2))
    compiled(model)
    assert_equal(step(model, tokens(130)), step(plain, tokens(130)))
    for one in (model, plain):
        advance_histories(one)
    assert_equal(histories(model), histories(plain))


def test_any_number_of_tokens_needs_one_graph() -> None:
    """Over 128 of them, with dynamic shapes; the bits are those of the plain model for each."""
    model, plain = (network(Recipe(), blocks=1) for _ in range(2))
    counter = compiled(model, dynamic=True)
    for count in (130, 300, 256):
        assert_equal(step(model, tokens(count)), step(plain, tokens(count)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["block", "tensorwise, delayed"])
def test_autocast_has_the_bits_of_the_plain_model(name: str) -> None:
    """In BF16, where Inductor is asked to round wherever the plain model does."""
    found = []
    for compile_it in (True, False):
        model = network(RECIPES[name], blocks=1)
        if compile_it:
            compiled(model, backend="inductor")
        with (torch._inductor.config.patch(emulate_precision_casts=True),
              torch.autocast("cpu", torch.bfloat16)):
            y = model(tokens(130))
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters() if p.grad is not None and p.dim() > 1)])
    assert_equal(*found)


def saved_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What the forward keeps that is as large as x."""
    saved: dict[int, Tensor] = {}

    def note(t: Tensor) -> Tensor:
        saved[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model(x)
    return [t for t in saved.values() if t.numel() == x.numel()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_graph_keeps_codes_and_not_inputs(name: str) -> None:
    """One byte an element, and of three layers of one input once; under delayed scaling, where each has a
    scale of its own, once each. Of other large tensors only the mask of relu is kept, not x."""
    model, recipe = network(RECIPES[name], blocks=1), RECIPES[name]
    compiled(model)
    saved = saved_of(model, tokens(384).requires_grad_())
    codes = [t for t in saved if t.dtype == torch.float8_e4m3fn]
    assert len(codes) == (4 if recipe.policy == "delayed" else 2)
    assert len(saved) - len(codes) == 1


@pytest.mark.parametrize("name", ["block", "tensorwise, delayed"])
@pytest.mark.parametrize(("inside", "reentrant"), [(False, False), (False, True), (True, False)])
def test_checkpointing_has_the_bits_of_the_plain_model(inside: bool, reentrant: bool, name: str) -> None:
    """In the graph, and around compiled layers; codes are not kept but made again."""
    model, plain = (network(RECIPES[name]) for _ in range(2))
    for block in (*model, *plain):
        assert isinstance(block, Block)
        block.reentrant = reentrant
    if inside:
        compiled(model)
    else:
        counter = counted()
        for layer in (layer for layer in model.modules() if isinstance(layer, Fp8Linear)):
            layer.compile(backend=counter, fullgraph=True)
    x = tokens(130)
    assert_equal(step(model, x), step(plain, x))
    assert not [t for t in saved_of(model, x.requires_grad_()) if t.dtype == torch.float8_e4m3fn]
    for one in (model, plain):
        advance_histories(one)
    assert_equal(histories(model), histories(plain))


def observed(model: nn.Module, *, steps: int, every: int, detail_every: int = 1) -> MemoryWorker:
    """A loop with two micro-batches and an evaluation."""
    worker = MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Scope(model, (optimizer,), worker=worker, every=every, detail_every=detail_every):
        for number in range(steps):
            batch = tokens(6, seed=number)
            for part in batch.chunk(2):
                model(part.requires_grad_()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            advance_histories(model)
            model.eval()
            with torch.no_grad():
                model(batch)
            model.train()
    return worker


@pytest.mark.parametrize(("name", "reentrant"), [("block", False), ("tensorwise, delayed", None)])
def test_a_probe_sees_what_it_sees_of_the_plain_model(name: str, reentrant: bool | None) -> None:
    """Every number of every series, in detailed steps and light ones, with micro-batches, an evaluation and
    checkpointing; what is computed again counts once."""
    model, plain = (network(RECIPES[name]) for _ in range(2))
    for block in (*model, *plain):
        assert isinstance(block, Block)
        block.reentrant = reentrant
    compiled(model)
    assert_same(observed(model, steps=2, every=1, detail_every=2),
                observed(plain, steps=2, every=1, detail_every=2))


def test_a_change_of_cadence_compiles_nothing() -> None:
    """50 steps with every tenth measured: one graph for training and one for evaluation; all blocks share
    them."""
    model = network(Recipe(), blocks=2)
    counter = compiled(model)
    worker = observed(model, steps=50, every=10)
    assert [record.step for record in worker.records if record.tables is not None] == [0, 10, 20, 30, 40]
    assert worker.metrics(40)["1.out", "gradient", "rowwise"]["calls"] == 2
    assert counter.frame_count == 2


def test_a_probe_may_come_late_and_leave() -> None:
    """Of layers that were compiled before it came it sees everything, and nothing is compiled again."""
    model = network(Recipe())
    counter = compiled(model)
    wanted = step(model, tokens(3))
    for _ in range(2):
        worker = MemoryWorker()
        with Scope(model, (), worker=worker, every=1) as scope:
            assert_equal(step(model, tokens(3)), wanted)
            scope.step(0)
        assert not worker.record(0).events
        assert {key[0] for key in worker.metrics(0) if key[1] == "gradient"} == {
            f"{block}.{name}" for block in (0, 1) for name in ("q", "k", "v", "out")}
    assert_equal(step(model, tokens(3)), wanted)
    assert counter.frame_count == 1


def test_a_switch_compiles_its_layer_once() -> None:
    """To BF16, to shadow, back to FP8: one more graph for the first, none for the others."""
    model, plain = (network(Recipe()) for _ in range(2))
    counter = compiled(model)
    order: tuple[Precision, ...] = ("fp8", "bf16", "shadow", "fp8", "bf16")
    frames = []
    for precision in order:
        for one in (model, plain):
            layer = one.get_submodule("1.k")
            assert isinstance(layer, Fp8Linear)
            layer.set_precision(precision)
        assert_equal(step(model, tokens(64)), step(plain, tokens(64)))
        frames.append(counter.frame_count)
    assert frames == [1, 2, 2, 2, 2]


def test_evaluation_and_frozen_weights_keep_no_codes_of_inputs() -> None:
    """The output is the same without gradients; a frozen weight passes the gradient of its input on."""
    model, plain = (network(Recipe(scaling="tensorwise"), blocks=1) for _ in range(2))
    counter = compiled(model)
    with torch.no_grad():
        assert torch.equal(model(tokens(5)), plain(tokens(5)))
    for one in (model, plain):
        one.requires_grad_(False)
    found, wanted = step(model, tokens(5)), step(plain, tokens(5))
    assert len(found) == 2
    assert_equal(found, wanted)
    assert not [t for t in saved_of(model, tokens(384).requires_grad_()) if t.dtype == torch.float8_e4m3fn]
    assert counter.frame_count <= 3


@pytest.mark.parametrize("other", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_compiled_as_themselves(other: Callable[[nn.Module], nn.Module]) -> None:
    """A copy of a layer in a graph has its own history, and goes on when the first is gone."""
    recipe = Recipe(policy="delayed")
    first = Fp8Linear(WIDTH, WIDTH, recipe=recipe)
    twin = other(first)
    backend = counted()
    for layer in (first, twin):
        layer.compile(backend=backend, fullgraph=True)
    first(tokens(3))
    assert isinstance(twin, Fp8Linear)
    assert isinstance(twin.history, AmaxHistory)
    assert isinstance(first.history, AmaxHistory)
    assert first.history.pending.item() == tokens(3).abs().max().item()
    assert twin.history.pending.item() == 0
    del first
    twin(tokens(3))
    assert twin.history.pending.item() == tokens(3).abs().max().item()


def test_a_recipe_comes_back_from_its_text() -> None:
    """Every field."""
    for recipe in (*RECIPES.values(), Recipe(policy="delayed", history_length=7, margin=3)):
        assert recipe_of(recipe.text) == recipe


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
                    reason="needs compute capability 9.0")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("count", [256, 130])
@pytest.mark.parametrize("name", RECIPES)
def test_a_compiled_block_on_the_gpu(name: str, count: int, backend: str) -> None:
    """In BF16: outputs and gradients of the weights as those of the plain model, to the bit, step by step."""
    model, plain = (network(RECIPES[name], blocks=1).to("cuda", torch.bfloat16) for _ in range(2))
    compiled(model, backend=backend, dynamic=False)
    for seed in range(3):
        x = tokens(count, seed=seed).to("cuda", torch.bfloat16)
        with torch._inductor.config.patch(emulate_precision_casts=True):
            found, wanted = ([t for t in step(one, x) if t.dim() > 1] for one in (model, plain))
        assert_equal(found, wanted)
        for one in (model, plain):
            advance_histories(one)
