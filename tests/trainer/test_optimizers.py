"""The four rules in six formats: against torch's own, and to rest on a quadratic."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.adam import Adam
from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.lion import Lion
from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.sgd import SGD
from fp8scope_trainer.state_block import FORMATS

SHAPE = (32, 300)
RULES: dict[str, Callable[..., StateOptimizer]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "lion": Lion}


class HandLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, in float64."""

    def __init__(self, params: list[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
                 ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.m = torch.zeros_like(params[0], dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        p, (b1, b2) = group["params"][0], group["betas"]
        g = p.grad.double()
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * (b1 * self.m + (1 - b1) * g).sign().to(p.dtype))
        self.m = b2 * self.m + (1 - b2) * g


def run(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int, *,
        shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any]:
    """`steps` steps on 0.5 |w - goal|^2 with a little noise, from the same start."""
    generator = torch.Generator().manual_seed(5)
    goal, start = (torch.randn(shape, generator=generator) for _ in range(2))
    w = nn.Parameter(start.to(dtype))
    optimizer = make([w])
    for _ in range(steps):
        w.grad = ((w.detach().float() - goal) + 0.1 * torch.randn(shape, generator=generator)).to(dtype)
        optimizer.step()
    return w.detach().float() - goal, optimizer


@pytest.mark.parametrize(("ours", "theirs"), [
    (lambda p: AdamW(p, 1e-2, betas=(0.9, 0.98), weight_decay=0.1, states="fp32"),
     lambda p: torch.optim.AdamW(p, 1e-2, betas=(0.9, 0.98), weight_decay=0.1)),
    (lambda p: Adam(p, 1e-2, weight_decay=0.01, states="fp32"),
     lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.01)),
    (lambda p: SGD(p, 1e-2, momentum=0.8, weight_decay=0.01, states="fp32"),
     lambda p: torch.optim.SGD(p, 1e-2, momentum=0.8, weight_decay=0.01)),
    (lambda p: SGD(p, 1e-2, nesterov=True, states="fp32"),
     lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True)),
    (lambda p: Lion(p, 1e-3, betas=(0.9, 0.99), weight_decay=0.1, states="fp32"),
     lambda p: HandLion(p, 1e-3, (0.9, 0.99), 0.1)),
], ids=["adamw", "adam", "sgd", "nesterov", "lion"])
def test_fp32_states_are_the_textbook(ours: Any, theirs: Any) -> None:
    """30 steps end within 2e-6 of torch's optimizer (weights of size 1), of Lion within that of float64."""
    (a, _), (b, _) = run(ours, 30), run(theirs, 30)
    assert (a - b).abs().max().item() < 2e-6


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("rule", RULES)
def test_every_format_comes_to_rest(rule: str, states: str) -> None:
    """200 steps on a quadratic end about as near to the goal as fp32 states do: 15 % of its rms, and no
    element further out than twice fp32's furthest. 4 bits of m are coarse: 2.5 times the rms."""
    lr = {"adamw": 2e-2, "adam": 2e-2, "sgd": 3e-2, "lion": 1e-2}[rule]
    exact, _ = run(lambda p: RULES[rule](p, lr, states="fp32"), 200)
    found, optimizer = run(lambda p: RULES[rule](p, lr, states=states), 200)
    rms, wanted = (x.square().mean().sqrt().item() for x in (found, exact))
    assert rms < wanted * (2.5 if states == "int4" else 1.15)
    assert found.abs().max().item() < exact.abs().max().item() * (4.0 if states == "int4" else 2.0)
    (parameter,) = optimizer.param_groups[0]["params"]
    assert optimizer.format_of(parameter) == states


@pytest.mark.parametrize("states", FORMATS)
def test_o3_a_coordinate_without_gradient_does_not_move(states: str) -> None:
    """O3: one block with gradient [1, -0.3, 0, ...] for 500 steps: the zeros stay, the others follow Adam."""
    g = torch.zeros(32, 128)
    g[0, 0], g[0, 1] = 1.0, -0.3
    w = nn.Parameter(torch.ones(32, 128))
    optimizer = AdamW([w], lr=1e-3, weight_decay=0.0, states=states)
    for _ in range(500):
        w.grad = g
        optimizer.step()
    moved = w.detach() - 1.0
    assert torch.equal(moved.flatten()[2:], torch.zeros(32 * 128 - 2))
    assert moved[0, :2].tolist() == pytest.approx([-0.5, 0.5], rel=0.12 if states == "int4" else 0.05)


@pytest.mark.parametrize(("beta2", "formats"), [
    (0.95, ("fp8", "int8", "int16")), (0.99, ("fp8", "int8", "int16")), (0.999, ("fp8", "int8"))])
