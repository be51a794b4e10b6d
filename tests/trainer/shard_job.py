"""One rank of the jobs of test_shard.py: `python shard_job.py RANK RANKS STORE OUTPUT`.

Also imported by the test, for the same work in one process.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.data import batch_at
from fp8scope_trainer.decoder import Decoder, DecoderConfig
from fp8scope_trainer.history import AmaxHistory, advance_histories
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.shard import shard

CONFIG = DecoderConfig(width=128, layers=2, heads=2, kv_heads=1, head_width=64, hidden=128, context=32)
STEPS = 5
ROWS, COLUMNS = 33, 200
"""Two ranks hold 17 and 16 of these rows."""


def trained(*, rank: int, ranks: int, fp8: bool) -> dict[str, Any]:
    """Five steps on a global batch of four; whole parameters, the mean loss of each step, amax histories."""
    torch.manual_seed(0)
    model: nn.Module = Decoder(CONFIG)
    if fp8:
        convert(model, Conversion(delayed=("layers.1.mlp.gate_up",)))
    shard(model, stage=2 if ranks > 1 else 0)
    optimizer = AdamW(parameter_groups(model, states="fp8" if fp8 else "fp32"), lr=1e-3, eps=1e-5)
    text = (torch.arange(20_000) * 2654435761 % 251).to(torch.uint8)
    losses = []
    for step in range(STEPS):
        if fp8 and step == 3:
            layer = model.get_submodule("layers.0.attention.qkv")
            assert isinstance(layer, Fp8Linear)
            layer.set_precision("shadow")
        tokens, targets = batch_at(text, step=step, batch=4 // ranks, length=32, rank=rank, ranks=ranks)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        advance_histories(model)
        losses.append(mean_over_ranks(loss.detach(), ranks))
    histories = [m.amaxes[:STEPS] for m in model.modules() if isinstance(m, AmaxHistory)]
    return {"losses": losses, "parameters": {n: whole(p) for n, p in model.named_parameters()},
            "histories": histories}


def stepped(*, ranks: int) -> dict[str, Tensor]:
    """Four steps of AdamW on one matrix with the same gradients on any mesh: this rank's codes and scales."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(ROWS, COLUMNS, generator=generator)
    grads = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(4)]
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        start = distribute_tensor(start, mesh, [Shard(0)])
        grads = [distribute_tensor(g, mesh, [Shard(0)]) for g in grads]
    parameter = nn.Parameter(start)
    optimizer = AdamW([parameter], lr=1e-2)
    for g in grads:
        parameter.grad = g
        optimizer.step()
    state = {key: value for key, value in optimizer.state[parameter].items() if key != "step"}
    if ranks > 1:
        assert {value.placements for value in state.values()} == {(Shard(0),)}
        assert state["exp_avg"].shape == (ROWS, COLUMNS)
        assert state["exp_avg_scale"].shape == (ROWS, 2)
    return {key: mine(value) for key, value in state.items()} | {"weight": mine(parameter.detach())}


def mean_over_ranks(loss: Tensor, ranks: int) -> float:
    if ranks > 1:
        dist.all_reduce(loss)
    return loss.item() / ranks


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def mine(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(rank: int, ranks: int, store: str, output: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    results = {
        "fp32": trained(rank=rank, ranks=ranks, fp8=False),
        "fp8": trained(rank=rank, ranks=ranks, fp8=True),
        "stepped": stepped(ranks=ranks),
    }
    torch.save(results, f"{output}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
