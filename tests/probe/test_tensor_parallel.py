"""Two ranks that share each layer: the numbers of one process, whatever is sharded or replicated."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn

from fp8scope.scope import Scope
from fp8scope.sums import SumTables
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.series import Layout
from fp8scope_trainer.convert import convert
from fp8scope_trainer.decoder import Decoder, DecoderConfig
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.mesh import training_mesh
from fp8scope_trainer.shard import shard

WORLD = 2
Recorded = tuple[SumTables, Layout, list[str]]


def network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(device)


def told(worker: MemoryWorker) -> Recorded:
    """Of the first step."""
    record = worker.record(0)
    assert record.tables is not None
    assert record.layout is not None
    return record.tables, record.layout, [e.text for e in record.events]


def recorded(model: nn.Module, worker: MemoryWorker, device: str, *, parts: int = 1) -> Recorded:
    """One step; all ranks have the same batch, or each its part of it."""
    batch = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).to(device)
    with Scope(model, (), worker=worker, every=1) as scope:
        (model(batch.chunk(parts)[worker.rank % parts]).square().sum() / batch.numel()).backward()
        scope.step(0)
    return told(worker)


def train(rank: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store",
                            rank=rank, world_size=WORLD)
    plans: dict[str, dict[str, Any]] = {
        "sequences in parts": {"0": ColwiseParallel(input_layouts=Shard(0)),
                               "2": RowwiseParallel(output_layouts=Shard(0))},
        "replicated": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    }
    for name, plan in plans.items():
        model = parallelize_module(network(device), init_device_mesh(device, (WORLD,)), plan)
        worker, parts = MemoryWorker(rank=rank, world=WORLD), WORLD if name != "replicated" else 1
        with open(f"{folder}/{name} {rank}", "wb") as file:
            pickle.dump(recorded(model, worker, device, parts=parts), file)
    compiled = MemoryWorker(rank=rank, world=WORLD)
    model.compile(backend="aot_eager", fullgraph=True)
    with Scope(model, (), worker=compiled, every=1) as scope:
        model(torch.randn(128, 256, device=device)).square().mean().backward()
        scope.step(0)
    assert {e.name for e in compiled.record(0).events if e.kind == "unobserved"} == {"0", "2"}
    assert {e.kind for e in compiled.record(0).events} == {"unobserved"}
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two CUDA devices")])])
def test_a_tensor_parallel_model_has_the_numbers_of_one_process(device: str, tmp_path: Any) -> None:
    """Shards add up; an activation or a gradient that both ranks hold counts once, also where it is gathered
    while the hook looks at it. Compiled, the model trains on and its layers are listed."""
    if device == "cuda":
        spawn(train, args=(str(tmp_path), device), nprocs=WORLD)  # type: ignore[no-untyped-call]
    else:
        run_ranks(train, str(tmp_path), device, ranks=WORLD)
    tables, layout, events = recorded(network(device), MemoryWorker(), device)
    for plan in ("replicated", "sequences in parts"):
        ranks: list[Recorded] = [pickle.loads((tmp_path / f"{plan} {i}").read_bytes()) for i in range(WORLD)]
        merged = SumTables.zeros(len(layout.series))
        for found, their_layout, their_events in ranks:
            assert their_events == events == []
            assert {s.key for s in their_layout.series} <= {s.key for s in layout.series}
            merged.merge(found.to_layout(their_layout, layout))
        for i, series in enumerate(layout.series):
            assert merged.counts[i, 0] == tables.counts[i, 0], (plan, series)
            assert merged.sums[i].tolist() == pytest.approx(tables.sums[i].tolist(), rel=1e-2), (plan, series)
            amax = merged.maxes[i, 0].item()
            assert amax == pytest.approx(tables.maxes[i, 0].item(), rel=1e-5), (plan, series)


CUT = DecoderConfig(width=128, layers=1, heads=4, kv_heads=2, head_width=64, hidden=256, context=64)
"""Two ranks can share its layers in FP8."""
TOKENS = (4, 64)
LAYERS = ("layers.0.attention.qkv", "layers.0.attention.out", "layers.0.mlp.gate_up", "layers.0.mlp.down")
PRECISIONS: tuple[Precision, ...] = ("fp8", "shadow")


def counted(rank: int, world: int, tensor: int, precision: Precision) -> Recorded:
    """One step of the decoder with its layers cut for `tensor` ranks; what this rank counts."""
    torch.manual_seed(0)
    model: nn.Module = Decoder(CUT)
    convert(model)
    for name in LAYERS:
        layer = model.get_submodule(name)
        assert isinstance(layer, Fp8Linear)
        layer.set_precision(precision)
    if world > 1:
        shard(model, stage=2, mesh=training_mesh("cpu", 2, tensor=tensor))
    rows = torch.randint(256, TOKENS, generator=torch.Generator().manual_seed(1))
    mine = rows.chunk(world // tensor)[rank // tensor]
    worker = MemoryWorker(rank=rank, world=world)
    with Scope(model, (), worker=worker, every=1) as scope:
        (model(mine).square().sum() / rows.numel()).backward()
        scope.step(0)
    return told(worker)


def cut(rank: int, folder: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for precision in PRECISIONS:
        with open(f"{folder}/{precision} {rank}", "wb") as file:
            pickle.dump(counted(rank, world, 2, precision), file)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_an_operand_that_tensor_ranks_hold_alike_counts_once(world: int, tmp_path: Any) -> None:
    """FP8 layers compute with plain tensors: the input of cut rows and the gradient of cut columns are the
    same on both ranks of a layer. A weight's parts
    add up. On one pair of ranks and on two."""
    run_ranks(cut, str(tmp_path), world, ranks=world)
    for precision in PRECISIONS:
        tables, layout, _ = counted(0, 1, 1, precision)
        ranks: list[Recorded] = [pickle.loads((tmp_path / f"{precision} {i}").read_bytes())
                                 for i in range(world)]
        merged = SumTables.zeros(len(layout.series))
        for found, theirs, _ in ranks:
            assert {s.key for s in theirs.series} <= {s.key for s in layout.series}
            merged.merge(found.to_layout(theirs, layout))
        for i, series in enumerate(layout.series):
            if series.name.removesuffix(".weight") in LAYERS:
                assert merged.counts[i, 0] == tables.counts[i, 0], (precision, series)
                amax = merged.maxes[i, 0].item()
                assert amax == pytest.approx(tables.maxes[i, 0].item(), rel=1e-2), (precision, series)
