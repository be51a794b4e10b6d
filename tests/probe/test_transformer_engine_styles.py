"""TransformerEngine's layers, by stand-ins (engine.py), under FSDP2 and activation checkpointing."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.probe import engine
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker

ARRANGEMENTS = tuple(itertools.product((False, True), repeat=2))
"""Attached before sharding, resharded after a forward."""


def layer() -> nn.Module:
    torch.manual_seed(0)
    return engine.LayerNormLinear(64, 32)


def weight_rows(worker: MemoryWorker) -> list[tuple[bool, int, float]]:
    """(live, elements, amax) of every series of the weight."""
    record = worker.record(0)
    assert record.layout is not None
    assert record.tables is not None
    assert [event.text for event in record.events if event.kind == "probe_error"] == []
    return [(one.live, int(record.tables.counts[i, 0]), float(record.tables.maxes[i, 0]))
            for i, one in enumerate(record.layout.series) if one.role == "weight"]


def sharded(rank: int, folder: str) -> None:
    """One step of each arrangement, of a layer that is a unit of its own; the rows go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = []
    for attach_first, reshard in ARRANGEMENTS:
        model, worker = nn.Sequential(layer()), MemoryWorker(rank=rank, world=2)
        scope = Scope(model, (), worker=worker, every=1) if attach_first else None
        fully_shard(model[0], reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        with scope or Scope(model, (), worker=worker, every=1) as attached:
            with engine.autocast(engine.Recipe("current")):
                y, _ = model(torch.randn(8, 64))
            y.sum().backward()
            attached.step(0)
        found.append(weight_rows(worker))
    Path(f"{folder}/{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_z2_a_sharded_weight_is_measured_whole_and_once(tmp_path: Path) -> None:
    """Z2: though its own FSDP unit takes it apart right after the forward that tells how it is cast."""
    run_ranks(sharded, str(tmp_path), ranks=2)
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    amax = next(one for one in layer().parameters() if one.dim() == 2).detach().abs().max().item()
    assert first == [[[False, 2048, amax], [True, 2048, amax]]] * len(ARRANGEMENTS)
    assert [[row[1] for row in rows] for rows in second] == [[0, 0]] * len(ARRANGEMENTS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_counts_once(reentrant: bool) -> None:
    """P7: the same rows as without, of two micro-batches; nothing stays in the layer."""
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        one, worker, recipe = engine.Linear(64, 32), MemoryWorker(), engine.Recipe("current")
        with Scope(nn.Sequential(one), (), worker=worker, every=1) as scope:
            for _ in range(2):
                x = torch.randn(8, 64, requires_grad=True)

                def forward(x: Tensor, one: nn.Module = one) -> Tensor:
                    y: Tensor = one(x)[0]
                    return y

                with engine.autocast(recipe):
                    y = checkpoint(forward, x, use_reentrant=reentrant) if checkpointed else forward(x)
                    y.square().sum().backward()
            scope.step(0)
        tables = worker.record(0).tables
        assert tables is not None
        found.append(tables)
        assert not one._forward_hooks
    assert torch.equal(found[0].counts, found[1].counts)
    assert torch.equal(found[0].maxes, found[1].maxes)
