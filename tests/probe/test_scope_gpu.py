"""The probe on a GPU: no wait for the device between two steps, and the numbers of the CPU."""

import copy

import pytest
import torch
from tests.waits import no_waits
from torch import nn

from fp8scope.derive import derive
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.wire import is_missing
from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.linear import Fp8Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def network(live: bool) -> nn.Sequential:
    torch.manual_seed(0)
    linear = Fp8Linear if live else nn.Linear
    return nn.Sequential(linear(256, 384), nn.GELU(), linear(384, 128))


def run(device: str, live: bool, model: nn.Module, inputs: torch.Tensor) -> MemoryWorker:
    """Two sampled steps on `device`; on a GPU an implicit wait for it raises."""
    worker, model = MemoryWorker(), model.to(device)
    batches = [x.to(device) for x in inputs]
    optimizer = AdamW(model.parameters()) if live else torch.optim.AdamW(model.parameters(), fused=True)
    scope = Scope(model, (optimizer,), worker=_Deferred(worker), every=1)
    train_step(model, optimizer, batches[0], scope)  # kernels compile, tables grow
    with no_waits():
        train_step(model, optimizer, batches[1], scope)
    scope.close()
    return worker


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, scope: Scope) -> None:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scope.step(loss=loss.detach())


class _Deferred(MemoryWorker):
    """Waits for the copies when it is closed: the worker's thread may wait, the training thread not."""

    def __init__(self, worker: MemoryWorker) -> None:
        super().__init__()
        self.records = worker.records

    def submit(self, record: object) -> None:
        self.records.append(record)  # type: ignore[arg-type]

    def close(self) -> None:
        for record in self.records:
            record.ready()


@pytest.mark.parametrize("live", [False, True])
def test_a_gpu_measures_what_the_cpu_measures(live: bool) -> None:
    """Without one implicit wait: the same series, and the same values where the operands are the same."""
    model = network(live)
    inputs = torch.randn(2, 260, 256)
    here = run("cpu", live, copy.deepcopy(model), inputs)
    there = run("cuda", live, model, inputs)
    for step in (0, 1):
        mine, theirs = here.record(step), there.record(step)
        assert [e for e in theirs.events if e.kind == "probe_error"] == []
        assert mine.layout is not None
        assert mine.layout == theirs.layout
        assert mine.tables is not None
        assert theirs.tables is not None
        a, b = derive(mine.tables, mine.layout), derive(theirs.tables, mine.layout)
        for i, series in enumerate(mine.layout.series):
            for key in ("elements", "calls"):
                assert a[key][i] == b[key][i]
            exact = series.module == "0" and series.role in ("activation", "weight") and step == 0
            for key in METRICS:
                assert is_missing(a[key])[i] == is_missing(b[key])[i], (series, key)
                if exact and not is_missing(a[key])[i]:
                    rel = 1e-3 if key == "gemm_error" else 1e-5
                    assert b[key][i] == pytest.approx(a[key][i], rel=rel, abs=1e-6), (series, key)
        wanted = here.sentinels(step)
        assert there.sentinels(step) == pytest.approx(wanted, rel=0.05, abs=1e-3)
