"""The trainer's own FP8 layers and optimizer report to the probe: live series, live scales, live codes."""

import pytest
import torch
from torch import nn

from fp8scope.planned import plan_layers
from fp8scope.quantize import quantize_tiles
from fp8scope.roundtrip import round_trip
from fp8scope.scope import Scope
from fp8scope.sums import COUNT_COLUMNS
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.commands import Command, SetPrecision
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.state_format import StateFormat


def model_of(recipe: Recipe | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Fp8Linear(128, 256, recipe=recipe), nn.ReLU(), Fp8Linear(256, 128))


def test_live_series_describe_what_the_layer_did() -> None:
    """Counts equal those of the quantizer the layer calls; every operand is there, in both orientations."""
    model, worker = model_of(), MemoryWorker()
    x = torch.randn(130, 128) * torch.exp(2 * torch.randn(130, 128))
    with Scope(model, (), worker=worker, every=1) as scope:
        model(x).square().sum().backward()
        scope.step(0)
    record = worker.record(0)
    assert record.layout is not None
    assert record.tables is not None
    of_first = {(s.role, s.orientation, s.scaling): i for i, s in enumerate(record.layout.series)
                if s.module == "0"}
    assert {s.live for s in record.layout.series} == {True}
    assert set(of_first) == {
        ("activation", "rowwise", "tile 1x128"), ("activation", "columnwise", "tile 1x128"),
        ("gradient", "rowwise", "tile 1x128"), ("gradient", "columnwise", "tile 1x128"),
        ("weight", "rowwise", "block 128x128")}
    wanted = round_trip(x, E4M3, "tile 1x128", scales=quantize_tiles(x, E4M3).scales)
    row = record.tables.row(of_first["activation", "rowwise", "tile 1x128"])
    assert torch.equal(row.counts, wanted.counts)
    assert torch.equal(row.sums, wanted.sums)
    assert [e for e in record.events if e.kind == "probe_error"] == []
    assert 0.02 < worker.metrics(0)["0", "activation", "rowwise"]["gemm_error"] < 0.06


def test_a_light_step_has_the_sums_of_the_quantizer() -> None:
    """Outside of detailed steps the quantizer measures what it quantizes, once, with the numbers of a round
    trip; only what a light step measures is there."""
    model, worker = model_of(Recipe(power_of_two=True)), MemoryWorker()
    x = torch.randn(130, 128) * torch.exp(2 * torch.randn(130, 128))
    with Scope(model, (), worker=worker, every=1, detail_every=2) as scope:
        for step in range(2):
            model(x).square().sum().backward()
            scope.step(step)
    record = worker.record(1)
    assert record.layout is not None
    assert record.tables is not None
    of_first = {(s.role, s.orientation): i for i, s in enumerate(record.layout.series) if s.module == "0"}
    wanted = round_trip(x, E4M3, "tile 1x128", power_of_two=True, histogram=False)
    row = record.tables.row(of_first["activation", "rowwise"])
    assert torch.equal(row.counts, wanted.counts)
    assert torch.equal(row.sums, wanted.sums)
    assert worker.metrics(1)["0", "gradient", "rowwise"]["calls"] == 1
    assert worker.metrics(1)["0", "activation", "columnwise"]["elements"] == 0


def test_shadow_goes_on_measuring() -> None:
    """A command sends the layer to BF16; its FP8 numbers go on, so that a return can be judged."""
    model, worker = model_of(), MemoryWorker()
    worker.commands[0] = (
        Command(id=1, action=SetPrecision(modules=("0",), precision="bf16"), issued_by="user"),)
    with Scope(model, (), worker=worker, every=1) as scope:
        for step in range(4):
            model(torch.randn(128, 128)).square().sum().backward()
            scope.step(step)
    assert model[0].precision == "shadow"
    for step in range(4):
        row = worker.metrics(step)["0", "activation", "rowwise"]
        assert (row["calls"], row["elements"]) == (1, 128 * 128)
        assert 30 < row["sqnr_db"] < 34


def test_delayed_scales_show_their_staleness() -> None:
    """Under delayed scaling the policy is in the series, and a frozen scale shows in layer and sentinel."""
    model, worker = model_of(Recipe(policy="delayed")), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        model(torch.full((128, 128), 896.0)).sum().backward()  # the history is empty: scale 1, one bit short
        scope.step(0)
    row = worker.metrics(0)["0", "activation", "rowwise"]
    assert row["scale_staleness_bits"] == 1.0
    assert row["saturation_ratio"] == 1.0
    assert worker.sentinels(0)["scale_staleness_bits"] == 1.0
    layout = worker.record(0).layout
    assert layout is not None
    assert {s.policy for s in layout.series if s.module == "0" and s.role == "activation"} == {"delayed"}


