"""The tensorwise recipe: one scale a tensor, current or delayed, E5M2 gradients where asked."""

from typing import Any

import pytest
import torch
from tests.trainer.test_linear import Recorder
from torch import Tensor

from fp8scope.quantize import dequantize, quantize
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, E5M2, FORMATS, Format
from fp8scope_trainer import gemm
from fp8scope_trainer.history import advance_histories
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.tensor import quantize_tensor

needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="FP8 GEMMs need compute capability 8.9",
)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs compute capability 9.0",
)


def layer_of(**options: Any) -> Fp8Linear:
    torch.manual_seed(0)
    return Fp8Linear(256, 128, bias=False, recipe=Recipe(scaling="tensorwise", **options))


def operand(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if kind == "positive":
        return x.abs()
    if kind == "outliers":
        x[::5, ::7] *= 1e3
    return x


def decoded(x: Tensor, element: Format = E4M3, scale: Tensor | None = None) -> Tensor:
    return dequantize(quantize(x.detach(), element, "tensorwise", scales=scale)).double()


def relative(found: Tensor | None, exact: Tensor) -> float:
    assert found is not None
    return float((found.detach().double().cpu() - exact.cpu()).norm() / exact.norm())


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["random", "positive", "outliers"])
@pytest.mark.parametrize("count", [1, 128, 130])
def test_products_are_of_the_quantized_operands(count: int, kind: str, gradient: str) -> None:
    """For any number of tokens, y, dx and dW are the float64 products of the dequantized operands."""
    layer, x = layer_of(gradient_format=gradient), operand(kind, count, 256, 1).requires_grad_()
    dy = operand(kind, count, 128, 2)
    y = layer(x)
    y.backward(dy)
    w, d = decoded(layer.weight), decoded(dy, FORMATS[gradient])
    assert relative(y, decoded(x) @ w.t()) < 1e-6
    assert relative(x.grad, d @ w) < 1e-6
    assert relative(layer.weight.grad, d.t() @ decoded(x)) < 1e-6


