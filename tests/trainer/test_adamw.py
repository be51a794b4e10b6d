"""AdamW: against a float64 reference, with fp32 and with E4M3 moments."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.convert import convert
from fp8scope_trainer.decoder import Decoder, DecoderConfig

SHAPE = (48, 200)  # 9,600 elements; rows end in a tile of 72


def gradients(steps: int, *, decades: float = 0.0, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    """Noise whose size is log-uniform over `decades` inside every row."""
    generator = torch.Generator().manual_seed(3)
    size = 10 ** (-decades * torch.rand(shape, generator=generator))
    return [torch.randn(shape, generator=generator) * size for _ in range(steps)]


def reference(start: Tensor, grads: list[Tensor], *, lr: float, betas: tuple[float, float]) -> Tensor:
    """Textbook AdamW in float64, no clipping; weight decay 0.1."""
    w, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for t, g in enumerate((g.double() for g in grads), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        u = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + 1e-8)
        w = w - lr * (u + 0.1 * w)
    return w


def trained(start: Tensor, grads: list[Tensor], **options: Any) -> tuple[nn.Parameter, AdamW]:
    parameter = nn.Parameter(start.clone())
    optimizer = AdamW([parameter], **options)
    for g in grads:
        parameter.grad = g
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_fp32_moments_give_textbook_adamw(betas: tuple[float, float]) -> None:
    """50 steps with fp32 moments are within 1e-5 of float64, relative to the change."""
    start, grads = 0.01 * torch.randn(SHAPE), gradients(50)
    w, _ = trained(start, grads, lr=1e-3, betas=betas, states="fp32")
    exact = reference(start, grads, lr=1e-3, betas=betas)
    assert ((w.double() - exact).norm() / (exact - start).norm()).item() < 1e-5


@pytest.mark.parametrize("decades", [0.0, 4.0])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_e4m3_moments_stay_close(decades: float, betas: tuple[float, float]) -> None:
    """Over 200 steps the change has the right length (5 %) and direction, over 4 decades of gradients too."""
    start, grads = torch.zeros(SHAPE), gradients(200, decades=decades)
    w, optimizer = trained(start, grads, lr=1e-3, betas=betas)
    change, exact = w.detach().double().flatten(), reference(start, grads, lr=1e-3, betas=betas).flatten()
    assert 0.95 < (change.norm() / exact.norm()).item() < 1.05
    assert torch.cosine_similarity(change, exact, dim=0).item() > 0.985
    assert optimizer.step_stats is not None
    assert optimizer.step_stats.update_max.item() < 3


def test_second_moment_follows_falling_gradients() -> None:
    """Half of a tile's gradients fall 10x: 400 steps later sqrt(v) is right within 3 % in the mean.

    Rounding to nearest would leave it where it was: a step moves it by 0.5 %, less than half a code.
    """
    generator = torch.Generator().manual_seed(0)
    grads = []
    for step in range(500):
        g = torch.randn(32, 128, generator=generator).sign()
        g[:, 64:] *= 1.0 if step < 100 else 0.1
        grads.append(g)
    w, optimizer = trained(torch.zeros(32, 128), grads, lr=0.0, betas=(0.9, 0.99))
    state = optimizer.state[w]
    root = state["exp_avg_sq"].float() * state["exp_avg_sq_scale"]
    expected = (0.01 * (1 - 0.99**400) + (1 - 0.99**100) * 0.99**400) ** 0.5
    assert root[:, 64:].mean().item() == pytest.approx(expected, rel=0.03)


def test_o3_a_coordinate_without_gradient_does_not_move() -> None:
    """O3: one block with gradient [1, -0.3, 0, ...] for 500 steps: the zeros stay, the others follow Adam."""
    grads = [torch.zeros(32, 128) for _ in range(500)]
    for g in grads:
        g[0, 0], g[0, 1] = 1.0, -0.3
    start = torch.ones(32, 128)
    w, _ = trained(start, grads, lr=1e-3, weight_decay=0.0)
    moved = w.detach() - start
    assert torch.equal(moved.flatten()[2:], torch.zeros(32 * 128 - 2))
    assert moved[0, :2].tolist() == pytest.approx([-0.5, 0.5], rel=0.05)


def test_o3_a_coordinate_whose_gradient_ends_comes_to_rest() -> None:
    """O3: after its gradient has ended a coordinate coasts by Adam's own momentum and then stays.

    With m rounded to nearest it would drift on by up to 3 lr a step: 0.9 of the smallest code is that code.
    """
    grads = [torch.full((32, 128), 1.0) for _ in range(600)]
    for g in grads[20:]:
        g[:, 0] = 0.0
    w, _ = trained(torch.zeros(32, 128), grads, lr=1e-3, weight_decay=0.0)
    adam = reference(torch.zeros(32, 128), grads[:300], lr=1e-3, betas=(0.9, 0.95))[0, 0].item()
    assert (w[:, 0] - adam).abs().max().item() < 0.01


def test_updates_are_clipped_and_the_share_reported() -> None:
    """A damaged second moment moves a weight by 3 lr, not by hundreds, and shows in the statistics."""
    parameter = nn.Parameter(torch.zeros(32, 128))
    optimizer = AdamW([parameter], lr=0.1, betas=(0.9, 0.999), weight_decay=0.0, states="fp32")
    parameter.grad = torch.ones(32, 128)
    optimizer.step()
    before = parameter.detach().clone()
    optimizer.state[parameter]["exp_avg_sq"][0].zero_()
    parameter.grad = torch.zeros(32, 128)
    optimizer.step()
    assert (before - parameter)[0].tolist() == pytest.approx([0.3] * 128)
    stats = optimizer.step_stats
    assert stats is not None
    assert stats.update_max.item() > 1e6
    assert stats.clipped_share.item() == pytest.approx(1 / 32)
    assert stats.v_zero_share is not None
    assert stats.v_zero_share.item() == pytest.approx(1 / 32)


def test_statistics_of_a_step() -> None:
    """update_max, and ||lr u|| / ||w|| over all parameters, as computed by hand from the weights."""
    w, optimizer = trained(torch.full(SHAPE, 2.0), gradients(1), lr=1e-2, weight_decay=0.0)
    stats = optimizer.step_stats
    assert stats is not None
    moved = (w.detach() - 2.0).norm() / torch.full(SHAPE, 2.0).norm()
    assert stats.update_weight_ratio.item() == pytest.approx(moved.item(), rel=1e-4)
    assert stats.update_max.item() == pytest.approx(1.0, rel=1e-3)
    assert stats.v_zero_share is not None
    assert stats.v_zero_share.item() == stats.clipped_share.item() == 0.0


def test_formats_follow_the_rule_and_o5_the_override() -> None:
    """O5: E4M3 for matrices of linears; fp32 for embedding, head, norms, and groups that say so."""
    shape = DecoderConfig(width=128, layers=1, heads=2, kv_heads=1, head_width=64, hidden=128, context=8)
    model = Decoder(shape)
    convert(model)
    optimizer = AdamW(parameter_groups(model), lr=1e-3)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        expected = "fp8" if name.startswith("layers") and parameter.dim() == 2 else "fp32"
        assert optimizer.format_of(parameter) == expected, name
        dtype = torch.float8_e4m3fn if expected == "fp8" else torch.float32
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {dtype}, name
    late = nn.Parameter(torch.randn(SHAPE))
    optimizer.add_param_group({"params": [late], "states": "fp32"})
    late.grad = torch.randn(SHAPE)
    optimizer.step()
    assert optimizer.state[late]["exp_avg"].dtype == torch.float32
    with pytest.raises(Invalid, match="must be one of fp32, bf16, int16, fp8, int8, int4"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(SHAPE))], "states": "int3"})


def test_save_and_load_keeps_codes_and_the_future() -> None:
    """A loaded optimizer has the same code bytes, fp32 scales and dtypes, and takes the same next steps."""
    start, grads = torch.randn(SHAPE), gradients(10, decades=2)
    w, optimizer = trained(start, grads[:5], lr=1e-3)
    parameter = nn.Parameter(w.detach().clone())
    other = AdamW([parameter], lr=1e-3)
    other.load_state_dict(state_dict=optimizer.state_dict())
    for key, value in optimizer.state[w].items():
        loaded = other.state[parameter][key]
        assert loaded.dtype == value.dtype, key
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key
        assert loaded.data_ptr() != value.data_ptr(), key
    for g in grads[5:]:
        w.grad = parameter.grad = g
        optimizer.step()
        other.step()
    assert torch.equal(w, parameter)


def test_codes_survive_loading_into_bf16_parameters() -> None:
    """torch would cast codes and scales to the parameter's dtype; scales stay fp32 here."""
    parameter = nn.Parameter(torch.randn(SHAPE).bfloat16())
    optimizer = AdamW([parameter], lr=1e-3)
    parameter.grad = gradients(1)[0].bfloat16()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    for key, value in saved["state"][0].items():
        assert optimizer.state[parameter][key].dtype == value.dtype, key


