"""Fp8Linear: its gradients, the captured precision, what the observer sees, what is saved."""

import copy
import pickle
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from fp8scope.gemm import WgradSample
from fp8scope.observer import LinearObserver, Switchable
from fp8scope.quantize import dequantize, quantize_blocks, quantize_tiles, scale_of, tile_amax
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer.history import AmaxHistory, advance_histories
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe

MODES = get_args(Precision)


class Recorder(LinearObserver):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.active = True
        self.tensors: dict[tuple[str, str], tuple[Tensor, Tensor, str, str]] = {}
        self.formats: dict[str, str] = {}
        self.gemms: list[tuple[Tensor, ...]] = []

    def tensor(
        self, role: str, orientation: str, x: Tensor, scales: Tensor, *, scaling: str, policy: str,
        power_of_two: bool = False, format: str = "e4m3",
    ) -> None:
        self.formats[role] = format
        self.tensors[role, orientation] = (x.clone(), scales.clone(), scaling, policy)

    def sample(self, x: Tensor, column_scales: Tensor) -> None:
        """Keeps nothing."""

    def wgrad(
        self, dy: Tensor, column_scales: Tensor, sample: WgradSample, *, scaling: str = "tile 1x128",
        format: str = "e4m3",
    ) -> None:
        """Never called: nothing was kept."""

    def gemm(
        self, x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, *,
        scaling: str = "tile 1x128", weight_scaling: str = "block 128x128",
    ) -> None:
        self.gemms.append((x, weight, x_scales, weight_scales))


def layer_of(precision: Precision = "fp8", *, bias: bool = False, recipe: Recipe | None = None) -> Fp8Linear:
    torch.manual_seed(0)
    return Fp8Linear(256, 128, bias=bias, recipe=recipe, precision=precision)


def tokens(count: int = 200, *, seed: int = 1) -> Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed))


def history_of(layer: Fp8Linear) -> AmaxHistory:
    assert layer.history is not None
    return layer.history


