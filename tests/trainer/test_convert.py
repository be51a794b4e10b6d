"""convert(): which layers become FP8, which stay, and why."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from fp8scope.layers import find_layers
from fp8scope.precision import precision_map
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.decoder import Decoder, DecoderConfig, demo
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.shared import SharedCodes


def small() -> Decoder:
    shape = DecoderConfig(width=128, layers=2, heads=2, kv_heads=1, head_width=64, hidden=128, context=16)
    return Decoder(shape)


def test_converts_every_linear_but_the_head() -> None:
    """Four linears a layer become FP8 and own the very parameters they had; embedding, norms, head stay."""
    model = small()
    before = dict(model.named_parameters())
    report = convert(model)
    assert len(report.converted) == 8
    assert "layers.1.attention: softmax" in str(report)
    assert report.left == {"head": "output head"}
    assert type(model.head) is nn.Linear
    assert isinstance(model.get_submodule("layers.1.attention.qkv"), Fp8Linear)
    assert dict(model.named_parameters()) == before


def test_f2_a_layer_that_cannot_run_in_fp8_is_left_and_says_why() -> None:
    """130 columns: the layer stays, the map and the probe show its real dtype and the reason."""
    model = nn.Sequential(nn.Linear(130, 128), nn.Linear(128, 67), nn.Linear(128, 128))
    report = convert(model)
    assert report.left == {
        "0": "requested fp8, not converted: in_features 130: not a multiple of 128",
        "1": "requested fp8, not converted: out_features 67: not a multiple of 128",
    }
    assert [layer.precision for layer in report.layers] == ["fp32", "fp32", "fp8"]
    assert "0  fp32   requested fp8, not converted: in_features 130" in str(report)
    emulated = "requested fp8, running fp32 products of FP8 codes: no block FP8 GEMM on this cpu"
    model[1].to(torch.bfloat16)
    shown = {one.name: (one.precision, one.reason) for one in precision_map(find_layers(model))}
    assert shown == {"0": ("fp32", report.left["0"]), "1": ("bf16", report.left["1"]), "2": ("fp8", emulated)}
    last = model[2]
    assert isinstance(last, Fp8Linear)
    last.set_precision("bf16")
    assert precision_map(find_layers(model))[2].reason == ""


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


@pytest.mark.parametrize("scaling", ["block", "tensorwise"])
def test_a_llama_of_transformers_trains(scaling: str) -> None:
    """Five steps lower the loss; all linears of its layers run in FP8, the head and what holds no linear say
    what they run in."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, use_cache=False))
    report = convert(model, Conversion(recipe=Recipe(scaling=scaling)))
    assert len(report.converted) == 14
    assert report.left == {"lm_head": "output head"}
    assert [one.name for one in report.operations] == [
        f"model.layers.{i}.self_attn: softmax" for i in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, losses = torch.randint(64, (4, 32)), []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_routers_stay_in_high_precision_whatever_their_size() -> None:
    """B8: a router of 128 experts would fit; it is left, as are experts that share one tensor."""
    class Mixture(nn.Module):
        num_experts = 128

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(128, 128), nn.Linear(128, 128)

    report = convert(Mixture())
    assert report.converted == ("up",)
    assert report.left["gate"].startswith("router: ")
    mixtral = convert(MixtralForCausalLM(MixtralConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=4)))
    assert mixtral.left["model.layers.0.mlp.gate"].startswith("router: ")
    assert "experts that lie in one tensor" in mixtral.left["model.layers.0.mlp.experts"]


