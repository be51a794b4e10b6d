"""Two ranks under DDP and FSDP2: what both hold alike is measured once, and sums over ranks are right."""

import copy
import itertools
import os
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import fp8scope
from fp8scope.derive import derive, derive_sentinels
from fp8scope.scope import Scope
from fp8scope.sums import SentinelSums, SumTables
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.series import Layout

WORLD = 2
ARRANGEMENTS = ("ddp", "attach, shard", "shard, attach", "shard and keep, attach", "shard each, attach")
STEPS = 2


class Step(NamedTuple):
    """What one rank recorded of one step."""

    tables: SumTables
    layout: Layout
    sentinels: SentinelSums
    events: list[str]


def network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 16)).to(device)


def batches(device: str) -> Tensor:
    return torch.randn(STEPS, WORLD * 3, 16, generator=torch.Generator().manual_seed(1)).to(device)


def arranged(
    name: str, worker: MemoryWorker, device: str
) -> tuple[nn.Module, torch.optim.Optimizer, Scope]:
    """A model of that arrangement with its optimizer and a probe."""
    model: nn.Module = network(device)
    if name == "attach, shard":
        scope = Scope(model, (), worker=worker, every=1)
        fully_shard(model)
        return model, torch.optim.Adam(model.parameters(), lr=1e-3), scope
    if name == "ddp":
        model = DistributedDataParallel(model)
    else:
        if name == "shard each, attach":
            for layer in model.children():
                fully_shard(layer)
        fully_shard(model, reshard_after_forward=name != "shard and keep, attach")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, Scope(model, (optimizer,), worker=worker, every=1)


def steps_of(worker: MemoryWorker, model: nn.Module, optimizer: torch.optim.Optimizer, scope: Scope,
             inputs: Tensor) -> list[Step]:
    for step, batch in enumerate(inputs):
        loss = model(batch).square().mean()
        loss.backward()
        if step % 2:  # as clip_grad_norm_ returns it: a DTensor under FSDP
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            scope.log(grad_norm=nn.utils.get_total_norm(gradients))
        optimizer.step()
        optimizer.zero_grad()
        scope.step(step, loss=loss.detach())
    scope.close()
    found = []
    for record in worker.records:
        assert record.tables is not None
        assert record.layout is not None
        found.append(Step(record.tables, record.layout, record.sentinels, [e.text for e in record.events]))
    return found


def train(rank: int, folder: str, device: str) -> None:
    """Every arrangement on this rank; what it recorded goes to a file."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                            init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found: dict[str, list[Step]] = {}
    for name in ARRANGEMENTS:
        worker = MemoryWorker(rank=rank, world=WORLD)
        inputs = batches(device).chunk(WORLD, dim=1)[rank]
        found[name] = steps_of(worker, *arranged(name, worker, device), inputs)
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two CUDA devices")])])
def device(request: pytest.FixtureRequest) -> str:
    """Where the ranks train: gloo on the CPU, NCCL on two GPUs."""
    return str(request.param)


@pytest.fixture(scope="module")
def by_rank(device: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Step]]]:
    """Per rank: arrangement -> steps."""
    folder = tmp_path_factory.mktemp("ranks")
    if device == "cuda":
        spawn(train, args=(str(folder), device), nprocs=WORLD)  # type: ignore[no-untyped-call]
    else:
        run_ranks(train, str(folder), device, ranks=WORLD)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone(device: str) -> list[Step]:
    """The same training in one process, on one device."""
    worker, model = MemoryWorker(), network(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scope = Scope(model, (optimizer,), worker=worker, every=1)
    return steps_of(worker, model, optimizer, scope, batches(device))


def merged(ranks: list[Step]) -> Step:
    """What the reduction would make of the ranks' steps."""
    first, *others = ranks
    for other in others:
        assert other.layout == first.layout
        first.tables.merge(other.tables)
        first.sentinels.sums.add_(other.sentinels.sums)
        torch.maximum(first.sentinels.maxes, other.sentinels.maxes, out=first.sentinels.maxes)
    return first


