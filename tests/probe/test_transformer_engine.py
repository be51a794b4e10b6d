"""TransformerEngine's layers, by stand-ins (engine.py): casts are measured with the scales they used."""

from typing import Any, ClassVar

import pytest
import torch
from tests.probe import engine
from torch import Tensor, nn

import fp8scope
from fp8scope.layers import find_layers
from fp8scope.planned import plan_layers
from fp8scope.precision import precision_map
from fp8scope.roundtrip import round_trip
from fp8scope.scope import Scope
from fp8scope.sums import StepRecord
from fp8scope.testing import MemoryWorker
from fp8scope.transformer_engine import unread
from fp8scope_protocol.formats import E4M3, E5M2, MXFP8, Format
from fp8scope_protocol.recipes import parse_recipes
from fp8scope_protocol.series import Series

Rows = dict[tuple[str, str, str], tuple[Series, Tensor, Tensor]]


def live_rows(record: StepRecord) -> Rows:
    """(name, role, orientation) -> series, counts, maxes, of what layers cast."""
    assert record.layout is not None
    assert record.tables is not None
    return {(one.name, one.role, one.orientation): (one, record.tables.counts[i], record.tables.maxes[i])
            for i, one in enumerate(record.layout.series) if one.live}


def expect(
    found: tuple[Series, Tensor, Tensor], parts: list[Tensor], element: Format, scaling: str,
    scales: list[Tensor] | None = None, *, power_of_two: bool = False,
) -> None:
    """The row of a series is that of the round trips of `parts`, with given scales or current ones."""
    series, counts, maxes = found
    assert (series.format, series.scaling) == (element.name, scaling)
    assert series.policy == ("current" if scales is None else "delayed")
    row = None
    for i, part in enumerate(parts):
        given = None if scales is None else scales[i].reshape(1, 1)
        row = round_trip(part, element, scaling, scales=given, power_of_two=power_of_two, out=row)
    assert row is not None
    assert torch.equal(counts, row.counts)
    assert torch.equal(maxes[:5], row.maxes[:5])


def step(
    scope: Scope, n: int, layer: nn.Module, x: Tensor, recipe: engine.Recipe | None, *more: Any
) -> Tensor:
    """One step of a model of one layer; returns the gradient of its output."""
    kept: list[Tensor] = []
    if recipe is not None:
        with engine.autocast(recipe):
            found = layer(x, *more)
    else:
        found = layer(x, *more)
    y = found[0] if isinstance(found, tuple) else found
    y.register_hook(kept.append)
    (y * torch.linspace(1e-3, 1.0, y.numel()).view_as(y)).square().sum().backward()
    if recipe is not None:
        recipe.update(forward=False)
    scope.step(n)
    return kept[0]


def unobserved(worker: MemoryWorker) -> list[str]:
    events = [event for record in worker.records for event in record.events]
    assert [event.text for event in events if event.kind == "probe_error"] == []
    return [event.text for event in events if event.kind == "unobserved"]


def test_delayed_scales_are_those_that_were_used() -> None:
    """Every step with the scales before its update: forward 448 / amax of the last step, backward likewise in
    E5M2. In the first step they are 1, and what is beyond 448 saturates."""
    torch.manual_seed(0)
    layer, worker, recipe = engine.Linear(64, 32), MemoryWorker(), engine.Recipe("delayed")
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        used = [torch.ones(2), torch.ones(1)]
        for n in range(3):
            x = torch.randn(48, 64) * 300.0 * 2**n
            dy = step(scope, n, layer, x, recipe)
            rows = live_rows(worker.record(n))
            assert rows.keys() == {("0", "activation", "rowwise"), ("0", "activation", "columnwise"),
                                   ("0.weight", "weight", "rowwise"), ("0", "gradient", "rowwise"),
                                   ("0", "gradient", "columnwise")}
            expect(rows["0", "activation", "rowwise"], [x], E4M3, "tensorwise", [1 / used[0][0]])
            expect(rows["0", "activation", "columnwise"], [x.t()], E4M3, "tensorwise", [1 / used[0][0]])
            expect(rows["0.weight", "weight", "rowwise"], [layer.weight.detach()], E4M3, "tensorwise",
                   [1 / used[0][1]])
            expect(rows["0", "gradient", "rowwise"], [dy], E5M2, "tensorwise", [1 / used[1][0]])
            used = [448 / torch.stack([x.abs().max(), layer.weight.detach().abs().max()]),
                    57344 / dy.abs().max().view(1)]
    metrics = worker.metrics(2)["0", "activation", "rowwise"]
    assert metrics["scale_staleness_bits"] > 0.5  # twice the amax
    assert metrics["saturation_ratio"] > 0
    assert unobserved(worker) == []


