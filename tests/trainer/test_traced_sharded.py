"""Compiled FP8 layers under FSDP2 and tensor parallelism, gathered in FP8, and made of fake tensors."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.trainer.test_traced import (
    RECIPES,
    WIDTH,
    assert_equal,
    compiled,
    counted,
    network,
    pytestmark,  # noqa: F401  # the same warnings
    tokens,
)
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fp8scope_trainer.convert import convert
from fp8scope_trainer.decoder import Decoder, demo
from fp8scope_trainer.fp8_gather import GatheredWeight
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe, quantize_weight
from fp8scope_trainer.shard import shard
from fp8scope_trainer.tensor_parallel import cut_layers


class Sharded(nn.Module):
    """Two blocks as FSDP takes them, compiled one by one."""

    def __init__(self, recipe: Recipe, *, compile_it: bool) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(network(recipe)), nn.Linear(WIDTH, 4)
        self.counter = counted()
        if compile_it:
            for layer in self.layers:
                layer.compile(backend=self.counter, dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.last(x)
        return y


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(("name", "stage"), [("block", 3), ("tensorwise, delayed", 2)])
def test_sharded_models_have_the_bits_of_the_plain_one(name: str, stage: int) -> None:
    """FSDP2 with fp32 masters that are gathered in BF16: one graph, no break."""
    found: list[list[Tensor]] = []
    torch._dynamo.utils.counters.clear()
    for compile_it in (True, False):
        torch.manual_seed(0)
        model = Sharded(RECIPES[name], compile_it=compile_it)
        shard(model, stage=stage, compute=torch.bfloat16)
        results = []
        for seed in range(2):
            y = model(tokens(130, seed=seed).requires_grad_())
            y.square().sum().backward()
            gradients = [p.grad for p in model.parameters()]
            results += [y.detach(), *(g.to_local().clone() for g in gradients if isinstance(g, DTensor))]
            model.zero_grad()
        found.append(results)
        if compile_it:
            assert model.counter.frame_count == 1
            assert not torch._dynamo.utils.counters["graph_break"]
    assert_equal(*found)


def test_weights_gathered_as_codes_stay_out_of_the_graph() -> None:
    """A break at the product, with its bits."""
    layer = Fp8Linear(WIDTH, 256, bias=False)
    q = quantize_weight(layer.weight.detach(), layer.recipe)
    layer.weight = nn.Parameter(GatheredWeight.of((q.codes.view(torch.uint8), q.scales), torch.float32))
    compiled_layer, x = torch.compile(layer, backend=counted()), tokens(5)
    y, wanted = compiled_layer(x), layer(x)
    assert torch.equal(y, wanted)
    y.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.usefixtures("_group")
def test_cut_layers_have_the_bits_of_the_plain_ones() -> None:
    """The decoder under tensor parallelism on one rank: one graph for its layers, no break."""
    found = []
    torch._dynamo.utils.counters.clear()
    for compile_it in (True, False):
        torch.manual_seed(0)
        model = Decoder(demo())
        convert(model)
        cut_layers(model, init_device_mesh("cpu", (1,)))
        if compile_it:
            layers = nn.Sequential(*model.layers)
            counter = compiled(layers)
        y = model(torch.arange(64).view(2, 32))
        y.square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        found.append([y.detach(), *(g.to_local() for g in gradients if isinstance(g, DTensor))])
        if compile_it:
            assert counter.frame_count == 1
            assert not torch._dynamo.utils.counters["graph_break"]
    assert_equal(*found)


def test_layers_can_be_fake() -> None:
    """To plan what a model takes; the key of each is a real one."""
    with FakeTensorMode():
        first, last = (Fp8Linear(WIDTH, WIDTH) for _ in range(2))
        assert last(first(torch.randn(4, WIDTH))).shape == (4, WIDTH)
    assert first.key.data_ptr() != last.key.data_ptr()
