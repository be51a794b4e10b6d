"""attn_logit_bound: against the logits themselves, in our decoder and in Hugging Face's models."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_trainer.decoder import Decoder, DecoderConfig

TOKENS = torch.arange(24).view(2, 12)
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(width=64, layers=2, heads=4, kv_heads=2, head_width=16, hidden=64,
                                 context=16))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL))  # type: ignore[arg-type]


def qwen() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL))  # type: ignore[arg-type]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    found = model(tokens)
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits.square().mean()


@pytest.mark.parametrize(("make", "names"), [
    (decoder, ("q_norm", "k_norm")), (qwen, ("q_norm", "k_norm")), (llama, ("q_proj", "k_proj")),
], ids=["ours", "qwen3", "llama"])
def test_the_bound_is_that_of_a_plain_loop(make, names) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Largest query times largest key of each layer, over heads of 16, the worst layer and micro-batch."""
    torch.manual_seed(0)
    model, worker = make(), MemoryWorker()
    seen: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith(names):
            found = seen.setdefault(name, [])
            module.register_forward_hook(lambda _m, _a, y, found=found: found.append(y.detach()))
    with Scope(model, (), worker=worker, every=2) as scope:
        for step in range(2):
            for tokens in (TOKENS, TOKENS + 1):
                loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
            scope.step(step)
    bounds = []
    for name in (one for one in seen if one.endswith(names[0])):
        other = name[:-len(names[0])] + names[1]
        for q, k in zip(seen[name][:2], seen[other][:2], strict=True):
            largest = [max(v.double().norm().item() for v in x.reshape(-1, 16)) for x in (q, k)]
            bounds.append(largest[0] * largest[1] / 4)
    assert len(bounds) == 4
    assert worker.sentinels(0)["attn_logit_bound"] == pytest.approx(max(bounds), rel=1e-5)
    assert "attn_logit_bound" not in worker.sentinels(1)  # not a measured step


class Layer(nn.Module):
    """Attention by name, with or without a known size of heads."""

    def __init__(self, head_dim: int | None) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x) @ self.k_proj(x).transpose(-1, -2)  # type: ignore[no-any-return]


def test_unknown_heads_are_listed() -> None:
    """Not guessed; nothing is reported, and an event says so."""
    model, worker = nn.Sequential(Layer(None)), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        model(torch.randn(3, 8)).sum().backward()
        scope.step(0)
    assert "attn_logit_bound" not in worker.sentinels(0)
    assert any("head_dim" in event.text for record in worker.records for event in record.events)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_counts_once(reentrant: bool) -> None:
    """Both kinds of checkpointing give the plain number; evaluation gives none."""
    torch.manual_seed(0)
    model, worker = nn.Sequential(Layer(4)), MemoryWorker()
    x = torch.randn(3, 8, requires_grad=True)
    with Scope(model, (), worker=worker, every=1) as scope:
        model(x).sum().backward()
        scope.step(0)
        checkpoint(model[0], x, use_reentrant=reentrant).sum().backward()
        scope.step(1)
        model.eval()
        model(x)
        scope.step(2)
    assert worker.sentinels(0)["attn_logit_bound"] == worker.sentinels(1)["attn_logit_bound"]
    assert "attn_logit_bound" not in worker.sentinels(2)
    assert not [e for record in worker.records for e in record.events if e.kind == "probe_error"]


def test_detaching_leaves_no_hook() -> None:
    """As every other hook of the probe."""
    model = decoder()
    Scope(model, (), worker=MemoryWorker(), every=1).close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