@pytest.mark.parametrize(("kind", "activations", "weights", "gradients", "power_of_two"), [
    ("current", (E4M3, "tensorwise"), (E4M3, "tensorwise"), (E5M2, "tensorwise"), False),
    ("block", (E4M3, "tile 1x128"), (E4M3, "block 128x128"), (E4M3, "tile 1x128"), True),
    ("mxfp8", (MXFP8, "mx 1x32 rceil"), (MXFP8, "mx 1x32 rceil"), (MXFP8, "mx 1x32 rceil"), False),
])
def test_recipes_with_current_scales(
    kind: str, activations: tuple[Format, str], weights: tuple[Format, str], gradients: tuple[Format, str],
    power_of_two: bool,
) -> None:
    """Each operand in the format and scaling of its quantizer, beside the what-if, which counts once."""
    torch.manual_seed(0)
    layer, worker = engine.Linear(160, 192), MemoryWorker()
    x = torch.randn(64, 160) * torch.exp(2 * torch.randn(64, 160))
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        dy = step(scope, 0, layer, x, engine.Recipe(kind))
    rows = live_rows(worker.record(0))
    assert len(rows) == 5
    for orientation, view in (("rowwise", x), ("columnwise", x.t())):
        expect(rows["0", "activation", orientation], [view], *activations, power_of_two=power_of_two)
    for orientation, view in (("rowwise", dy), ("columnwise", dy.t())):
        expect(rows["0", "gradient", orientation], [view], *gradients, power_of_two=power_of_two)
    expect(rows["0.weight", "weight", "rowwise"], [layer.weight.detach()], *weights,
           power_of_two=power_of_two)
    layout = worker.record(0).layout
    assert layout is not None
    what_ifs = {(one.format, one.scaling) for one in layout.series if not one.live}
    assert what_ifs == (set() if kind == "block" else {("e4m3", "tile 1x128"), ("e4m3", "block 128x128")})


def test_a_forward_in_high_precision_casts_nothing() -> None:
    """Outside of an autocast only what-ifs are measured, also after a forward that was inside."""
    layer, worker = engine.Linear(64, 32), MemoryWorker()
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        for n, recipe in enumerate((None, engine.Recipe("delayed"), None)):
            step(scope, n, layer, torch.randn(16, 64), recipe)
    assert live_rows(worker.record(0)) == {}
    for n, some in ((1, True), (2, False)):
        elements = [int(counts[0]) for _, counts, _ in live_rows(worker.record(n)).values()]
        assert [number > 0 for number in elements] == [some] * 5
    layout, tables = worker.record(2).layout, worker.record(2).tables
    assert layout is not None
    assert tables is not None
    assert [int(tables.counts[i, 0]) for i, one in enumerate(layout.series) if not one.live] == [
        1024, 1024, 512, 512, 2048]


def test_a_normalised_input_is_listed_and_not_mistaken() -> None:
    """`LayerNormLinear`: weight and gradient are measured, its input is no operand, what it also returns is
    none of its outputs' gradients."""
    layer, worker = engine.LayerNormLinear(64, 32), MemoryWorker()
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        dy = step(scope, 0, layer, torch.randn(16, 64), engine.Recipe("current"))
    record = worker.record(0)
    assert record.layout is not None
    assert {one.role for one in record.layout.series} == {"weight", "gradient"}
    rows = live_rows(record)
    expect(rows["0", "gradient", "rowwise"], [dy], E5M2, "tensorwise")
    assert [text.partition(":")[0] for text in unobserved(worker)] == ["activation not observed"]


