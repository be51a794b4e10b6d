"""Weights of fused experts: each expert's matrix is a series, also where the experts are sharded."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import MixtralConfig, MixtralForCausalLM

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker

EXPERTS, WORLD = 4, 2


class Fused(nn.Module):
    """Every expert sees every token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_experts = EXPERTS
        self.w1 = nn.Parameter(torch.randn(EXPERTS, 16, 32))
        self.scale = nn.Parameter(torch.ones(3, 1, 1))  # of three dimensions, but not of experts

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("tk,enk->etn", x, self.w1) * self.scale[0]


def measured(model: nn.Module, worker: MemoryWorker, steps: int = EXPERTS) -> dict[str, dict[str, Any]]:
    """Name -> metrics of weights, over detailed steps, and in which."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Scope(model, (optimizer,), worker=worker, every=1, detail_every=1):
        for _ in range(steps):
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
    return {key[0]: values | {"step": step} for step in range(steps)
            for key, values in worker.metrics(step).items() if key[1] == "weight" and values["elements"]}


def check(found: dict[str, dict[str, Any]], experts: range) -> None:
    """One expert a step, in turn, each with its own numbers."""
    whole = Fused().w1.detach()
    assert list(found) == [f"w1[{i}]" for i in experts]
    for i in experts:
        assert (found[f"w1[{i}]"]["step"], found[f"w1[{i}]"]["elements"]) == (i, 16 * 32)
        assert found[f"w1[{i}]"]["amax"] == pytest.approx(whole[i].abs().max().item())
        assert found[f"w1[{i}]"]["rms"] == pytest.approx(whole[i].square().mean().sqrt().item(), rel=1e-5)


def test_each_expert_is_a_series() -> None:
    """`w1[2]` is the third matrix; a parameter that is not as deep as there are experts is none."""
    check(measured(Fused(), MemoryWorker()), range(EXPERTS))


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model = Fused()
    fully_shard(model)
    found = measured(model, MemoryWorker(rank=rank, world=WORLD))
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def test_sharded_experts_keep_their_numbers(tmp_path: Path) -> None:
    """FSDP2 gives two experts to each rank: the second one's are the third and the fourth."""
    run_ranks(train, str(tmp_path), ranks=WORLD)
    for rank in range(WORLD):
        check(pickle.loads((tmp_path / str(rank)).read_bytes()), range(2 * rank, 2 * rank + 2))


def test_experts_of_transformers_are_listed_and_measured() -> None:
    """Mixtral's: what is not seen of them is said, and no fault is."""
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2))
    model.train()
    worker, optimizer = MemoryWorker(), torch.optim.SGD(model.parameters(), lr=0.0)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        tokens = torch.randint(0, 64, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        scope.step(0)
        holding = scope._part.holding(model)
    names = {name for name, role, _ in worker.metrics(0) if role == "weight" and "experts" in name}
    assert names == {f"model.layers.0.mlp.experts.{which}_proj[0]" for which in ("gate_up", "down")}
    reasons = {one.name: one.reason for one in holding.unobserved}
    assert "only their weights are measured" in reasons["model.layers.0.mlp.experts"]
    assert [event for event in worker.record(0).events if event.kind == "probe_error"] == []