def train_one_sided(rank: int, folder: str) -> None:
    """The same jobs, first without a probe and then with one on rank 0, whose collector is not there."""
    torch.set_num_threads(1)
    os.environ |= {"FP8SCOPE_HANDSHAKE_SECONDS": "0.5", "FP8SCOPE_EXIT_SECONDS": "0.2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    losses: list[list[float]] = []
    for name, watched in itertools.product(("ddp", "fsdp"), (False, True)):
        model: nn.Module = network("cpu")
        if name == "ddp":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        scope = fp8scope.attach(model, optimizer, run=name, every=1, spool=f"{folder}/spool",
                                collector="http://127.0.0.1:9") if watched and rank == 0 else nullcontext()
        found = []
        with scope:
            for batch in batches("cpu").repeat(3, 1, 1).chunk(WORLD, dim=1)[rank]:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        losses.append(found)
    with open(f"{folder}/losses{rank}", "wb") as file:
        pickle.dump(losses, file)
    dist.barrier()
    dist.destroy_process_group()


def test_z6_a_probe_on_one_rank_changes_nothing(tmp_path: Path, spooled: Callable[..., Any]) -> None:
    """Z6: under DDP and FSDP2 both ranks train to the same losses, to the bit, and no collective waits for a
    probe that is not there: the job ends. What rank 0 measured alone says so."""
    run_ranks(train_one_sided, str(tmp_path), ranks=WORLD)
    for rank in range(WORLD):
        ddp, ddp_watched, fsdp, fsdp_watched = pickle.loads((tmp_path / f"losses{rank}").read_bytes())
        assert ddp == ddp_watched
        assert fsdp == fsdp_watched
    for run in ("ddp", "fsdp"):
        steps = spooled(tmp_path / "spool", run)
        assert [one.header.step for one in steps] == list(range(3 * STEPS))
        assert "no probe within 0.5 s on rank 1" in steps[0].header.events[0].text
        assert steps[0].metrics["0", "activation", "rowwise"]["elements"] == 3 * 16


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_z2_what_ranks_hold_alike_is_measured_once(
    name: str, by_rank: list[dict[str, list[Step]]], alone: list[Step]
) -> None:
    """Z2: weights and states are whole and counted once, activations add up, in every arrangement."""
    for step in range(STEPS):
        found, wanted = merged([copy.deepcopy(rank[name][step]) for rank in by_rank]), alone[step]
        assert [text for text in found.events if "gradient" not in text] == []
        numbers, reference = derive(found.tables, found.layout), derive(wanted.tables, wanted.layout)
        places = {(s.name, s.role, s.orientation): i for i, s in enumerate(wanted.layout.series)}
        expected = {key for key in places if name != "attach, shard" or not key[1].startswith("exp_avg")}
        assert {(s.name, s.role, s.orientation) for s in found.layout.series} == expected
        for i, series in enumerate(found.layout.series):
            j = places[series.name, series.role, series.orientation]
            assert numbers["elements"][i] == reference["elements"][j], series
            if series.role != "gradient":
                for key in ("amax", "rms", "mean_abs"):
                    assert numbers[key][i] == pytest.approx(reference[key][j], rel=1e-4), (series, key)


@pytest.mark.parametrize("name", [n for n in ARRANGEMENTS if n != "attach, shard"])
def test_z3_norms_are_those_of_the_whole_model(
    name: str, by_rank: list[dict[str, list[Step]]], alone: list[Step]
) -> None:
    """Z3: gradient norm, update/weight ratio and loss over two ranks equal those of one process.

    In step 0 the probe reads the norm, in step 1 the job logs it."""
    for step in range(STEPS):
        found = merged([copy.deepcopy(rank[name][step]) for rank in by_rank])
        numbers = derive_sentinels(found.sentinels, deque())
        reference = derive_sentinels(alone[step].sentinels, deque())
        assert numbers == pytest.approx(reference, rel=1e-3), step
