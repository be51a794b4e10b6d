"""convert(): which layers become FP8, which stay, and why."""

import pytest
import torch
from torch import nn

from fp8scope.layers import find_layers
from fp8scope.precision import precision_map
from fp8scope_protocol.errors import UnknownName
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.decoder import Decoder, DecoderConfig, demo
from fp8scope_trainer.linear import Fp8Linear


def small() -> Decoder:
    shape = DecoderConfig(width=128, layers=2, heads=2, kv_heads=1, head_width=64, hidden=128, context=16)
    return Decoder(shape)


def test_converts_every_linear_but_the_head() -> None:
    """Four linears a layer become FP8 and own the very parameters they had; embedding, norms, head stay."""
    model = small()
    before = dict(model.named_parameters())
    report = convert(model)
    assert len(report.converted) == 8
    assert report.left == {"head": "output head"}
    assert type(model.head) is nn.Linear
    assert isinstance(model.get_submodule("layers.1.attention.qkv"), Fp8Linear)
    assert dict(model.named_parameters()) == before


def test_f2_a_layer_that_cannot_run_in_fp8_is_left_and_says_why() -> None:
    """130 columns: the layer stays, the map and the probe show its real dtype and the reason."""
    model = nn.Sequential(nn.Linear(130, 128), nn.Linear(128, 67), nn.Linear(128, 128))
    report = convert(model)
    assert report.left == {
        "0": "in_features 130: not a multiple of 128",
        "1": "out_features 67: not a multiple of 128",
    }
    assert [layer.precision for layer in report.layers] == ["fp32", "fp32", "fp8"]
    assert "0  fp32   in_features 130" in str(report)
    shown = {one.name: one.reason for one in precision_map(find_layers(model))}
    assert shown == {**report.left, "2": ""}


def test_tied_head_stays_with_its_embedding() -> None:
    """A linear that shares its weight with an embedding stays, whatever its name."""
    model = nn.ModuleDict({"tokens": nn.Embedding(256, 128), "classify": nn.Linear(128, 256, bias=False)})
    model["classify"].weight = model["tokens"].weight
    assert convert(model).left == {"classify": "shares its weight with an embedding"}


def test_filter_and_patterns() -> None:
    """A filter leaves layers out; a delayed pattern selects exactly; one that matches nothing is an error."""
    model = small()
    report = convert(model, Conversion(delayed=("layers.1.mlp.*",)), lambda name, _: "attention" not in name)
    assert report.left["layers.0.attention.qkv"] == "left out by the filter"
    policies = {n: m.recipe.policy for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert policies == {
        "layers.0.mlp.gate_up": "current", "layers.0.mlp.down": "current",
        "layers.1.mlp.gate_up": "delayed", "layers.1.mlp.down": "delayed",
    }
    with pytest.raises(UnknownName, match=r"near misses: layers\.1"):
        convert(small(), Conversion(delayed=("layers.2.mlp.down",)))


def test_bf16_start_is_switchable() -> None:
    """Layers can start in BF16 and be sent to FP8."""
    model = small()
    convert(model, Conversion(precision="bf16"))
    layer = model.get_submodule("layers.0.mlp.down")
    assert isinstance(layer, Fp8Linear)
    x = torch.randn(4, 128)
    in_bf16 = layer(x)
    layer.set_precision("fp8")
    assert not torch.equal(in_bf16, layer(x))


def test_demo_model_converts_completely() -> None:
    """Every linear of the demo but its head can run in FP8."""
    with torch.device("meta"):
        model = Decoder(demo())
    assert len(convert(model).converted) == 16