@pytest.mark.parametrize("sampled", [True, False])
def test_quantized_states_report_their_codes(sampled: bool) -> None:
    """AdamW's E4M3 states: live rows in sampled steps, with their rounding; its own update numbers."""
    model, worker = model_of(), MemoryWorker()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with Scope(model, (optimizer,), worker=worker, every=1 if sampled else 7, start_step=0 if sampled else 1):
        for _ in range(2):
            model(torch.randn(128, 128)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    last = worker.records[-1]
    sentinels = worker.sentinels(last.step)
    assert sentinels["update_max"] == pytest.approx(1.0, rel=0.2)
    assert 0 < sentinels["update_weight_ratio"] < 1
    assert sentinels["v_zero_share"] == 0.0
    if not sampled:
        assert last.tables is None
        return
    assert last.layout is not None
    assert last.tables is not None
    states = {s.role: (s, i) for i, s in enumerate(last.layout.series) if s.name == "0.weight"}
    assert set(states) == {"weight", "exp_avg", "exp_avg_sq"}
    assert states["exp_avg_sq"][0].rounding == "stochastic"
    zero_codes = last.tables.counts[:, COUNT_COLUMNS.index("zero_codes")]
    codes = optimizer.state[next(model.parameters())]["exp_avg"]
    assert zero_codes[states["exp_avg"][1]] == int((codes.float() == 0).sum())
    assert optimizer.observer is None


@pytest.mark.parametrize(("states", "block", "m", "root"), [
    ("int8", 256, ("int8", "rowwise"), "uint8, rowwise"), ("int4", 64, ("int4", "flat 64"), "uint4, flat 64"),
    ("int16", 256, None, "int16, rowwise")])
def test_integer_states_are_told_as_what_they_are(
    states: str, block: int, m: tuple[str, str] | None, root: str
) -> None:
    """m in signed codes is measured, with the zero codes that are stored; what has no quantizer is named."""
    model, worker = model_of(), MemoryWorker()
    optimizer = AdamW(model.parameters(), lr=1e-3, states=states, block=block)
    with Scope(model, (optimizer,), worker=worker, every=1):
        for _ in range(2):
            model(torch.randn(128, 128)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    last = worker.records[-1]
    assert last.layout is not None
    assert last.tables is not None
    rows = {(s.format, s.scaling): i for i, s in enumerate(last.layout.series)
            if s.name == "0.weight" and s.role == "exp_avg" and s.live}
    assert set(rows) == ({m} if m else set())
    if m:
        weight = next(model.parameters())
        stored = StateFormat.of(states, block).unpacked(optimizer.state[weight]["exp_avg"], 128, root=False)
        zeros = last.tables.counts[rows[m], COUNT_COLUMNS.index("zero_codes")]
        assert zeros == int((stored == 0).sum())
    told = [event.text for record in worker.records for event in record.events if event.kind == "unobserved"]
    assert f"exp_avg_sq is stored as {root}" in told
    assert not [event for record in worker.records for event in record.events if event.kind == "probe_error"]


@pytest.mark.parametrize("policy", ["current", "delayed"])
@pytest.mark.parametrize("detail", [1, 2])
def test_one_scale_a_tensor_is_measured_as_it_is(policy: str, detail: int) -> None:
    """Series say tensorwise and the gradient's E5M2; numbers are those of the round trip under that scale,
    in detailed steps and in light ones, and the errors of both products are there."""
    model = model_of(Recipe(scaling="tensorwise", gradient_format="e5m2", policy=policy))
    worker, x = MemoryWorker(), torch.randn(130, 128) * torch.exp(2 * torch.randn(130, 128))
    with Scope(model, (), worker=worker, every=1, detail_every=detail) as scope:
        for step in range(2):
            model(x).square().sum().backward()
            scope.step(step)
    record = worker.record(1)
    assert record.layout is not None
    assert record.tables is not None
    assert [e for e in record.events if e.kind == "probe_error"] == []
    of_first = {(s.role, s.orientation): (s, i) for i, s in enumerate(record.layout.series)
                if s.module == "0"}
    assert {key: (s.format, s.scaling, s.policy) for key, (s, _) in of_first.items()} == {
        ("activation", "rowwise"): ("e4m3", "tensorwise", policy),
        ("weight", "rowwise"): ("e4m3", "tensorwise", "current"),
        ("gradient", "rowwise"): ("e5m2", "tensorwise", policy)}
    scales = torch.ones(1, 1) if policy == "delayed" else None
    wanted = round_trip(x, E4M3, "tensorwise", scales=scales, histogram=detail == 1)
    row = record.tables.row(of_first["activation", "rowwise"][1])
    assert torch.equal(row.counts, wanted.counts)
    assert torch.equal(row.sums, wanted.sums)
    first = worker.metrics(0)
    assert 0 < first["0", "activation", "rowwise"]["gemm_error"] < 1
    assert 0 < first["0", "gradient", "rowwise"]["wgrad_row_error_max"] < 1


@pytest.mark.parametrize("recipe", [
    Recipe(), Recipe(policy="delayed"), Recipe(wgrad_activation="block"),
    Recipe(scaling="tensorwise", gradient_format="e5m2"), Recipe(scaling="tensorwise", policy="delayed")])
def test_a_plan_foretells_what_a_layer_hands_over(recipe: Recipe) -> None:
    """The series of a plan are those of a step, in every recipe."""
    model, worker = model_of(recipe), MemoryWorker()
    planned = {plan.series for plan in plan_layers(model, (), tokens=130)}
    with Scope(model, (), worker=worker, every=1) as scope:
        model(torch.randn(130, 128)).square().sum().backward()
        scope.step(0)
    layout = worker.record(0).layout
    assert layout is not None
    assert planned == set(layout.series)