def test_sqrt_v_follows_gradients_that_fall(beta2: float, formats: tuple[str, ...]) -> None:
    """Half of a block's gradients fall 10x: 5 / (1 - beta2) steps later median sqrt(v) is within 5 %."""
    generator = torch.Generator().manual_seed(0)
    weights = {states: nn.Parameter(torch.zeros(16, 256)) for states in formats}
    optimizer = AdamW([{"params": [w], "states": states} for states, w in weights.items()], lr=0.0,
                      betas=(0.9, beta2))
    exact = torch.zeros(16, 256)
    for step in range(30 + int(5 / (1 - beta2))):
        g = torch.randn(16, 256, generator=generator)
        g[:, ::2] *= 1.0 if step < 30 else 0.1
        exact = exact * beta2 + (1 - beta2) * g * g
        for w in weights.values():
            w.grad = g
        optimizer.step()
    for w in weights.values():
        codes, scales = (optimizer.state[w][key] for key in ("exp_avg_sq", "exp_avg_sq_scale"))
        ratio = codes.float() * scales.repeat_interleave(256 // scales.shape[1], dim=1) / exact.sqrt()
        for half in (ratio[:, ::2], ratio[:, 1::2]):
            assert half.median().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_clipped_while_they_are_read(rule: str) -> None:
    """As after clip_grad_norm_ within 2e-6; a short gradient stays as it is; a scale is used once."""
    ours, theirs = (nn.Parameter(torch.ones(SHAPE)) for _ in range(2))
    optimizers = [RULES[rule]([w], lr=1e-2, states="fp32") for w in (ours, theirs)]
    generator = torch.Generator().manual_seed(0)
    for size in (3.0, 1e-3, 2.0):
        for w in (ours, theirs):
            w.grad = size * torch.randn(SHAPE, generator=generator.manual_seed(int(size)))
        norm = optimizers[0].clip_gradients(1.0)
        assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_([theirs], 1.0).item())
        for optimizer in optimizers:
            optimizer.step()
        assert (ours - theirs).abs().max().item() < 2e-6
    ours.grad = theirs.grad = torch.ones(SHAPE)  # without zero_grad, and without a new norm
    for optimizer in optimizers:
        optimizer.step()
    assert (ours - theirs).abs().max().item() < 4e-6
    optimizers[0].clip_gradients(1.0)
    optimizers[0].zero_grad()
    assert optimizers[0].grad_scale is None
    with pytest.raises(Invalid, match="max_norm"):
        optimizers[0].clip_gradients(0.0)


def test_settings_are_checked() -> None:
    """Each bad setting is refused by name."""
    big = nn.Parameter(torch.zeros(64, 64))
    for make, field in (
        (lambda: SGD([big], momentum=1.0), "momentum"),
        (lambda: SGD([big], momentum=0.0, nesterov=True), "nesterov"),
        (lambda: Lion([big], betas=(1.0, 0.9)), "betas"),
        (lambda: AdamW([big], block=100, states="int8"), "block"),
        (lambda: AdamW([big], warmup_steps=-1), "warmup_steps"),
        (lambda: AdamW([big], master=True), "master"),
        (lambda: AdamW([nn.Parameter(torch.zeros(4).double())]), "params"),
        (lambda: Adam([nn.Parameter(torch.zeros(4).half())]), "params"),
    ):
        with pytest.raises(Invalid, match=field):
            make()


def clipped_sgd() -> tuple[nn.Parameter, SGD]:
    """A gradient of norm 64 in steps of lr 1, clipped to 1: the step moves the weight by 1."""
    weight = nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.ones(64, 64)
    optimizer = SGD([weight], lr=1.0, momentum=0.0, states="fp32")
    assert optimizer.clip_gradients(1.0) == 64.0
    return weight, optimizer


def test_a_refused_step_keeps_the_clip() -> None:
    """What was wrong is put right, and the step is clipped as it would have been."""
    weight, optimizer = clipped_sgd()
    optimizer.param_groups[0]["states"] = "fp5"
    with pytest.raises(Invalid, match="states"):
        optimizer.step()
    optimizer.param_groups[0]["states"] = "fp32"
    optimizer.step()
    assert weight.norm().item() == pytest.approx(1.0)


def test_a_copy_keeps_the_clip() -> None:
    """One made between `clip_gradients` and `step` steps as its original does, and clips once."""
    weight, optimizer = clipped_sgd()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    other.grad = torch.ones(64, 64)  # torch copies parameters without theirs
    optimizer.step()
    twin.step()
    assert torch.equal(other, weight)
    twin.step()
    assert (other - weight).norm().item() == pytest.approx(64.0)


def test_a_clip_goes_with_its_gradients() -> None:
    """Also where `model.zero_grad` took them, which tells no optimizer; a scale set by hand stays."""
    weight, optimizer = clipped_sgd()
    weight.grad = torch.ones(64, 64)
    optimizer.step()
    assert weight.norm().item() == pytest.approx(64.0)
    weight.grad, optimizer.grad_scale = torch.ones(64, 64), torch.tensor(64.0)
    optimizer.step()
    assert weight.norm().item() == pytest.approx(65.0)