def test_each_gemm_of_an_mlp_has_its_own_scales() -> None:
    """`LayerNormMLP`: both weights with the scales of theirs; the gradient is that of the second GEMM."""
    torch.manual_seed(0)
    layer, worker, recipe = engine.LayerNormMLP(64, 128), MemoryWorker(), engine.Recipe("delayed")
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        step(scope, 0, layer, torch.randn(16, 64), recipe)
        forward, backward = layer.quantizers["scaling_fwd"], layer.quantizers["scaling_bwd"]
        for i, one in enumerate((*forward, *backward)):
            one.scale.fill_(2.0**i)
        dy = step(scope, 1, layer, torch.randn(16, 64), recipe)
    rows = live_rows(worker.record(1))
    expect(rows["0.fc1_weight", "weight", "rowwise"], [layer.fc1_weight.detach()], E4M3, "tensorwise",
           [torch.tensor(2.0**-1)])
    expect(rows["0.fc2_weight", "weight", "rowwise"], [layer.fc2_weight.detach()], E4M3, "tensorwise",
           [torch.tensor(2.0**-4)])
    expect(rows["0", "gradient", "rowwise"], [dy], E5M2, "tensorwise", [torch.tensor(2.0**-8)])
    assert len(rows) == 4
    assert ["stay inside" in text for text in unobserved(worker)] == [True]


def test_groups_of_rows_have_their_own_scales() -> None:
    """`GroupedLinear`: each expert's rows with its own scale, in one series of the layer; none for an expert
    without tokens, rows of padding in no count. Every weight has a series."""
    torch.manual_seed(0)
    layer, worker = engine.GroupedLinear(3, 64, 32), MemoryWorker()
    x = torch.randn(40, 64) * torch.linspace(1e-3, 1e3, 40).unsqueeze(1)
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        dy = step(scope, 0, layer, x, engine.Recipe("current"), [24, 0, 16])
    rows = live_rows(worker.record(0))
    expect(rows["0", "activation", "rowwise"], [x[:24], x[24:]], E4M3, "tensorwise")
    expect(rows["0", "activation", "columnwise"], [x[:24].t(), x[24:].t()], E4M3, "tensorwise")
    expect(rows["0", "gradient", "rowwise"], [dy[:24], dy[24:]], E5M2, "tensorwise")
    for i in range(3):
        expect(rows[f"0.weight{i}", "weight", "rowwise"], [getattr(layer, f"weight{i}").detach()], E4M3,
               "tensorwise")
    assert unobserved(worker) == []


def test_groups_that_only_the_device_knows_are_listed() -> None:
    """Reading them would wait for it."""
    layer, worker = engine.GroupedLinear(1, 64, 32), MemoryWorker()
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        step(scope, 0, layer, torch.randn(8, 64), engine.Recipe("current"), torch.empty(1, device="meta"))
    record = worker.record(0)
    assert record.layout is not None
    assert {one.role for one in record.layout.series} == {"weight"}
    assert any("m_splits lies on the device" in text for text in unobserved(worker))


class TELinear(engine.Linear):
    """As Megatron derives its own."""


def test_a_subclass_is_read_and_a_returned_bias_is_left_alone() -> None:
    """The bias is a parameter: a hook on it would stay for ever."""
    layer, worker = TELinear(64, 32), MemoryWorker()
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        for n in range(2):
            step(scope, n, layer, torch.randn(8, 64), engine.Recipe("current"))
        assert layer.bias._backward_hooks is None
    assert live_rows(worker.record(1))
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_a_weight_of_codes_is_listed() -> None:
    """Its original is gone; the other operands are measured."""
    layer, worker = engine.Linear(64, 32), MemoryWorker()
    codes = layer.weight.detach().to(torch.float8_e4m3fn)
    layer.weight = nn.Parameter(engine.Float8Tensor(codes, torch.ones(1)))
    assert isinstance(layer.weight, engine.Float8Tensor)
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        step(scope, 0, layer, torch.randn(8, 64), engine.Recipe("current"))
    assert {role for _, role, _ in live_rows(worker.record(0))} == {"activation", "gradient"}
    assert unobserved(worker) == ["weight cannot be read: a Float8Tensor, whose values only its own "
                                  "operations know"]


