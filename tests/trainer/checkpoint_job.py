"""One rank of the jobs of the checkpoint tests: `python checkpoint_job.py RANK RANKS STORE PLAN`.

PLAN is a JSON file, a list of runs: each trains from its checkpoint, if it is to load one, to a step, saves
there if it is to, and writes what it found as OUT.RANK. Also imported by the tests, for one process.
"""

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fp8scope
from fp8scope import backend
from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer.adam import Adam
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.checkpoint import load, save
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.data import batch_at
from fp8scope_trainer.decoder import Decoder, DecoderConfig
from fp8scope_trainer.history import AmaxHistory, advance_histories
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.lion import Lion
from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.processes import leave
from fp8scope_trainer.sgd import SGD
from fp8scope_trainer.shard import shard

OPTIMIZERS: dict[str, Any] = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD, "Lion": Lion}
CONFIG = DecoderConfig(width=128, layers=2, heads=2, kv_heads=1, head_width=64, hidden=128, context=32)


class Odd(nn.Module):
    """Rows that no number of ranks divides: 33 on 2 or 4 ranks; 2 leave ranks of 4 with none."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(200, 33)
        self.narrow = nn.Linear(33, 2, bias=False)
        self.table = nn.Parameter(torch.randn(2, 2100))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.wide(x)) @ self.table
        return y


def decoder(plan: dict[str, Any], ranks: int) -> tuple[nn.Module, StateOptimizer]:
    """Of a fixed seed; FP8, one layer under delayed scaling."""
    torch.manual_seed(0)
    model: nn.Module = Decoder(CONFIG)
    convert(model, Conversion(delayed=("layers.1.mlp.gate_up",)))
    shard(model, stage=2 if ranks > 1 else 0)
    kind = OPTIMIZERS[plan.get("optimizer", "AdamW")]
    groups = parameter_groups(model, states=plan["states"], block=plan.get("block"))
    return model, kind(groups, lr=1e-3, seed=7, warmup_steps=plan.get("warm_up", 0))


def odd(plan: dict[str, Any], ranks: int) -> tuple[nn.Module, StateOptimizer]:
    """Of a fixed seed."""
    torch.manual_seed(0)
    model: nn.Module = Odd()
    shard(model, stage=2 if ranks > 1 else 0)
    return model, AdamW(model.parameters(), lr=1e-3, states=plan["states"])


def decoder_loss(model: nn.Module, step: int, rank: int, ranks: int) -> Tensor:
    text = (torch.arange(20_000) * 2654435761 % 251).to(torch.uint8)
    tokens, targets = batch_at(text, step=step, batch=4 // ranks, length=32, rank=rank, ranks=ranks)
    noise = 1e-3 * torch.rand(())  # resumed only if torch's generator is
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) * (1 + noise)


def odd_loss(model: nn.Module, step: int, rank: int, ranks: int) -> Tensor:
    del rank, ranks  # the same data on every rank: the gradients of any number are alike
    x = torch.randn(8, 200, generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(x).square().mean()
    return loss


def run(plan: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """One run of a plan; see `found` for what it returns."""
    make, loss_of = (odd, odd_loss) if plan.get("model") == "odd" else (decoder, decoder_loss)
    model, optimizer = make(plan, ranks)
    at = 0
    loaded = {}
    if "load" in plan:
        one = load(plan["load"], model, optimizer)
        at, loaded = one.step, {"data": one.data_position, "extra": one.extra, "random": one.random_restored}
        loaded["state"] = found(model, optimizer)
    attached = nullcontext() if "spool" not in plan else fp8scope.attach(
        model, optimizer, run="resumed", every=2, collector="offline", spool=plan["spool"], resume=at > 0)
    losses = []
    with attached as scope:
        for step in range(at, plan["stop"]):
            losses.append(step_of(model, optimizer, loss_of(model, step, rank, ranks), step, ranks))
            if scope is not None:
                scope.step(step)
    with torch.no_grad():  # as a job that looks at held-out loss: FSDP2 leaves parameters gathered after it
        model.eval()(torch.zeros((1, 200)) if plan.get("model") == "odd" else torch.zeros(1, 32).long())
        model.train()
    if "save" in plan:
        save(plan["save"], model, optimizer, step=plan["stop"], data_position=plan["stop"] * 4,
             extra={"note": "kept"})
    return {"losses": losses, "loaded": loaded} | found(model, optimizer)


def step_of(model: nn.Module, optimizer: StateOptimizer, loss: Tensor, step: int, ranks: int) -> float:
    """One step; at the fourth the precision of a layer is switched, and stays."""
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (1 + step)
    optimizer.step()
    optimizer.zero_grad()
    advance_histories(model)
    if step == 3 and isinstance(model, Decoder):
        layer = model.get_submodule("layers.0.attention.qkv")
        assert isinstance(layer, Fp8Linear)
        layer.set_precision("bf16")
    mean = loss.detach().clone()
    if ranks > 1:
        dist.all_reduce(mean)
    return mean.item() / ranks


def found(model: nn.Module, optimizer: StateOptimizer) -> dict[str, Any]:
    """Every bit that a job goes on with: parameters, states, weight codes, histories, precisions."""
    model.state_dict()  # FSDP2 lets go of what it had gathered
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = {name: whole(p) for name, p in model.named_parameters()}
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Fp8Linear)}
    codes = {name: backend.quantize_blocks(weights[f"{name}.weight"], E4M3) for name in linears}
    return {
        "parameters": weights,
        "states": {f"{names[id(p)]}.{key}": bits(whole(value)) for p, state in optimizer.state.items()
                   for key, value in state.items()},
        "codes": {name: bits(q.codes) for name, q in codes.items()},
        "scales": {name: q.scales for name, q in codes.items()},
        "histories": {name: (m.amaxes.clone(), torch.tensor(m.cursor)) for name, m in model.named_modules()
                      if isinstance(m, AmaxHistory)},
        "precisions": {name: m.precision for name, m in linears.items()},
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    here = tensor.to_local().detach()
    if tensor.element_size() < 4:  # gloo refuses some of these dtypes
        here = here.view(torch.uint8 if tensor.element_size() == 1 else torch.int16).int()
    like = DTensor.from_local(here, tensor.device_mesh, tensor.placements, run_check=False,
                              shape=tensor.shape, stride=tensor.stride()).full_tensor()
    if tensor.element_size() < 4:
        return like.to(torch.uint8 if tensor.element_size() == 1 else torch.int16).view(tensor.dtype)
    return like.clone()


@contextmanager
def limited_files(size: int | None) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes, as if its disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damage(file: Path) -> None:
    """Flips one bit in its middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def main(rank: int, ranks: int, store: str, plan: str) -> None:
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for one in json.loads(Path(plan).read_text()):
        if "damage" in one and rank == 0:
            damage(next(Path(one["load"]).glob(f"step-*/{one['damage']}")))
        try:
            with limited_files(one.get("limit") if rank else None):
                result = run(one, rank, ranks)
        except Fp8scopeError as error:
            result = {"error": str(error)}
        torch.save(result, f"{one['out']}.{rank}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    leave(0)