@pytest.mark.parametrize("count", [1, 128, 200, 384])
def test_output_and_gradients_are_of_the_quantized_operands(count: int) -> None:
    """For any number of tokens, y, dx and dW equal float64 products of the dequantized operands."""
    layer, x = layer_of(), tokens(count).requires_grad_()
    y = layer(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    torch.autograd.backward(y, dy)
    w = dequantize(quantize_blocks(layer.weight.detach(), E4M3)).double()
    row, column = (dequantize(quantize_tiles(t, E4M3)).double() for t in (x.detach(), x.detach().t()))
    dy_row, dy_column = (dequantize(quantize_tiles(t, E4M3)).double() for t in (dy, dy.t()))
    assert x.grad is not None
    assert layer.weight.grad is not None
    torch.testing.assert_close(y.double(), row @ w.t(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), dy_row @ w, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer.weight.grad.double(), dy_column @ column.t(), rtol=1e-3, atol=1e-3)


def test_bf16_is_close_to_full_precision_and_fp8_is_not() -> None:
    """The switch changes the output: BF16 is within 0.5 % of fp32, FP8 is 2 % to 5 % off."""
    layer, x = layer_of(), tokens()
    exact = nn.functional.linear(x, layer.weight)
    off = {}
    for precision in MODES:
        layer.set_precision(precision)
        off[precision] = ((layer(x) - exact).norm() / exact.norm()).item()
    assert 0.02 < off["fp8"] < 0.05
    assert off["bf16"] < 0.005
    assert off["shadow"] == off["bf16"]


@pytest.mark.parametrize(("first", "then"), [("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "shadow")])
def test_backward_follows_the_precision_of_its_forward(first: Precision, then: Precision) -> None:
    """A switch between forward and backward changes neither gradient of the call that was under way."""
    kept, switched = layer_of(first), layer_of(first)
    gradients = []
    for layer in (kept, switched):
        x = tokens().requires_grad_()
        y = layer(x)
        if layer is switched:
            layer.set_precision(then)
        y.square().sum().backward()
        assert x.grad is not None
        assert layer.weight.grad is not None
        gradients.append((x.grad, layer.weight.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_follows_the_precision_of_its_forward(reentrant: bool) -> None:
    """Under activation checkpointing the recomputed forward runs in the first one's precision and scale."""
    plain, switched = (layer_of("fp8", recipe=Recipe(policy="delayed")) for _ in range(2))
    x, other = tokens().requires_grad_(), tokens().requires_grad_()
    plain(x).square().sum().backward()
    y = checkpoint(switched, other, use_reentrant=reentrant)
    switched.set_precision("bf16")
    assert isinstance(y, Tensor)
    torch.autograd.backward(y.square().sum())
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)
    for layer in (plain, switched):
        advance_histories(layer)
    assert torch.equal(history_of(plain).amaxes, history_of(switched).amaxes)
    assert (switched(x) - nn.functional.linear(x, switched.weight)).abs().max().item() < 0.02


class Counting(Recorder):
    """Counts what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def sums(self, role: str, x: Tensor, *, policy: str) -> None:
        self.calls.append(f"sums of {role}")

    def tensor(self, role: str, orientation: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"{role} {orientation}")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("precision", MODES)
def test_a_split_backward_pass_hands_over_its_gradient_once(precision: Precision, bias: bool) -> None:
    """As zero-bubble schedules run it, the gradients of inputs first and those of weights later: the observer
    hears what it hears in one pass, twice in two micro-batches, and the gradients are the same bits."""
    found = []
    for split in (False, True):
        first, last = layer_of(precision, bias=bias), Fp8Linear(128, 128, precision=precision)
        last.load_state_dict({"weight": torch.ones(128, 128).tril(), "bias": torch.zeros(128)})
        layers, counting = nn.Sequential(first, nn.Tanh(), last), [Counting(), Counting()]
        first.observer, last.observer = counting
        kept, inputs = [], []
        for seed in (1, 2):
            x = tokens(130, seed=seed).requires_grad_()
            y = layers(x)
            dy = torch.ones_like(y) * seed
            inputs.append(x)
            if split:
                kept.append(stage_backward_input([y], [dy], [x], layers.parameters())[1])
            else:
                torch.autograd.backward(y, dy)
        for groups in kept:
            stage_backward_weight(layers.parameters(), groups)
        gradients = [t.grad for t in (*inputs, *layers.parameters()) if t.grad is not None]
        found.append(([one.calls for one in counting], gradients))
    assert found[0][0] == found[1][0]
    assert [calls.count("gradient rowwise") for calls in found[1][0]] == [0 if precision == "bf16" else 2] * 2
    assert len(found[0][1]) == 5 + bias
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one, other)


def test_state_dict_is_that_of_linear() -> None:
    """Keys and values are nn.Linear's, with and without bias and history; each loads the other's."""
    for bias in (False, True):
        layer, linear = layer_of(bias=bias, recipe=Recipe(policy="delayed")), nn.Linear(256, 128, bias=bias)
        assert list(layer.state_dict()) == list(linear.state_dict())
        layer.load_state_dict(linear.state_dict())
        assert torch.equal(layer.weight, linear.weight)
        linear.load_state_dict(layer.state_dict())


def test_bias_is_added_and_trained() -> None:
    """A bias shifts the output and gets the sum of the output's gradient."""
    layer = layer_of(bias=True)
    without = layer_of()
    without.weight = layer.weight
    torch.testing.assert_close(layer(tokens()), without(tokens()) + layer.bias)
    layer(tokens(5)).sum().backward()
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((128,), 5.0))


def test_leading_dimensions_and_empty_inputs() -> None:
    """[2, 3, 256] gives [2, 3, 128]; Q9: no tokens give no output, and a zero gradient."""
    layer = layer_of()
    x = tokens(6)
    assert torch.equal(layer(x.view(2, 3, 256)), layer(x).view(2, 3, 128))
    empty = layer(torch.empty(0, 256))
    empty.sum().backward()
    assert empty.shape == (0, 128)
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_saves_codes_and_not_the_input() -> None:
    """FP8 saves one byte per input element (and its scales); BF16 saves two."""
    sizes = {}
    for precision in MODES:
        layer = layer_of(precision)
        saved: list[Tensor] = []

        def note(t: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            layer(tokens(512).requires_grad_())
        sizes[precision] = sum(t.nbytes for t in saved if t.numel() == 512 * 256)
    assert sizes == {"fp8": 512 * 256, "bf16": 2 * 512 * 256, "shadow": 2 * 512 * 256}


@pytest.mark.parametrize("precision", ["fp8", "shadow"])
@pytest.mark.parametrize("policy", ["current", "delayed"])
def test_observer_gets_the_scales_that_fp8_uses(precision: Precision, policy: str) -> None:
    """In fp8 and in shadow all five operands are handed over, with the live (or would-be) scales."""
    layer = layer_of(precision, recipe=Recipe(policy=policy))
    layer.observer = recorder = Recorder()
    x = tokens()
    layer(x).square().sum().backward()
    assert set(recorder.tensors) == {
        ("activation", "rowwise"), ("activation", "columnwise"), ("weight", "rowwise"),
        ("gradient", "rowwise"), ("gradient", "columnwise"),
    }
    seen, scales, scaling, seen_policy = recorder.tensors["activation", "rowwise"]
    assert torch.equal(seen, x)
    assert (scaling, seen_policy) == ("tile 1x128", policy)
    expected = torch.ones(200, 2) if policy == "delayed" else scale_of(tile_amax(x), E4M3)
    assert torch.equal(scales, expected)
    assert recorder.tensors["activation", "columnwise"][1].shape == (256, 2)
    assert recorder.tensors["gradient", "rowwise"][3] == "current"
    assert recorder.tensors["weight", "rowwise"][1].shape == (1, 2)
    assert [tuple(t.shape) for t in recorder.gemms[0]] == [(200, 256), (128, 256), (200, 2), (1, 2)]


def test_observer_is_silent_in_bf16_and_when_inactive() -> None:
    """Nothing is handed over by a plain BF16 layer, nor to an observer that is not active."""
    layer = layer_of("bf16")
    layer.observer = recorder = Recorder()
    layer(tokens()).sum().backward()
    layer.set_precision("fp8")
    recorder.active = False
    layer(tokens()).sum().backward()
    assert not recorder.tensors
    assert not recorder.gemms


def test_observing_changes_nothing() -> None:
    """Output and gradient are the same bits with and without an observer."""
    for precision in MODES:
        results = []
        for observer in (None, Recorder()):
            layer = layer_of(precision)
            layer.observer = observer
            y = layer(tokens())
            y.square().sum().backward()
            assert layer.weight.grad is not None
            results.append((y, layer.weight.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_p9_copies_and_pickles_are_unobserved() -> None:
    """A deep copy or pickle of an observed layer works and has no observer."""
    layer = layer_of()
    layer.observer = Recorder()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.observer is None
        assert torch.equal(other(tokens()), layer(tokens()))


def test_delayed_scale_comes_from_earlier_steps() -> None:
    """1 at first, then the history's largest amax over 448; a value beyond it saturates."""
    layer = layer_of(recipe=Recipe(policy="delayed", history_length=2, margin=1))
    layer.observer = recorder = Recorder()
    x = tokens(4)
    scales = []
    for factor in (3.0, 1.0, 1.0, 1.0):
        layer(x * factor)
        advance_histories(layer)
        scales.append(float(recorder.tensors["activation", "rowwise"][1].flatten()[0]))
    amax = float(x.abs().max())
    assert scales == pytest.approx([1.0, 2 * 3 * amax / 448, 2 * 3 * amax / 448, 2 * amax / 448])


def test_delayed_history_goes_on_in_shadow() -> None:
    """Shadow steps feed the history, so that a return to FP8 finds a fitting scale; BF16 steps do not."""
    expected: dict[Precision, bool] = {"shadow": True, "bf16": False}
    for precision, fed in expected.items():
        layer = layer_of(precision, recipe=Recipe(policy="delayed"))
        layer(tokens())
        advance_histories(layer)
        assert bool(history_of(layer).amaxes.any()) is fed


def test_evaluation_leaves_the_history_alone() -> None:
    """Text that is only evaluated has no say in the scale."""
    layer = layer_of(recipe=Recipe(policy="delayed")).eval()
    layer(tokens())
    assert not history_of(layer).pending.any()


def test_one_infinity_does_not_blind_the_history() -> None:
    """The amax of a tensor with an Inf or NaN is not taken into the history; the output shows it."""
    layer = layer_of(recipe=Recipe(policy="delayed"))
    bad = tokens()
    bad[0, 0] = torch.inf
    y = layer(bad)
    advance_histories(layer)
    assert not history_of(layer).amaxes.any()
    assert bool(y[0].isnan().all())
    assert bool(y[1:].isfinite().all())


def test_shape_and_settings_are_checked() -> None:
    """Sizes that are no multiples of 128, precisions and recipes that do not exist are refused by name."""
    with pytest.raises(Invalid, match="in_features 130: not a multiple of 128"):
        Fp8Linear(130, 128)
    with pytest.raises(Invalid, match="must be one of fp8, bf16, shadow"):
        layer_of().set_precision("fp4")  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="must be 1 to 1024 steps"):
        Recipe(history_length=1025)
    with pytest.raises(Invalid, match="must be one of current, delayed"):
        Recipe(policy="late")


def test_is_switchable() -> None:
    """The probe finds the layer by the protocol of switchable layers."""
    assert isinstance(layer_of(), Switchable)


def test_autocast_gives_the_autocast_dtype() -> None:
    """Under autocast the output is BF16 and the fp32 emulation is not cast down on the way."""
    layer, x = layer_of(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, layer(x.bfloat16()), rtol=0, atol=0)
