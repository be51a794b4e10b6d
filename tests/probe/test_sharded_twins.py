"""Twins and gains over two ranks: the sample does not depend on the mesh, so neither do the numbers."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fp8scope.derive import derive
from fp8scope.scope import Scope
from fp8scope.sums import SumTables
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.series import Layout
from fp8scope_trainer.adamw import AdamW

WORLD = 2
STEPS = 3
SHAPE = (2049, 500)
"""Rows that two ranks do not share evenly, of a length that no block divides: one block in 64."""

Recorded = list[tuple[SumTables, Layout]]


def record(worker: MemoryWorker, model: nn.Module, make: Any) -> Recorded:
    """Steps with given gradients, whatever the arrangement."""
    optimizer = make(model.parameters())
    (parameter,) = model.parameters()
    generator = torch.Generator().manual_seed(1)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for step in range(STEPS):
            gradient: torch.Tensor = torch.randn(SHAPE, generator=generator)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
            scope.step(step)
    return [(one.tables, one.layout) for one in worker.records
            if one.tables is not None and one.layout is not None]


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype)


JOBS: dict[str, tuple[torch.dtype, Any]] = {
    "update_error": (torch.float32, lambda p: AdamW(p, lr=1e-3)),
    "update_gain": (torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=1e-4)),
}


def train(rank: int, folder: str) -> None:
    """Both jobs, under DDP and under FSDP."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {}
    for key, (dtype, make) in JOBS.items():
        for sharded in (False, True):
            model = model_of(dtype)
            wrapped: Any = fully_shard(model) if sharded else DistributedDataParallel(model)
            found[key, sharded] = record(MemoryWorker(rank=rank, world=WORLD), wrapped, make)
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, bool], Recorded]]:
    """Per rank: (metric, sharded) -> steps."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(train, str(folder), ranks=WORLD)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(WORLD)]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("key", JOBS)
def test_z3_consequences_are_those_of_one_process(
    key: str, sharded: bool, by_rank: list[dict[tuple[str, bool], Recorded]]
) -> None:
    """Z3: merged over ranks the metric and its number of elements; every rank has the same series."""
    dtype, make = JOBS[key]
    alone = record(MemoryWorker(), model_of(dtype), make)
    for step in range(STEPS):
        (tables, layout), other = (rank[key, sharded][step] for rank in by_rank)
        assert [one.key for one in layout.series] == [one.key for one in other[1].series]
        tables.merge(other[0])
        found, wanted = (measured(derive(*pair), pair[1], key) for pair in ((tables, layout), alone[step]))
        assert found.keys() == wanted.keys() != set()
        for series, (value, elements) in wanted.items():
            # Where ranks divide a block none takes it: less than two blocks of 125.
            assert found[series][0] == pytest.approx(value, rel=0.02, abs=1e-6)
            assert found[series][1] == pytest.approx(elements, abs=256)


def measured(arrays: Any, layout: Layout, key: str) -> dict[tuple[str, ...], tuple[float, float]]:
    """Key of a series -> (metric, elements), where it was measured."""
    values, elements = arrays[key], arrays["elements"]
    return {one.key: (values[i].item(), elements[i].item()) for i, one in enumerate(layout.series)
            if values[i] == values[i]}