class Attention(nn.Module):
    """Three projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(128, 128, bias=False) for _ in range(3))

    def forward(self, x: Tensor, *, between: float | None = None) -> Tensor:
        q = self.q(x)
        if between is not None:
            x.mul_(between)
        return q + self.k(x) * self.v(x)  # type: ignore[no-any-return]


def attention(scaling: str, *, shared: bool = True) -> Attention:
    torch.manual_seed(0)
    model = Attention()
    convert(model, Conversion(recipe=Recipe(scaling=scaling)))
    if not shared:
        for layer in model.children():
            layer.shared = None  # type: ignore[assignment]
    return model


def shared_of(layer: nn.Module) -> SharedCodes:
    assert isinstance(layer, Fp8Linear)
    assert layer.shared is not None
    return layer.shared


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Of distinct tensors as large as x."""
    saved: dict[int, Tensor] = {}

    def note(t: Tensor) -> Tensor:
        if t.numel() == x.numel() and t.element_size() == 1:
            saved[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model(x)
    return sum(t.nbytes for t in saved.values())


@pytest.mark.parametrize("scaling", ["block", "tensorwise"])
def test_one_input_is_saved_once(scaling: str) -> None:
    """Query, key and value save one byte an element together, with the gradients of three copies."""
    x = torch.randn(256, 128)
    assert saved_bytes(attention(scaling), x.clone().requires_grad_()) == x.numel()
    assert saved_bytes(attention(scaling, shared=False), x.clone().requires_grad_()) == 3 * x.numel()
    gradients = []
    for model in (attention(scaling), attention(scaling, shared=False)):
        given = x.clone().requires_grad_()
        model(given).square().sum().backward()
        gradients.append([given.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("scaling", ["block", "tensorwise"])
def test_an_input_changed_in_place_is_another_input(scaling: str) -> None:
    """Its codes are its own; nothing is kept of an input or of codes that are gone."""
    found = []
    for shared in (True, False):
        model = attention(scaling, shared=shared)
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
        model(x, between=3.0).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    model = attention(scaling)
    y = model(torch.randn(256, 128))
    kept = shared_of(model.q)._kept
    assert kept is not None
    assert kept.input() is None
    assert kept.codes() is not None
    del y
    assert kept.codes() is None


def test_copies_share_among_themselves_only() -> None:
    """A copy of a model has a place of its own for shared codes, empty at first, and pickles."""
    model = attention("block")
    y = model(torch.randn(256, 128))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert shared_of(other.q) is shared_of(other.k) is shared_of(other.v)
        assert shared_of(other.q) is not shared_of(model.q)
        assert shared_of(other.q)._kept is None
    del y


@pytest.mark.parametrize("reentrant", [False, True])
def test_sharing_goes_with_checkpointing(reentrant: bool) -> None:
    """Gradients are the same bits with a recomputed forward."""
    gradients = []
    for checkpointed in (True, False):
        model = attention("tensorwise")
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        torch.autograd.backward(y.square().sum())
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_layer_that_is_used_twice_stays_one() -> None:
    """Both of its places hold the same FP8 layer, which is in the map once."""
    linear = nn.Linear(128, 128)
    model = nn.Sequential(linear, nn.ReLU(), linear)
    report = convert(model)
    assert isinstance(model[0], Fp8Linear)
    assert model[0] is model[2]
    assert len(report.layers) == 1


def test_hooks_stay_and_can_be_removed() -> None:
    """Forward and backward hooks of a linear are those of the FP8 layer, and their handles still work."""
    linear, seen = nn.Linear(128, 128), []
    handles = [linear.register_forward_pre_hook(lambda *_: seen.append("pre")),
               linear.register_forward_hook(lambda *_: seen.append("forward")),
               linear.register_full_backward_hook(lambda *_: seen.append("backward"))]
    model = nn.Sequential(linear)
    convert(model)
    model(torch.ones(4, 128, requires_grad=True)).sum().backward()
    assert seen == ["pre", "forward", "backward"]
    for handle in handles:
        handle.remove()
    model(torch.ones(4, 128))
    assert len(seen) == 3


def test_a_bare_linear_is_refused() -> None:
    """There is nothing that it could be replaced in."""
    with pytest.raises(Invalid, match=r"convert nn\.Sequential"):
        convert(nn.Linear(128, 128))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_linears_that_would_lose_something_are_left_with_the_reason() -> None:
    """A weight that a hook computes or that is complex, a replaced forward, a buffer, a child; the plain one
    beside them is converted."""
    computed = nn.utils.weight_norm(nn.Linear(128, 128))
    patched, buffered, adapted = (nn.Linear(128, 128) for _ in range(3))
    patched.forward = patched.forward  # type: ignore[method-assign]
    buffered.register_buffer("gain", torch.ones(1))
    adapted.lora = nn.Linear(2, 2)
    odd = [computed, nn.Linear(128, 128, dtype=torch.complex64), patched, buffered, adapted]
    model = nn.Sequential(*odd, nn.Linear(128, 128))
    keys = set(model.state_dict())
    left = convert(model).left
    for number, words in enumerate(("computed", "complex", "forward", "gain", "lora")):
        assert words in left[str(number)]
        assert model[number] is odd[number]
    assert isinstance(model[5], Fp8Linear)
    assert set(model.state_dict()) == keys
