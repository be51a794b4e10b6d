"""What an FP8 layer cannot do, said in its own words, and linears that `convert` leaves or refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe


def layer() -> Fp8Linear:
    return Fp8Linear(256, 128)


@pytest.mark.parametrize("compile_it", [False, True])
def test_an_input_of_another_width_is_refused_by_name(compile_it: bool) -> None:
    """With its shape and the width that is wanted; an input of no dimension, too."""
    torch._dynamo.reset()
    call = torch.compile(layer(), backend="eager") if compile_it else layer()
    with pytest.raises(Exception, match=r"input.shape.*\(5, 128\).*must end in 256"):
        call(torch.randn(5, 128))
    with pytest.raises(Exception, match="must end in 256"):
        call(torch.tensor(1.0))


def test_float64_is_refused() -> None:
    """FP8 products are made from fp32 at most: an input, a layer, and a layer that became one."""
    with pytest.raises(Invalid, match=r"input.dtype.*float64"):
        layer()(torch.randn(5, 256, dtype=torch.float64))
    with pytest.raises(Invalid, match=r"dtype.*float64"):
        Fp8Linear(256, 128, dtype=torch.float64)
    with pytest.raises(Invalid, match=r"weight.dtype.*float64"):
        layer().double()(torch.randn(5, 256))
    with pytest.raises(Invalid, match=r"input.dtype.*int64"):
        layer()(torch.ones(5, 256, dtype=torch.int64))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_second_derivative_is_refused_where_it_is_prepared(precision: Any) -> None:
    """A gradient that could be differentiated again would lose the layer on the way, without a word."""
    one = layer()
    one.set_precision(precision)
    x = torch.randn(5, 256, requires_grad=True)
    with pytest.raises(Invalid, match=r"create_graph.*Fp8Linear has no second derivative"):
        torch.autograd.grad(one(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("transform", [
    lambda call, x: torch.func.vmap(call)(x),
    lambda call, x: torch.func.grad(lambda t: call(t).sum())(x),
], ids=["vmap", "grad"])
def test_transforms_of_torch_func_are_refused(transform: Callable[[nn.Module, Tensor], object]) -> None:
    """Before anything is computed."""
    with pytest.raises(Invalid, match=r"torch\.func"):
        transform(layer(), torch.randn(3, 5, 256))


def test_a_second_convert_asks_for_the_same_or_is_refused() -> None:
    """Nothing is changed by either; new linears are converted; the filter says what is not meant."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    convert(model)
    first = model[0]
    model.append(nn.Linear(128, 128))
    with pytest.raises(Invalid, match=r"0.*is an Fp8Linear already"):
        convert(model, Conversion(recipe=Recipe(scaling="tensorwise")))
    with pytest.raises(Invalid, match=r"1.*is an Fp8Linear already"):
        convert(model, Conversion(delayed=("1",)))
    with pytest.raises(Invalid, match=r"0.*is an Fp8Linear already"):
        convert(model, Conversion(precision="bf16"))
    assert type(model[2]) is nn.Linear
    assert convert(model).converted == ("0", "1", "2")
    assert model[0] is first
    model.append(nn.Linear(128, 128))
    convert(model, Conversion(recipe=Recipe(scaling="tensorwise")), lambda name, _: name == "3")
    assert isinstance(model[3], Fp8Linear)
    assert model[3].recipe.scaling == "tensorwise"


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_linears_of_another_kind_are_left_with_the_reason() -> None:
    """A lazy one, whose sizes are not known; fp64; a subclass, whose forward is its own affair."""
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(nn.LazyLinear(128), nn.Linear(128, 128, dtype=torch.float64), Scaled(128, 128))
    left = convert(model).left
    for number, words in enumerate(("not known before its first forward", "fp64", "a Scaled")):
        assert left[str(number)].startswith("requested fp8, not converted: ")
        assert words in left[str(number)]


class Listed(nn.Module):
    """Calls its layers by references that are no modules of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(128, 128) for _ in range(4))
        self.steps = [self.one, {"two": (self.two,)}]
        self.call = self.three.forward
        self.steps.append(self.steps)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.four(self.call(self.steps[0](x)))  # type: ignore[operator]
        return y


def test_linears_that_are_called_past_their_place_are_left_with_the_reason() -> None:
    """In a list, in a dict in it, by a method that was kept: the copy that is called would not be the FP8
    layer of the report."""
    model = Listed()
    report = convert(model)
    assert report.converted == ("four",)
    assert report.left.keys() == {"one", "two", "three"}
    assert "also held in steps" in report.left["two"]
    assert "also held in call" in report.left["three"]
    assert model.steps[0] is model.one
