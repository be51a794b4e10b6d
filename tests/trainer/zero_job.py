"""One rank of the jobs of test_zero.py: `python zero_job.py RANK RANKS FOLDER DEVICE`.

Also imported by the test, for the same work in one process.
"""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

import fp8scope
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.communication import Traffic
from fp8scope_trainer.convert import convert
from fp8scope_trainer.data import batch_at
from fp8scope_trainer.decoder import Decoder, DecoderConfig
from fp8scope_trainer.fp8_gather import GatheredWeight
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.memory import model_state
from fp8scope_trainer.mesh import training_mesh
from fp8scope_trainer.recipe import Recipe, quantize_weight
from fp8scope_trainer.shard import micro_batch, shard

CONFIG = DecoderConfig(width=128, layers=2, heads=2, kv_heads=2, head_width=64, hidden=128, context=16)
CUT = DecoderConfig(width=128, layers=2, heads=8, kv_heads=4, head_width=32, hidden=256, context=16)
"""Two ranks can share its layers, in FP8 too."""
STEPS, SEQUENCES = 3, 8
STAGES: tuple[int | str, ...] = ("NO_SHARD", 1, "shard_grad_op", 3, "Hybrid_Shard")
Found = dict[str, Any]


def trained(
    stage: int | str, *, rank: int, ranks: int, accumulate: int = 1, probe: bool = False,
    evaluate: bool = False, tensor: int = 1, cut: bool = False,
    fp8: bool = False, fp8_gather: bool = False, compute: torch.dtype | None = None, switch: str = "",
    device: str = "cpu",
) -> Found:
    """The decoder in fp32, or with FP8 layers, on eight sequences a step, however they are dealt out."""
    torch.manual_seed(0)
    model: nn.Module = Decoder(CUT if cut or tensor > 1 else CONFIG).to(device)
    if fp8:
        convert(model)
    placed(model, stage, ranks, tensor, device, fp8_gather=fp8_gather, compute=compute)
    rank, ranks = rank // tensor, ranks // tensor  # those of one tensor group get the same sequences
    optimizer = AdamW(parameter_groups(model, states="fp32"), lr=1e-3, eps=1e-5)
    text = (torch.arange(20_000) * 2654435761 % 251).to(torch.uint8)
    losses, gradients = [], 0
    with fp8scope.attach(model, optimizer, run="zero", every=1, collector="offline", budget=None
                         ) if probe else nullcontext() as scope:
        for step in range(STEPS):
            if switch:
                layer = model.get_submodule("layers.1.mlp.gate_up")
                assert isinstance(layer, Fp8Linear)
                layer.set_precision(switch if step == 1 else "fp8")  # type: ignore[arg-type]
            tokens, targets = batch_at(text, step=step, batch=SEQUENCES // ranks, length=CONFIG.context,
                                       rank=rank, ranks=ranks)
            tokens, targets = tokens.to(device), targets.to(device)
            total = torch.zeros((), device=device)
            parts = zip(tokens.chunk(accumulate), targets.chunk(accumulate), strict=True)
            with Traffic() if step == STEPS - 1 else nullcontext() as traffic:
                for i, (t, y) in enumerate(parts):
                    micro_batch(model, stage=stage, last=i == accumulate - 1)
                    loss = F.cross_entropy(model(t).flatten(0, 1), y.flatten()) / accumulate
                    torch.autograd.backward(loss)
                    total += loss.detach()
                    gradients = max(gradients, model_state(model, optimizer).gradients)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if evaluate:
                with torch.no_grad():
                    model(tokens)
            optimizer.step()
            held = model_state(model, optimizer)
            optimizer.zero_grad()
            if scope is not None:
                scope.step(step, loss=total)
            losses.append(mean_over_ranks(total))
    assert traffic is not None
    return {
        "losses": losses, "parameters": {n: whole(p) for n, p in model.named_parameters()},
        "sent": {kind: volume.sent_bytes for kind, volume in traffic.volumes.items()},
        "held": {"parameters": held.parameters, "gradients": gradients, "states": held.states},
    }


def collectives(rank: int, ranks: int) -> Found:
    """Each kind once through torch.distributed, on 32 bytes of this rank; three by DTensor."""
    x, mesh = torch.ones(8), training_mesh("cpu", 3)
    with Traffic() as traffic:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(8) for _ in range(ranks)], x)
        dist.reduce_scatter(torch.empty(8), [x] * ranks)
        dist.all_to_all_single(torch.empty(8), x)
        dist.broadcast(x, 0)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None
        dist.barrier()
        for have, want in ((Shard(0), Replicate()), (Partial(), Replicate()), (Partial(), Shard(0))):
            DTensor.from_local(x, mesh, [have]).redistribute(mesh, [want])
    return {kind: (volume.calls, volume.sent_bytes) for kind, volume in traffic.volumes.items()}