def test_loading_other_formats_is_an_error() -> None:
    """fp32 states are not loaded into an E4M3 optimizer unnoticed."""
    _, optimizer = trained(torch.randn(SHAPE), gradients(1), states="fp32")
    with pytest.raises(Invalid, match=r"must be what this optimizer's groups have: \['fp8'\]"):
        AdamW([nn.Parameter(torch.randn(SHAPE))]).load_state_dict(optimizer.state_dict())


class Recorder:
    """A StateObserver that keeps what it is handed."""

    active = True

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Tensor, Tensor, Tensor, str, str]] = {}

    def state(self, parameter: Tensor, role: str, x: Tensor, scales: Tensor, *, scaling: str, rounding: str,
              format: str, codes: Tensor) -> None:
        self.seen[role] = (x, scales, codes, scaling, rounding)


def test_observer_gets_what_was_stored() -> None:
    """Both moments with the very codes that the state holds, rounded stochastically: within a code of x."""
    parameter = nn.Parameter(torch.randn(SHAPE))
    optimizer = AdamW([parameter])
    optimizer.observer = recorder = Recorder()
    parameter.grad = gradients(1)[0]
    optimizer.step()
    assert {role: seen[3:] for role, seen in recorder.seen.items()} == {
        "exp_avg": ("tile 1x128", "stochastic"), "exp_avg_sq": ("tile 1x128", "stochastic"),
    }
    for role, (x, scales, codes, _, _) in recorder.seen.items():
        assert torch.equal(codes.view(torch.uint8), optimizer.state[parameter][role].view(torch.uint8))
        wide = scales.repeat_interleave(128, dim=1)[:, :200]
        assert ((codes.float() * wide - x).abs() <= x.abs() / 8 + wide * 2.0**-9).all()


def test_settings_are_checked() -> None:
    """Each bad setting is refused by name."""
    bad: dict[str, Any] = {"lr": -1.0, "betas": (0.9, 1.0), "eps": 0.0, "weight_decay": -0.1, "clip": 0.0}
    for name, value in bad.items():
        with pytest.raises(Invalid, match=name):
            AdamW([nn.Parameter(torch.zeros(2))], **{name: value})
