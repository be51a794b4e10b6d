"""torchao's Float8Linear, emulated: its live recipe is measured, beside what other formats would do."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope.layers import find_layers
from fp8scope.planned import plan_layers
from fp8scope.precision import precision_map
from fp8scope.quantize import dequantize, quantize
from fp8scope.roundtrip import round_trip
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.formats import E4M3, E5M2, Format
from fp8scope_protocol.recipes import parse_recipes


def converted(recipe: str) -> nn.Module:
    """One Float8Linear, computed in emulation."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs
            library: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        return pytest.skip(f"torchao is not installed: {error}")
    config = library.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Tanh())
    found: nn.Module = library.convert_to_float8_training(model, config=config)
    assert type(found[0]).__name__ == "Float8Linear"  # type: ignore[index]
    return found


@pytest.mark.parametrize(("recipe", "scaling", "gradients", "power_of_two", "in_wgrad"), [
    ("tensorwise", "tensorwise", E5M2, False, True),
    ("rowwise", "rowwise", E4M3, True, True),
    ("rowwise_with_gw_hp", "rowwise", E4M3, True, False),
])
def test_the_live_recipe_is_measured(
    recipe: str, scaling: str, gradients: Format, power_of_two: bool, in_wgrad: bool
) -> None:
    """Every operand that the layer casts has a live series, with the round trip of that very cast."""
    model, worker = converted(recipe), MemoryWorker()
    x = torch.randn(32, 64) * torch.exp(2 * torch.randn(32, 64))
    kept: list[Tensor] = []
    with Scope(model, (), worker=worker, every=1) as scope:
        y = model[0](x)  # type: ignore[index]
        y.register_hook(lambda gradient: kept.append(gradient))
        model[1](y).square().sum().backward()  # type: ignore[index]
        scope.step(0)
    record = worker.record(0)
    assert record.layout is not None
    assert record.tables is not None
    live: dict[tuple[str, str], int] = {
        (one.role, one.orientation): i for i, one in enumerate(record.layout.series) if one.live}
    weight: Tensor = model[0].weight.detach()  # type: ignore[index]
    operands = {("activation", "rowwise"): (x, E4M3), ("weight", "rowwise"): (weight, E4M3),
                ("gradient", "rowwise"): (kept[0], gradients)}
    if in_wgrad:
        operands |= {("activation", "columnwise"): (x.t(), E4M3),
                     ("gradient", "columnwise"): (kept[0].t(), gradients)}
    assert live.keys() == operands.keys()
    for key, (operand, element) in operands.items():
        series = record.layout.series[live[key]]
        assert (series.format, series.scaling) == (element.name, scaling), key
        wanted = round_trip(operand.contiguous(), element, scaling, power_of_two=power_of_two)
        assert torch.equal(record.tables.counts[live[key]], wanted.counts), key
        assert torch.allclose(record.tables.sums[live[key]], wanted.sums, rtol=1e-6), key
    product = dequantize(quantize(x, E4M3, scaling, power_of_two=power_of_two)) @ dequantize(
        quantize(weight, E4M3, scaling, power_of_two=power_of_two)).t()
    assert ((y.detach() - product).norm() / product.norm()).item() < 1e-3  # of other scales it is 0.04 off
    others = {(one.format, one.scaling) for one in record.layout.series if not one.live}
    assert others == {("e4m3", "tile 1x128"), ("e4m3", "block 128x128")}
    assert [e.text for e in record.events if e.kind == "probe_error"] == []
    foretold = {plan.series for plan in plan_layers(model, parse_recipes(("e4m3",)), tokens=32)}
    assert foretold == set(record.layout.series)


def test_what_it_runs_in_is_not_taken_for_its_weight() -> None:
    """A series that is live would be drawn as switched to BF16 if its layer were said to run in it."""
    model = converted("tensorwise").bfloat16()
    assert [one.precision for one in precision_map(find_layers(model))] == ["fp8"]
