"""Outputs that are changed in place have the gradients of those that are not, however the job is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.functional import relu, relu_
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker


class Block(nn.Module):
    """A residual stream and an activation, both in place or neither."""

    def __init__(self, in_place: bool, bias: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.up, self.down = nn.Linear(16, 32, bias=bias), nn.Linear(32, 16, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x)
        h = relu_(h) if self.in_place else relu(h)
        y: Tensor = self.down(h)
        if self.in_place:
            y += x
            return y
        return y + x


def backward(model: nn.Module, x: Tensor) -> None:
    torch.autograd.backward(model(x).square().mean())


def checkpointed(model: nn.Module, x: Tensor, *, reentrant: bool) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.backward(checkpoint(model, x, use_reentrant=reentrant).square().mean())


def retained(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


def twice_differentiated(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).pow(3).mean(), x, create_graph=True)
    torch.autograd.backward(gradient.square().sum())


def split(model: nn.Module, x: Tensor) -> None:
    """As zero-bubble pipelines do it: first the gradients of inputs, then those of weights."""
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    _, groups = stage_backward_input([loss], None, [x], iter(model.parameters()))
    stage_backward_weight(iter(model.parameters()), groups)


def under_autocast(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x.bfloat16()).float().square().mean()
    torch.autograd.backward(loss)


def hooked(model: nn.Module, x: Tensor) -> None:
    """The job's own hook doubles the gradient that the layer's backward gets."""
    y = model[0].up(x)  # type: ignore[index]
    y.register_hook(lambda gradient: gradient * 2)
    torch.autograd.backward(model[0].down(relu(y)).square().mean())  # type: ignore[index]


WAYS: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "plain": backward, "retained": retained, "twice": twice_differentiated, "autocast": under_autocast,
    "split": split, "hooked": hooked,
    "reentrant": lambda model, x: checkpointed(model, x, reentrant=True),
    "not reentrant": lambda model, x: checkpointed(model, x, reentrant=False),
}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "1-D": lambda x: x[0, 0], "2-D": lambda x: x[0], "3-D": lambda x: x,
    "4-D": lambda x: x.view(2, 2, 2, 16).transpose(0, 1)}


def measured(
    in_place: bool, bias: bool, shape: str, way: Callable[[nn.Module, Tensor], None],
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> dict[Any, Any]:
    torch.manual_seed(0)
    model, worker = wrap(nn.Sequential(Block(in_place, bias), Block(in_place, bias))), MemoryWorker()
    x = SHAPES[shape](torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0)))
    with Scope(model, (), worker=worker, every=1) as scope:
        for step in range(2):
            way(model, x)
            scope.step(step)
    assert [event for record in worker.records for event in record.events
            if way is not hooked or event.kind != "unobserved"] == []
    return {key: row for key, row in worker.metrics(1).items() if key[1] == "gradient"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradients_are_those_before_the_change(
    way: Callable[[nn.Module, Tensor], None], shape: str, bias: bool
) -> None:
    """Each counts once, with the values that the layer's own backward gets."""
    plain, changed = (measured(in_place, bias, shape, way) for in_place in (False, True))
    assert {name for name, _, _ in plain} >= {"0.up", "0.down"}
    assert changed == plain


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_gradients_of_wrapped_models(wrap: Callable[[nn.Module], nn.Module], tmp_path: Any) -> None:
    """Under DDP and FSDP2, in one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain, changed = (measured(in_place, True, "3-D", backward, wrap) for in_place in (False, True))
    finally:
        dist.destroy_process_group()
    assert changed == plain
    assert len(plain) == 8


class Halves(nn.Linear):
    """Returns the two halves of its output, which share their memory."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y: Tensor = super().forward(input)
        return y[0], y[1]


@pytest.mark.parametrize("in_place", [False, True])
def test_parts_that_are_changed_in_place_are_named(in_place: bool) -> None:
    """No node has the gradient of one part alone: the layer is listed, with what to do."""
    model, worker = nn.Sequential(Halves(16, 16)), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        _, second = model(torch.randn(2, 4, 16))
        if in_place:
            second *= 2
        torch.autograd.backward(second.sum())
        scope.step(0)
    told = [event.text for event in worker.record(0).events]
    assert len(told) == in_place
    assert all("changed in place" in one for one in told)


class Unbound(nn.Linear):
    """Returns several outputs of one node."""

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(input).unbind(0)


def test_an_output_that_is_not_used_raises_nothing() -> None:
    """torch calls the hook of such an output with None, if its node has another one that is used."""
    model, worker = nn.Sequential(Unbound(16, 16)), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        torch.autograd.backward(model(torch.randn(2, 4, 16))[1].sum())
        scope.step(0)
    assert worker.record(0).events == ()
    assert worker.metrics(0)["0", "gradient", "rowwise"]["elements"] == 64