def test_an_outlier_costs_the_whole_tensor() -> None:
    """What tensorwise scaling gives up: a value of 1e6 takes the ordinary ones below the smallest code."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 1e6
    block = Fp8Linear(256, 128, bias=False)
    errors = {}
    for name, layer in {"block": block, "tensorwise": layer_of()}.items():
        layer.weight = block.weight
        exact = (x[1:].double() @ layer.weight.double().t()).detach()
        errors[name] = relative(layer(x)[1:], exact)
    assert errors["block"] < 0.05
    assert errors["tensorwise"] > 0.5


def test_delayed_scales_come_from_histories() -> None:
    """1 at first; then the largest amax of earlier steps over the format's largest, times 2^margin, for the
    activation and, in E5M2, for the gradient. The weight keeps its current scale."""
    layer = layer_of(policy="delayed", margin=1, gradient_format="e5m2")
    layer.observer = recorder = Recorder()
    x, dy = operand("random", 128, 256, 1), operand("random", 128, 128, 2)
    scales = []
    for factor in (4.0, 1.0):
        layer(x * factor).backward(dy * factor)
        advance_histories(layer)
        scales.append({role: seen[1].item() for (role, _), seen in recorder.tensors.items()})
    assert scales[0]["activation"] == scales[0]["gradient"] == 1.0
    assert scales[1]["activation"] == pytest.approx(2 * 4 * x.abs().max().item() / 448)
    assert scales[1]["gradient"] == pytest.approx(2 * 4 * dy.abs().max().item() / 57344)
    assert scales[1]["weight"] == pytest.approx(layer.weight.abs().max().item() / 448)
    assert {key: seen[2:] for key, seen in recorder.tensors.items()} == {
        ("activation", "rowwise"): ("tensorwise", "delayed"),
        ("weight", "rowwise"): ("tensorwise", "current"),
        ("gradient", "rowwise"): ("tensorwise", "delayed")}
    assert recorder.formats == {"activation": "e4m3", "weight": "e4m3", "gradient": "e5m2"}


@pytest.mark.parametrize("precision", ["fp8", "shadow"])
def test_histories_hear_of_training_only(precision: Any) -> None:
    """Both go on in shadow, and neither hears of an evaluation, of an Inf, or of a step in BF16."""
    layer = layer_of(policy="delayed")
    assert layer.history is not None
    assert layer.gradient_history is not None
    layer.set_precision(precision)
    x = operand("random", 128, 256, 1)
    bad = x.clone()
    bad[3, 3] = torch.inf
    layer.eval()(x)
    layer.train()(bad).sum().backward()
    assert layer.history.pending.item() == 0
    assert layer.gradient_history.pending.item() == 1
    layer(x).mul(3).sum().backward()
    assert layer.history.pending.item() == x.abs().max().item()
    assert layer.gradient_history.pending.item() == 3
    advance_histories(layer)
    layer.set_precision("bf16")
    layer(x).sum().backward()
    assert layer.history.pending.item() == layer.gradient_history.pending.item() == 0


@pytest.mark.parametrize("policy", ["current", "delayed"])
def test_what_is_not_finite_is_seen_downstream(policy: str) -> None:
    """One Inf: every output and every gradient of the weight is NaN, and `sanitize` is asked for."""
    x = operand("random", 128, 256, 1)
    x[3, 3] = torch.inf
    layer = layer_of(policy=policy)
    y = layer(x)
    y.sum().backward()
    assert bool(y.isnan().all())
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isnan().all())
    clean = layer_of(policy=policy, sanitize=True)
    x[3, 3], zeroed = torch.nan, x.clone()
    zeroed[3, 3] = 0.0
    assert torch.equal(clean(x), layer_of(policy=policy)(zeroed))


def test_saves_one_byte_an_element() -> None:
    """Codes of X^T and of W, and two scales; nothing in high precision."""
    layer = layer_of()
    saved: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        layer(torch.randn(512, 256, requires_grad=True))
    assert sorted(t.nbytes for t in saved) == [4, 4, 128 * 256, 512 * 256]


def test_evaluation_makes_no_codes_for_backward() -> None:
    """Nothing is kept without gradients, and the output is the same."""
    layer, x = layer_of(), operand("random", 130, 256, 1)
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    layer.weight.requires_grad_(False)
    frozen = layer(x.requires_grad_())
    frozen.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


def test_what_does_not_go_together_is_refused() -> None:
    """By field, value and rule."""
    for options, rule in (
        ({"scaling": "rowwise"}, "must be one of block, tensorwise"),
        ({"gradient_format": "e5m2"}, "goes with scaling tensorwise"),
        ({"gradient_format": "int8"}, "must be one of e4m3, e5m2"),
        ({"wgrad_activation": "row"}, "must be one of tile, block"),
        ({"wgrad_activation": "block", "scaling": "tensorwise"}, "goes with scaling block"),
        ({"margin": 9}, "must be 0 to 8 bits"),
        ({"margin": 0.5}, "must be 0 to 8 bits"),
        ({"history_length": True}, "must be 1 to 1024 steps"),
        ({"power_of_two": 1}, "must be True or False"),
        ({"sanitize": "yes"}, "must be True or False"),
    ):
        with pytest.raises(Invalid, match=rule):
            Recipe(**options)


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("kind", ["random", "positive", "outliers"])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda one: one.name)
@pytest.mark.parametrize(("rows", "shared", "columns"), [
    (128, 256, 384), (130, 384, 128), (1, 640, 256), (256, 130, 128), (256, 65_536, 128)])
def test_the_gemm_multiplies_the_dequantized_operands(
    rows: int, shared: int, columns: int, element: Format, kind: str
) -> None:
    """On the GPU, without fast accumulation; odd sizes are padded; K up to 65,536."""
    a = quantize_tensor(operand(kind, rows, shared, 0).cuda(), element)
    b = quantize_tensor(operand(kind, columns, shared, 1).cuda(), E4M3)
    exact = (a.codes.double() * a.scale.double()) @ (b.codes.double() * b.scale.double()).t()
    for dtype, most in ((torch.float32, 1e-3), (torch.bfloat16, 4e-3)):
        found = gemm.tensorwise(a.codes, a.scale, b.codes, b.scale, dtype=dtype)
        assert (found.dtype, found.shape) == (dtype, (rows, columns))
        assert relative(found, exact) < most


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize("policy", ["current", "delayed"])
@pytest.mark.parametrize("count", [130, 512])
def test_a_layer_on_the_gpu(count: int, policy: str, gradient: str, dtype: torch.dtype) -> None:
    """y, dx and dW are near the products of the dequantized operands; fast accumulation costs y 1 % at most.
    """
    layer = layer_of(gradient_format=gradient, policy=policy).to("cuda", dtype)
    x = operand("random", count, 256, 1).to("cuda", dtype).requires_grad_()
    dy = operand("random", count, 128, 2).to("cuda", dtype)
    for _ in range(2):
        x.grad = layer.weight.grad = None
        scale = None if layer.history is None else layer.history.scale()
        ahead = None if layer.gradient_history is None else layer.gradient_history.scale()
        y = layer(x)
        y.backward(dy)
        advance_histories(layer)
    w, d, dx = decoded(layer.weight), decoded(dy, FORMATS[gradient], ahead), decoded(x, E4M3, scale)
    assert relative(y, dx @ w.t()) < 1e-2
    assert relative(x.grad, d @ w) < 5e-3
    assert relative(layer.weight.grad, d.t() @ dx) < 5e-3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("policy", ["current", "delayed"])
def test_an_infinity_reaches_the_output_on_the_gpu(policy: str) -> None:
    """A NaN scale makes the whole product NaN."""
    layer = layer_of(policy=policy).to("cuda", torch.bfloat16)
    x = operand("random", 256, 256, 1).to("cuda", torch.bfloat16)
    x[3, 3] = torch.inf
    y = layer(x)
    y.sum().backward()
    assert bool(y.isnan().all())
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isnan().all())
