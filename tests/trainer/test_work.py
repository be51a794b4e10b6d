"""What an optimizer keeps from step to step: it never shows in the numbers, and holds no gradient."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope_trainer.adamw import AdamW

SHAPES = ((64, 128), (128, 64), (8, 16, 64), (64,))


def made() -> tuple[list[nn.Parameter], AdamW]:
    """Parameters and their optimizer after two steps."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = AdamW(parameters, states="int8", warmup_steps=1)
    for seed in range(2):
        graded(parameters, seed)
        optimizer.step()
    return parameters, optimizer


def graded(parameters: list[nn.Parameter], seed: int) -> None:
    """New gradients."""
    generator = torch.Generator().manual_seed(10 + seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def moved_weight(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """Its memory is another."""
    parameters[0].data = parameters[0].data.clone()


def moved_state(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """One tensor of a state is another, with other codes."""
    state = optimizer.state[parameters[1]]
    state["exp_avg"] = torch.ones_like(state["exp_avg"])


def transposed_gradient(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """It has gaps."""
    gradient = parameters[0].grad
    assert gradient is not None
    parameters[0].grad = gradient.t().contiguous().t()


def missing_gradient(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """One is not updated."""
    parameters[2].grad = None


def loaded(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """All states are others."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


CHANGES: list[Callable[[list[nn.Parameter], AdamW], None]] = [
    moved_weight, moved_state, transposed_gradient, missing_gradient, loaded]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(change: Any) -> None:
    """After it two steps end as those of a copy, which knows nothing of earlier ones, to the bit."""
    parameters, optimizer = made()
    graded(parameters, 5)
    change(parameters, optimizer)
    others, other = copy.deepcopy((parameters, optimizer))
    for mine, copied in zip(parameters, others, strict=True):
        copied.grad = None if mine.grad is None else mine.grad.clone(memory_format=torch.preserve_format)
    for seed in range(2):
        optimizer.step()
        other.step()
        for a, b in zip(parameters, others, strict=True):
            assert torch.equal(a, b)
            ours, theirs = optimizer.state[a], other.state[b]
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        graded(parameters, 20 + seed)
        graded(others, 20 + seed)


def test_no_gradient_is_held_between_steps() -> None:
    """Otherwise their memory would be taken during the forward pass, too."""
    parameters, optimizer = made()
    held: list[weakref.ref[Tensor]] = [weakref.ref(p.grad) for p in parameters if p.grad is not None]
    optimizer.zero_grad()
    assert len(held) == len(SHAPES)
    assert all(one() is None for one in held)
