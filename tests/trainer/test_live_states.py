"""Options that decide what is stored, changed in a live optimizer; and states of torch's own."""

from typing import Any

import pytest
import torch
from tests.trainer.stepping import SHAPE, gradient, stepped
from torch import Tensor, nn

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.adam import Adam
from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.lion import Lion
from fp8scope_trainer.moments import decode, slots
from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.place import columns_of
from fp8scope_trainer.reformat import format_in
from fp8scope_trainer.sgd import SGD
from fp8scope_trainer.torch_states import from_torch


@pytest.mark.parametrize(("theirs", "ours", "other"), [
    (torch.optim.AdamW, AdamW, Adam), (torch.optim.Adam, Adam, AdamW)])
def test_torchs_own_states_are_loaded_on_request(theirs: Any, ours: Any, other: Any) -> None:
    """Ours goes on from five steps of torch's as torch's does, then in fp8; as it is, or by the other rule,
    nothing is loaded."""
    weights = [nn.Parameter(torch.ones(SHAPE)) for _ in range(2)]
    first = theirs(weights[:1], lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(5):
        weights[0].grad = gradient(step)
        first.step()
    weights[1].data.copy_(weights[0].data)
    saved = first.state_dict()
    second = ours(weights[1:], states="fp32", clip=None)
    with pytest.raises(Invalid, match="from_torch"):
        second.load_state_dict(saved)
    with pytest.raises(Invalid, match="rule"):
        other(weights[1:], states="fp32").load_state_dict(from_torch(saved))
    second.load_state_dict(from_torch(saved))
    for step in range(5, 8):
        for optimizer, w in zip((first, second), weights, strict=True):
            w.grad = gradient(step)
            optimizer.step()
    assert (weights[0] - weights[1]).abs().max().item() < 2e-6
    second.param_groups[0]["states"] = "fp8"
    weights[1].grad = gradient(8)
    second.step()
    assert second.state[weights[1]]["exp_avg"].dtype == torch.float8_e4m3fn
    for option in ("amsgrad", "maximize"):
        with pytest.raises(Invalid, match=option):
            from_torch(theirs(weights[:1], **{option: True}).state_dict())
    with pytest.raises(Invalid, match="AdamW or Adam of torch"):
        from_torch(torch.optim.SGD(weights[:1]).state_dict())


def decoded(optimizer: StateOptimizer, parameter: nn.Parameter) -> list[Tensor]:
    """Moments as they are stored now."""
    state, rule = optimizer.state[parameter], optimizer.rule
    format = format_in(state, parameter, rule)
    assert format is not None
    found = decode(slots(state, rule), format, columns_of(parameter.shape))
    return [one for one in found if one is not None]


@pytest.mark.parametrize("make", [AdamW, Lion])
@pytest.mark.parametrize(("before", "after", "block"), [
    ("fp8", "int8", None), ("int8", "fp32", None), ("fp32", "int4", 64), ("int4", "bf16", None),
    ("bf16", "int16", 256), ("int16", "fp8", None), ("fp8", "fp8", None)])
def test_states_follow_their_group_in_the_next_step(make: Any, before: str, after: str, block: int | None
                                                    ) -> None:
    """Those of a parameter without a gradient, too. The moments are those from before, but for rounding."""
    moved, idle = (nn.Parameter(torch.ones(24, 1100)) for _ in range(2))
    optimizer = make([moved, idle], lr=1e-3, states=before)
    for step in range(3):
        moved.grad = idle.grad = gradient(step, (24, 1100)) + 3.0
        optimizer.step()
    old = [decoded(optimizer, one) for one in (moved, idle)]
    optimizer.param_groups[0] |= {"states": after, "block": block, "lr": 0.0, "betas": (0.9, 1 - 2.0**-20)}
    assert optimizer.format_of(moved) == before  # still
    moved.grad, idle.grad = torch.zeros(24, 1100), None
    optimizer.step()
    for parameter, wanted in zip((moved, idle), old, strict=True):
        assert optimizer.format_of(parameter) == after
        found = decoded(optimizer, parameter)
        if parameter is moved:  # by one step with a gradient of 0, of which v tells nothing
            found[0] /= 0.9 if make is AdamW else 1.0
        for a, b in zip(found, wanted, strict=True):
            assert ((a - b).norm() / b.norm()).item() < (0.3 if after == "int4" else 0.1)
        state = optimizer.state[parameter]
        assert ("exp_avg_scale" in state) == (after not in ("fp32", "bf16"))
        if block is not None:
            assert state["exp_avg_scale"].shape[1] == -(-1100 // block)
    stepped(optimizer, range(2))
    assert bool(moved.isfinite().all())


def test_another_block_is_a_change_and_one_block_a_row_is_none() -> None:
    """Of 300 columns: blocks of 512 and 1024 are the row, whose codes stay as they are; 256 is another."""
    w = nn.Parameter(torch.ones(24, 300))
    optimizer = AdamW([w], states="int8", block=512)
    stepped(optimizer, range(2))
    before = optimizer.state[w]["exp_avg_scale"]
    w.grad = None
    optimizer.param_groups[0]["block"] = 1024
    optimizer.step()
    assert optimizer.state[w]["exp_avg_scale"] is before
    optimizer.param_groups[0]["block"] = 256
    optimizer.step()
    assert optimizer.state[w]["exp_avg_scale"].shape == (24, 2)
    for field, value in (("block", 100), ("states", "int9"), ("master", True)):
        was, optimizer.param_groups[0][field] = optimizer.param_groups[0][field], value
        with pytest.raises(Invalid, match=field):
            optimizer.step()
        optimizer.param_groups[0][field] = was


def test_a_master_or_a_warm_up_may_begin_and_end() -> None:
    """A master begins as the weight is; a warm-up ends in the format that is asked for then."""
    w = nn.Parameter(torch.ones(SHAPE).bfloat16())
    optimizer = AdamW([w], lr=1e-2, states="int8", warmup_steps=4)
    stepped(optimizer, range(2))
    optimizer.param_groups[0] |= {"master": True, "states": "fp8"}
    stepped(optimizer, range(2, 4))
    assert torch.equal(optimizer.state[w]["master"].bfloat16(), w)
    assert optimizer.state[w]["exp_avg"].dtype == torch.float8_e4m3fn
    optimizer.param_groups[0] |= {"master": False}
    stepped(optimizer, range(4, 5))
    assert set(optimizer.state[w]) == {"step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"}
    early = AdamW([nn.Parameter(torch.ones(SHAPE))], states="int8", warmup_steps=4)
    stepped(early, range(2))
    early.param_groups[0]["states"] = "fp32"
    stepped(early, range(2, 3))
    (state,) = early.state.values()
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("master", [False, True])
def test_sgd_without_momentum_keeps_nothing(master: bool) -> None:
    """It is torch's; no buffer is there, and none is foretold. A momentum may begin, and end again."""
    dtype = torch.bfloat16 if master else torch.float32
    ours, theirs = nn.Parameter(torch.ones(SHAPE, dtype=dtype)), nn.Parameter(torch.ones(SHAPE))
    optimizer = SGD([ours], lr=1e-2, momentum=0.0, weight_decay=0.1, master=master)
    other = torch.optim.SGD([theirs], lr=1e-2, weight_decay=0.1)
    assert not optimizer.coded_states(ours)
    assert not optimizer.exceptions

    def both(steps: range) -> Any:
        for step in steps:
            ours.grad = gradient(step).to(dtype)
            theirs.grad = ours.grad.to(torch.float32, copy=True)
            optimizer.clip_gradients(1.0)
            nn.utils.clip_grad_norm_([theirs], 1.0)
            optimizer.step()
            other.step()
        return (optimizer.state[ours].get("master", ours) - theirs).detach().abs().max().item()

    assert both(range(3)) < 1e-5
    assert set(optimizer.state[ours]) == {"step"} | ({"master"} if master else set())
    loaded = SGD([nn.Parameter(ours.detach().clone())], momentum=0.0, master=master)
    loaded.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0] |= {"momentum": 0.5, "states": "fp32"}
    other.param_groups[0]["momentum"] = 0.5
    assert both(range(3, 6)) < 1e-5
    optimizer.param_groups[0]["momentum"] = other.param_groups[0]["momentum"] = 0.0
    assert both(range(6, 8)) < 1e-5
    assert set(optimizer.state[ours]) == {"step"} | ({"master"} if master else set())