class Altered:
    """Changes of a layer after its forward, and what is then said."""

    CASES: ClassVar[dict[str, Any]] = {
        "amax is at least 0.0001": lambda layer: setattr(layer.quantizers["scaling_fwd"][0], "amax_epsilon",
                                                         1e-4),
        "amax is that of several ranks": lambda layer: setattr(layer.quantizers["scaling_fwd"][0],
                                                               "with_amax_reduction", True),
        "NVFP4Quantizer is not read": lambda layer: layer.quantizers["scaling_bwd"].__setitem__(
            0, engine.NVFP4Quantizer()),
        "before 2.0": lambda layer: delattr(layer, "quantizers"),
        "the recipe overrides it": lambda layer: setattr(layer.fp8_meta["recipe"], "backward_override",
                                                         "high_precision"),
    }


@pytest.mark.parametrize("words", Altered.CASES)
def test_what_is_not_read_is_said(words: str) -> None:
    """Each by its reason, and without a cast."""
    layer = engine.Linear(64, 32)
    with engine.autocast(engine.Recipe("current")):
        layer(torch.randn(8, 64))
    assert list(unread(layer)) == []
    Altered.CASES[words](layer)
    assert [reason for reason in unread(layer) if words in reason]


def test_a_weight_of_several_parameters_has_no_live_series() -> None:
    """It is cast as one, with one amax; the parts are measured as what-ifs."""
    layer, worker = engine.Linear(64, 32, parts=2), MemoryWorker()
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        step(scope, 0, layer, torch.randn(8, 64), engine.Recipe("current"))
    assert {role for _, role, _ in live_rows(worker.record(0))} == {"activation", "gradient"}
    assert ("0.part1_weight", "weight", "rowwise") in worker.metrics(0)
    assert any("put together from 2 parameters" in text for text in unobserved(worker))


def test_a_weight_that_is_no_matrix_is_listed() -> None:
    """As that of a `GroupedLinear` with one parameter for all experts; the other operands are measured."""
    layer, worker = engine.GroupedLinear(1, 64, 32), MemoryWorker()
    layer.weight0 = nn.Parameter(torch.randn(1, 32, 64))
    layer.product = lambda x, w, gemm=0: engine.Base.product(layer, x, w[0], gemm)  # type: ignore[method-assign]
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        step(scope, 0, layer, torch.randn(8, 64), engine.Recipe("current"), [8])
    assert {role for _, role, _ in live_rows(worker.record(0))} == {"activation", "gradient"}
    assert any("no parameter is a matrix" in text for text in unobserved(worker))
    assert [one.reason for one in fp8scope.diagnose(layer).unobserved]


@pytest.mark.parametrize("made", [False, True])
def test_the_doctor_foretells_the_series(made: bool) -> None:
    """Before a forward in FP8 what-ifs, after it the live series too; what stays hidden is listed."""
    model = nn.ModuleDict({"a": engine.Linear(64, 32), "b": engine.LayerNormLinear(64, 32),
                           "c": engine.LayerNormMLP(64, 32)})
    x, worker, recipe = torch.randn(16, 64), MemoryWorker(), engine.Recipe("delayed")

    def forward() -> Tensor:
        if not made:
            return sum(one(x)[0].sum() if key != "c" else one(x).sum()  # type: ignore[no-any-return]
                       for key, one in model.items())
        with engine.autocast(recipe):
            return sum(one(x)[0].sum() if key != "c" else one(x).sum()  # type: ignore[no-any-return]
                       for key, one in model.items())

    forward()
    plans = plan_layers(model, parse_recipes(("e4m3",)), tokens=16)
    foretold = {plan.series for plan in plans}
    gaps = {one.name: one.reason for one in fp8scope.diagnose(model).unobserved}
    with Scope(model, (), worker=worker, every=1) as scope:
        torch.autograd.backward(forward())
        scope.step(0)
    layout = worker.record(0).layout
    assert layout is not None
    assert foretold == set(layout.series)
    assert any(one.live for one in foretold) == made
    assert gaps.keys() == {"b", "c"}


def test_what_it_runs_in_is_not_taken_for_its_weight() -> None:
    """A series that is live would be drawn as switched to BF16 if its layer were said to run in it."""
    (found,) = precision_map(find_layers(nn.Sequential(engine.Linear(64, 32).bfloat16())))
    assert (found.name, found.precision, found.switchable) == ("0", "autocast", False)
