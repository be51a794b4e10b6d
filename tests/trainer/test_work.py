"""What an optimizer keeps from step to step: it never shows in the numbers, and holds no gradient."""

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.moments import new_state, slots
from fp8scope_trainer.rules import ADAMW, scalars
from fp8scope_trainer.state_format import StateFormat
from fp8scope_trainer.step import StepTensors

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


def another_gradient_missing(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """As many have none as before, but others."""
    missing_gradient(parameters, optimizer)
    optimizer.step()
    graded(parameters, 6)
    parameters[0].grad = None


def options(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """What a scheduler may set."""
    optimizer.param_groups[0] |= {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.0, "clip": 1.0}


def lr_in_a_tensor(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """It changes in place."""
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(1e-2)
    graded(parameters, 7)


def another_group(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """One parameter is of it."""
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64, 64))], "states": "fp8"})
    parameters.append(optimizer.param_groups[1]["params"][0])
    graded(parameters, 8)


def other_group(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """A parameter goes from one to the other, whose lr is another."""
    another_group(parameters, optimizer)
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 1e-2
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    graded(parameters, 9)


def steps_set(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """In place, as torch.distributed.checkpoint loads."""
    optimizer.state[parameters[1]]["step"].fill_(7)


def steps_replaced(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """By a tensor of its own."""
    optimizer.state[parameters[1]]["step"] = torch.tensor(7.0)


def state_gone(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """It begins again."""
    del optimizer.state[parameters[0]]


def states_made(parameters: list[nn.Parameter], optimizer: AdamW) -> None:
    """All are zero."""
    optimizer.make_states(5)


CHANGES: list[Callable[[list[nn.Parameter], AdamW], None]] = [
    moved_weight, moved_state, transposed_gradient, missing_gradient, loaded, another_gradient_missing,
    options, lr_in_a_tensor, another_group, other_group, steps_set, steps_replaced,
    state_gone, states_made]


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


def test_steps_count_the_gradients_of_each() -> None:
    """One without stands still; a state_dict goes on with its optimizer, what was loaded from it does not."""
    parameters, optimizer = made()
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    shared, loaded_into = optimizer.state_dict(), AdamW(copies, states="int8", warmup_steps=1)
    loaded_into.load_state_dict(shared)
    for missing in (0, 2, None):
        graded(parameters, 3)
        if missing is not None:
            parameters[missing].grad = None
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in parameters] == [4, 5, 4, 5]
    assert [state["step"].item() for state in shared["state"].values()] == [4, 5, 4, 5]
    assert [state["step"].item() for state in loaded_into.state.values()] == [2] * 4
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    assert [state["step"].item() for state in torch.load(file)["state"].values()] == [4, 5, 4, 5]


def test_a_table_is_not_used_for_gradients_of_another_kind() -> None:
    """A table (on the CPU, not launched) takes other gradients, but none of another dtype, at odd addresses
    or with gaps."""
    step_table = pytest.importorskip("fp8scope_trainer.step_table")
    weight, format = torch.zeros(64, 128), StateFormat.of("fp8")
    slots_ = slots(new_state(weight, ADAMW, format, exact=False, master=False), ADAMW)
    one = StepTensors(weight=weight, gradient=torch.zeros(64, 128), slots=slots_, master=None, stream=0,
                      first=0)
    by = scalars(ADAMW, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "clip": None,
                         "seed": 0}, 1)
    table = step_table.StepTable([one], step_table.kind_of(one, ADAMW, format, by))
    for gradient, taken in ((torch.ones(64, 128), True), (torch.ones(64, 128).bfloat16(), False),
                            (torch.ones(64 * 128 + 1)[1:].view(64, 128), False),
                            (torch.ones(128, 64).t(), False), (torch.ones(64 * 128), True)):
        one.gradient = gradient
        assert (table.gradients([one]) == [gradient.data_ptr()]) == taken


def test_no_gradient_is_held_between_steps() -> None:
    """Otherwise their memory would be taken during the forward pass, too."""
    parameters, optimizer = made()
    held: list[weakref.ref[Tensor]] = [weakref.ref(p.grad) for p in parameters if p.grad is not None]
    optimizer.zero_grad()
    assert len(held) == len(SHAPES)
    assert all(one() is None for one in held)