class Odd(nn.Module):
    """Rows that no number of ranks divides, a frozen weight, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6)) for _ in range(2))
        self.frozen = nn.Linear(6, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        y: Tensor = self.frozen(x) * self.scale
        return y


def odd(stage: int | str, *, rank: int, ranks: int) -> Found:
    """Ten rows on four ranks are 3, 3, 3, 1; three are 1, 1, 1, 0."""
    torch.manual_seed(0)
    model = placed(Odd(), stage, ranks)
    optimizer = AdamW(model.parameters(), lr=1e-2, states="fp32")
    losses = []
    for step in range(STEPS):
        x = torch.randn(SEQUENCES, 6, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        loss = model(x).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(mean_over_ranks(loss.detach()))
        none = sorted(name for name, p in model.named_parameters() if p.grad is None)
        optimizer.zero_grad()
    return {"losses": losses, "parameters": {n: whole(p) for n, p in model.named_parameters()}, "none": none}


def placed(model: nn.Module, stage: int | str, ranks: int, tensor: int = 1, device: str = "cpu",
           **options: Any) -> nn.Module:
    """Sharded; one process shards nothing."""
    if ranks == 1:
        return shard(model, stage=0)
    size = 2 if ranks == 8 else max(1, 2 // tensor)
    group = size if str(stage).lower() == "hybrid_shard" else None
    return shard(model, stage=stage, mesh=training_mesh(device, stage, tensor=tensor, group=group),
                 **options)


def gathered(rank: int, ranks: int) -> Found:
    """Of the first layer: whether the gathered codes are those of the whole weight; which gather otherwise;
    whether a shard is saved and loaded as a plain tensor."""
    torch.manual_seed(0)
    model = Decoder(CUT)
    convert(model)
    names = [f"layers.0.{part}" for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")]
    weights = [model.get_parameter(f"{name}.weight").detach().clone() for name in names]
    placed(model, 3, ranks, fp8_gather=True)
    unobserved = {one.name: one.reason for one in fp8scope.diagnose(model).unobserved}
    layer = model.get_submodule("layers.0")
    assert isinstance(layer, FSDPModule)
    layer.unshard()
    found: Found = {"codes": {}, "other": [], "unobserved": [unobserved.get(name) for name in names]}
    for name, weight in zip(names, weights, strict=True):
        ours, exact = model.get_parameter(f"{name}.weight"), quantize_weight(weight, Recipe())
        if isinstance(ours, GatheredWeight):
            assert ours.quantized is not None
            codes, scales, _ = ours.quantized
            found["codes"][name] = (torch.equal(codes.view(torch.uint8), exact.codes.view(torch.uint8))
                                    and torch.equal(scales, exact.scales))
        else:
            found["other"].append(name)
    layer.reshard()
    part, file = model.get_parameter(f"{names[0]}.weight"), BytesIO()
    assert isinstance(part, DTensor)
    torch.save(part._local_tensor, file)
    file.seek(0)
    found["saved"] = torch.equal(torch.load(file, weights_only=True), weights[0].chunk(ranks)[rank])
    return found


def mean_over_ranks(loss: Tensor) -> float:
    if not dist.is_initialized():
        return loss.item()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def cases(rank: int, ranks: int) -> dict[str, Callable[[], Found]]:
    """Of eight ranks those only that need as many: replicas of shards of cut layers."""
    found: dict[str, Callable[[], Found]] = {}
    if ranks == 8:
        return {f"{stage} cut": partial(trained, stage, rank=rank, ranks=ranks, tensor=2, accumulate=2)
                for stage in (3, "Hybrid_Shard")}
    found["collectives"] = partial(collectives, rank, ranks)
    train = partial(trained, rank=rank, ranks=ranks)
    for stage in STAGES:
        found[f"{stage}"] = partial(train, stage)
        found[f"{stage} accumulated"] = partial(train, stage, accumulate=2)
        found[f"{stage} odd"] = partial(odd, stage, rank=rank, ranks=ranks)
        if ranks > 2 or stage == 3:
            found[f"{stage} cut"] = partial(train, stage, tensor=2)
    found["3 cut fp8"] = partial(train, 3, tensor=2, fp8=True)
    found["gathered"] = partial(gathered, rank, ranks)
    for gather in (False, True):
        one = partial(train, 3, cut=True, fp8=True, fp8_gather=gather)
        word = "codes" if gather else "weights"
        found[f"gathered {word}"] = partial(one, compute=torch.bfloat16)
        if ranks == 2:
            found[f"gathered {word}, switched"] = partial(one, switch="bf16")
            found[f"gathered {word}, in shadow"] = partial(one, switch="shadow", probe=True)
            found[f"gathered {word}, accumulated"] = partial(one, accumulate=2)
            found[f"gathered {word}, probed"] = partial(one, probe=True)
        else:
            found[f"gathered {word}, hybrid"] = partial(train, "HYBRID_SHARD", cut=True, fp8=True,
                                                        fp8_gather=gather)
    if ranks == 2:
        for stage in (1, 3):
            found[f"{stage} probed"] = partial(train, stage, probe=True)
            found[f"{stage} evaluated"] = partial(train, stage, evaluate=True)
    return found


REFUSALS = {
    "tensor": "must divide the number of ranks",
    "group": "must divide the number of data-parallel ranks",
    "group of stage 2": "is for HYBRID_SHARD",
    "nodes": "give training_mesh a group",
    "replicas at stage 3": "which is for HYBRID_SHARD",
    "one dimension for hybrid": "needs the dimensions replicate, shard",
    "shards at stage 0": "stage 0 shards nothing",
    "no names": "must be of replicate, shard, tensor",
    "tied": "layers.0.0.weight, layers.1.0.weight",
    "twice": "is sharded already",
    "empty": "has no parameters",
    "codes at stage 2": "is for stage 3 and HYBRID_SHARD, not for 2",
    "codes of cut layers": "does not go with tensor parallelism",
    "cut without a plan": "has no plan for tensor parallelism",
    "cut heads": "kv_heads = 1: must be a multiple of 2",
    "cut runs": "hidden = 64: must be a multiple of 128",
    "cut fp8": "layers.0.attention.qkv = '384 rows': cannot be cut for 2 ranks in FP8",
}


def refusals(ranks: int) -> dict[str, str]:
    """The message with which each is refused."""
    tied, twice = Odd(), shard(Odd(), stage=3)
    first, second = (tied.get_submodule(f"layers.{i}.0") for i in range(2))
    second.weight = first.weight
    cut = training_mesh("cpu", 2, tensor=2)
    odd_rows = Decoder(replace(CUT, kv_heads=2))  # (8 + 2 x 2) x 32 rows are 192 for each of two ranks
    convert(odd_rows)
    hybrid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    calls: dict[str, Callable[[], object]] = {
        "tensor": lambda: training_mesh("cpu", 2, tensor=3),
        "group": lambda: training_mesh("cpu", "HYBRID_SHARD", group=3),
        "group of stage 2": lambda: training_mesh("cpu", 2, group=2),
        "nodes": lambda: shard(Odd(), stage="HYBRID_SHARD"),
        "replicas at stage 3": lambda: shard(Odd(), stage=3, mesh=hybrid),
        "one dimension for hybrid": lambda: shard(Odd(), stage="HYBRID_SHARD", mesh=hybrid["shard"]),
        "shards at stage 0": lambda: shard(Odd(), stage=0, mesh=init_device_mesh(
            "cpu", (1, ranks), mesh_dim_names=("replicate", "shard"))),
        "no names": lambda: shard(Odd(), stage=2, mesh=init_device_mesh("cpu", (1, ranks))),
        "tied": lambda: shard(tied, stage=2),
        "twice": lambda: shard(twice, stage=2),
        "empty": lambda: shard(nn.Tanh(), stage=2),
        "codes at stage 2": lambda: shard(Decoder(CUT), stage=2, fp8_gather=True),
        "codes of cut layers": lambda: shard(Decoder(CUT), stage=3, mesh=cut, fp8_gather=True),
        "cut without a plan": lambda: shard(Odd(), stage=2, mesh=cut),
        "cut heads": lambda: shard(Decoder(replace(CUT, kv_heads=1)), stage=2, mesh=cut),
        "cut runs": lambda: shard(Decoder(replace(CUT, hidden=64)), stage=2, mesh=cut),
        "cut fp8": lambda: shard(odd_rows, stage=2, mesh=cut),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Invalid as error:
            found[name] = str(error)
    return found


def cuda_cases(rank: int, ranks: int) -> dict[str, Callable[[], Found]]:
    train = partial(trained, rank=rank, ranks=ranks, cut=True, fp8=True, compute=torch.bfloat16,
                    device="cuda")
    found: dict[str, Callable[[], Found]] = {f"{stage}": partial(train, stage) for stage in (0, 1, 2, 3)}
    return found | {"codes": partial(train, 3, fp8_gather=True), "cut": partial(train, 3, tensor=2),
                    "switched": partial(train, 3, fp8_gather=True, switch="bf16")}


def main(rank: int, ranks: int, folder: str, device: str) -> None:
    os.environ["FP8SCOPE_HOME"] = f"{folder}/home.{rank}"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", rank=rank, world_size=ranks,
                            init_method=f"file://{folder}/store")
    found: dict[str, Any] = {
        name: case() for name, case in (cases if device == "cpu" else cuda_cases)(rank, ranks).items()}
    if device == "cpu" and ranks < 8:
        found |= {"refusals": refusals(ranks), "expected": REFUSALS}
    torch.save(found, f"{folder}/out.{rank}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # see processes.leave


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
