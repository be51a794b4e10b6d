"""What `attach(formats=...)` measures: each role in its scaling, each series once, and nothing impossible."""

from typing import Any

import pytest
import torch
from torch import nn

import fp8scope
from fp8scope.derive import derive
from fp8scope.roundtrip import round_trip
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import FORMATS
from fp8scope_protocol.metrics import floor_of, parse_metric
from fp8scope_protocol.recipes import usual_scaling
from fp8scope_protocol.series import Series

ALL = ("e4m3", "e5m2", "int8", "int4", "mxfp8")

Found = dict[tuple[str, str, str, str], tuple[Series, dict[str, Any]]]
"""(role, orientation, format, scaling) -> the series of the one layer, and its metrics."""


def measured(formats: tuple[str, ...], x: torch.Tensor) -> Found:
    torch.manual_seed(0)
    model, worker = nn.Linear(x.shape[1], 96, bias=False), MemoryWorker()
    optimizer = torch.optim.AdamW(model.parameters())
    with Scope(model, (optimizer,), worker=worker, every=1, formats=formats) as scope:
        model(x).square().sum().backward()
        optimizer.step()
        scope.step(0)
    record = worker.record(0)
    assert record.tables is not None
    assert record.layout is not None
    assert [event for event in record.events if event.kind == "probe_error"] == []
    arrays = derive(record.tables, record.layout)
    return {
        (one.role, one.orientation, one.format, one.scaling):
            (one, {key: column[..., i].tolist() for key, column in arrays.items()})
        for i, one in enumerate(record.layout.series)
    }


def test_every_format_at_once() -> None:
    """Five formats, six roles: one series each, in the usual scaling, measured as often as seen."""
    x = torch.randn(64, 160)
    found = measured(ALL, x)
    wanted = set()
    for name in ALL:
        for role in ("activation", "gradient", "weight", "exp_avg", "exp_avg_sq"):
            sides = ("rowwise", "columnwise") if role in ("activation", "gradient") else ("rowwise",)
            wanted |= {(role, side, name, usual_scaling(FORMATS[name], role)) for side in sides}
    assert set(found) == wanted
    for (role, orientation, name, scaling), (_, metrics) in found.items():
        assert metrics["calls"] == 1
        if role == "activation":
            row = round_trip(x if orientation == "rowwise" else x.t(), FORMATS[name], scaling)
            assert metrics["exponent_histogram"] == row.histogram.tolist()


@pytest.mark.parametrize("name", ALL)
def test_a_healthy_layer_reads_its_floors(name: str) -> None:
    """Gaussian operands: SQNR and the product's error are the catalogue's, in every format."""
    found = measured((name,), torch.randn(256, 4096))
    series, metrics = found["activation", "rowwise", name, usual_scaling(FORMATS[name], "activation")]
    assert metrics["sqnr_db"] == pytest.approx(floor_of(parse_metric("sqnr_db"), series), abs=0.3)
    floor = floor_of(parse_metric("gemm_error"), series)
    assert 0.6 * floor < metrics["gemm_error"] < 1.3 * floor  # the weight is uniform, not Gaussian


def test_scalings_that_are_named_replace_the_usual_ones() -> None:
    """And two recipes of one format stand side by side; what they share is measured once."""
    found = measured(("e4m3", "e4m3/tile 1x128", "int8/flat 64"), torch.randn(32, 160))
    weights = {key[2:]: metrics["calls"] for key, (_, metrics) in found.items() if key[0] == "weight"}
    assert weights == {("e4m3", "block 128x128"): 1, ("e4m3", "tile 1x128"): 1, ("int8", "flat 64"): 1}
    activations = {key[2:]: metrics["calls"] for key, (_, metrics) in found.items() if key[0] == "activation"}
    assert activations == {("e4m3", "tile 1x128"): 1, ("int8", "flat 64"): 1}


def test_q6_the_rounding_of_mx_scales_is_in_the_record() -> None:
    """Q6: both roundings side by side: each series says which it is, and only `floor` saturates."""
    x = torch.ones(64, 160)
    x[:, 7] = 957.0
    found = measured(("mxfp8/mx 1x32 floor", "mxfp8/mx 1x32 rceil"), x)
    saturated = {key[3]: metrics["saturation_ratio"] for key, (_, metrics) in found.items()
                 if key[:2] == ("activation", "rowwise")}
    assert saturated == {"mx 1x32 floor": pytest.approx(1 / 160), "mx 1x32 rceil": 0.0}


@pytest.mark.parametrize(("name", "says"), [
    ("int9", "near misses: int8"), ("int8/tile 1x64", "near misses: tile 1x128"),
    ("int8/mx 1x32 floor", "mxfp8")])
def test_impossible_formats_leave_the_model_alone(name: str, says: str) -> None:
    """One line that names what is near, before a hook is set."""
    model = nn.Linear(4, 4)
    with pytest.raises(Invalid, match=says):
        fp8scope.attach(model, run="r", formats=("e4m3", name), collector="offline")
    assert not model._forward_pre_hooks
