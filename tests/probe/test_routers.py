"""Sentinels of a mixture of experts' routers: against direct formulas, and on models from their classes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from fp8scope.routers import entropy_share, find_routers
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker

EXPERTS, WIDTH = 4, 32
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


class Mixture(nn.Module):
    """The smallest one: one expert a token."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y[chosen == i] = expert(x[chosen == i]) * best[chosen == i, None]
        return x + y


def direct(logits: Tensor) -> float:
    """Mean over tokens of -sum p log p, over log E."""
    p = logits.detach().double().softmax(-1)
    return float(-(p * p.log()).sum(-1).mean() / math.log(logits.shape[-1]))


def measured(model: nn.Module, *batches: Tensor, every: int = 1) -> MemoryWorker:
    worker = MemoryWorker()
    with Scope(model, (), worker=worker, every=every) as scope:
        for step, x in enumerate(batches):
            model(x).square().mean().backward()
            scope.step(step)
    return worker


def test_the_lowest_router_and_the_largest_logit_are_told() -> None:
    """Of two routers, one four times as sure: its entropy and its logit, against direct formulas. A step that
    is not measured has neither."""
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(), Mixture())
    first, second = model
    assert isinstance(second, Mixture)
    with torch.no_grad():
        second.gate.weight *= 4
    x = torch.randn(64, WIDTH)
    worker = measured(model, x, x, every=2)
    logits = second.gate(first(x))
    assert direct(logits) < direct(model.get_submodule("0.gate")(x))
    found = worker.sentinels(0)
    assert found["router_entropy"] == pytest.approx(direct(logits), rel=1e-5)
    assert found["router_logit_max"] == pytest.approx(logits.abs().max().item(), rel=1e-6)
    assert not {"router_entropy", "router_logit_max"} & worker.sentinels(1).keys()


def test_ends_of_the_scale() -> None:
    """1 where all experts are alike, 0 where one is sure, also in bf16 and where others are masked."""
    assert entropy_share(torch.zeros(8, EXPERTS)).item() == pytest.approx(1.0)
    sure = torch.full((8, EXPERTS), -math.inf, dtype=torch.bfloat16)
    sure[:, 1] = 3.0
    assert entropy_share(sure).item() == 0.0
    assert math.isnan(entropy_share(torch.full((8, EXPERTS), math.nan)).item())


def test_a_nan_in_a_router_is_told_as_one() -> None:
    """Entropy NaN, not 0; the largest logit is infinite."""
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    x[3] = math.nan
    found = measured(Mixture(), x).sentinels(0)
    assert math.isnan(found["router_entropy"])
    assert found["router_logit_max"] == math.inf


def test_q9_experts_without_tokens_and_a_router_without_any() -> None:
    """Q9: rows of idle experts have the count 0 and no ratio; no tokens at all are no entropy."""
    torch.manual_seed(0)
    model = Mixture()
    with torch.no_grad():
        model.gate.weight.zero_()  # all alike: everything goes to expert 0
    worker = measured(model, torch.randn(16, WIDTH), torch.zeros(0, WIDTH))
    found = worker.metrics(0)
    assert found["experts.0", "activation", "rowwise"]["elements"] == 16 * WIDTH
    for i in range(1, EXPERTS):
        row = found[f"experts.{i}", "activation", "rowwise"]
        assert row["elements"] == 0
        assert not {"underflow_ratio", "zero_ratio", "distortion", "amax", "rms"} & row.keys()
    assert worker.sentinels(0)["router_entropy"] == pytest.approx(1.0)
    assert "router_entropy" not in worker.sentinels(1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_routers_count_once(reentrant: bool) -> None:
    """What is computed again is the same: the numbers are those of the plain run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.body[1], self.body[0](x), use_reentrant=reentrant)
            return y

    x = torch.randn(16, WIDTH)
    plain = measured(model, x).sentinels(0)
    again = measured(Checkpointed(), x).sentinels(0)
    for name in ("router_entropy", "router_logit_max"):
        assert again[name] == plain[name]


@pytest.mark.parametrize("make", [
    lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=EXPERTS, num_experts_per_tok=2)),
    lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, num_experts=EXPERTS, num_experts_per_tok=2,
                                               moe_intermediate_size=16, shared_expert_intermediate_size=16)),
], ids=("mixtral", "qwen2-moe"))
def test_routers_of_transformers_are_found(make: object) -> None:
    """Models from their configurations: one router a layer, with the entropy of its own logits."""
    torch.manual_seed(0)
    model = make()  # type: ignore[operator]
    model.train()
    with torch.no_grad():  # some are made with zeros
        for _, router, _ in find_routers(model):
            router.weight.normal_()  # type: ignore[operator]
    names = [name for name, _, _ in find_routers(model)]
    assert names == [f"model.layers.{i}.mlp.gate" for i in range(2)]
    worker, logits = MemoryWorker(), []
    with Scope(model, (), worker=worker, every=1) as scope:
        for _, router, _ in find_routers(model):
            router.register_forward_hook(lambda module, args, output: logits.append(output[0]))
        tokens = torch.randint(0, 64, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        scope.step(0)
    found = worker.sentinels(0)
    assert found["router_entropy"] == pytest.approx(min(map(direct, logits)), rel=1e-5)
    assert found["router_logit_max"] == pytest.approx(max(x.abs().max().item() for x in logits), rel=1e-6)
    assert not [event for event in worker.record(0).events if "router" in event.text]
