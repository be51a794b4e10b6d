"""Jobs that capture their step in CUDA graphs: the numbers of the plain run, at the cadence, and the training
of the graph without a probe.

Every run trains on the same batches for WARM_UP + STEPS steps, of which every fifth is measured and only step
0, always a plain one, in detail.
"""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.waits import no_waits
from torch import Tensor, nn

from fp8scope.scope import Scope
from fp8scope.sums import RowSums
from fp8scope.testing import MemoryWorker
from fp8scope.timer import Timer
from fp8scope_protocol.series import Series
from fp8scope_trainer.linear import Fp8Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),  # by Dynamo, of its own classes
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node"),  # by make_graphed_callables
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WARM_UP, STEPS, EVERY = 3, 20, 5
WIDTH = 256
MEASURED = (5, 10, 15, 20)


class Block(nn.Module):
    """A residual of two layers."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = linear(WIDTH, 3 * WIDTH), linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Job:
    """A model, its optimizer and batches, all alike in every run."""

    def __init__(self, *, linear: type[nn.Linear] = nn.Linear, dtype: torch.dtype = torch.bfloat16,
                 capturable: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(linear) for _ in range(3))).to("cuda", dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=capturable)
        self.batches = torch.randn(WARM_UP + STEPS, 260, WIDTH, device="cuda", dtype=dtype)
        self.x = self.batches[0].clone()
        self.worker = Deferred()

    def scope(self, **options: Any) -> Scope:
        return Scope(self.model, (self.optimizer,), worker=self.worker, every=EVERY, detail_every=1000,
                     **options)

    def backward(self) -> Tensor:
        """Forward and backward, from no gradients."""
        loss: Tensor = self.model(self.x).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> Tensor:
        """A plain step."""
        self.optimizer.zero_grad()
        loss = self.backward()
        self.optimizer.step()
        return loss

    def weights(self) -> list[Tensor]:
        torch.cuda.synchronize()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def warm_up(self, closed: Callable[[Tensor], None]) -> None:
        """WARM_UP plain steps in a stream of their own, as captures want it."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(WARM_UP):
                self.x.copy_(self.batches[i])
                closed(self.step())
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad()


class Deferred(MemoryWorker):
    """Waits for the copies when it is closed: the worker's thread may wait, the training thread not."""

    def submit(self, record: Any) -> None:
        self.records.append(record)

    def close(self) -> None:
        for record in self.records:
            record.ready()


def plain(job: Job, **options: Any) -> list[Tensor]:
    """Every step as it is written."""
    with job.scope(**options) as scope:
        for batch in job.batches:
            job.x.copy_(batch)
            scope.step(loss=job.step())
    return job.weights()


def whole_step(job: Job, *, probe: bool = True, **options: Any) -> list[Tensor]:
    """The whole step in one graph, the optimizer's too; without one wait for the device in replays."""
    scope = job.scope(**options) if probe else None
    job.warm_up(lambda loss: None if scope is None else scope.step(loss=loss))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = job.backward()
        job.optimizer.step()
    for batch in job.batches[WARM_UP:]:
        job.x.copy_(batch)
        graph.replay()
        if scope is None:
            continue
        if not scope._watch.sampling:  # nothing is added off cadence
            assert all(not part.counts.any() and bool((part.maxes == -torch.inf).all())
                       for part in scope._watch.rows._parts)
        with no_waits():
            scope.step(loss=loss)
    if scope is not None:
        scope.close()
    return job.weights()


def backward_only(job: Job, *, probe: bool = True, **options: Any) -> list[Tensor]:
    """Forward and backward in a graph, the optimizer outside; steps close by themselves."""
    scope = job.scope(**options) if probe else None
    job.warm_up(lambda loss: None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.backward()
    for batch in job.batches[WARM_UP:]:
        job.x.copy_(batch)
        graph.replay()
        job.optimizer.step()
    if scope is not None:
        scope.close()
    return job.weights()


def graphed_blocks(job: Job, *, probe: bool = True, **options: Any) -> list[Tensor]:
    """Each block made a pair of graphs by torch; the model's own forward runs, and closes steps."""
    scope = job.scope(**options) if probe else None
    inputs = tuple((torch.randn_like(job.x).requires_grad_(i > 0),) for i in range(len(job.model)))
    torch.cuda.make_graphed_callables(tuple(job.model), inputs)
    for batch in job.batches:
        job.x.copy_(batch)
        job.step()
    if scope is not None:
        scope.close()
    return job.weights()


def rows(worker: MemoryWorker, step: int) -> dict[Series, RowSums]:
    """What was measured in a step."""
    record = worker.record(step)
    assert record.layout is not None
    assert record.tables is not None
    found = {series: record.tables.row(i) for i, series in enumerate(record.layout.series)}
    return {series: row for series, row in found.items() if row.counts.any()}


def assert_same(found: MemoryWorker, wanted: MemoryWorker, *, updates: bool = True) -> None:
    """Counts to the bit, sums and extremes of every series, of what the optimizer does (`updates`) too;
    sentinels of every step; no fault."""
    assert [r.step for r in found.records] == [r.step for r in wanted.records]
    for record in found.records:
        assert [e for e in record.events if e.kind == "probe_error"] == []
        assert (record.tables is not None) == (record.step % EVERY == 0)
    for step in MEASURED:
        mine, theirs = rows(found, step), rows(wanted, step)
        assert any(series.role == "gradient" for series in theirs)
        for series, row in theirs.items():
            if updates or series.scaling != "none":
                one = mine.pop(series)
                assert torch.equal(one.counts, row.counts), series
                assert torch.equal(one.histogram, row.histogram), series
                assert torch.allclose(one.sums, row.sums, rtol=1e-12, atol=0.0), series
                assert torch.allclose(one.maxes, row.maxes, rtol=1e-12, atol=0.0), series
        assert mine == {}
    for record in wanted.records[WARM_UP:]:
        said, expected = found.sentinels(record.step), wanted.sentinels(record.step)
        for name in {"loss", "grad_norm", "nonfinite", "lr"} & expected.keys():
            assert said[name] == pytest.approx(expected[name], rel=1e-6), (record.step, name)


@pytest.mark.parametrize("formats", [("e4m3",), ("int8", "mxfp8")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_whole_step_in_a_graph_has_the_numbers_of_the_plain_one(
    dtype: torch.dtype, formats: tuple[str, ...]
) -> None:
    """Forward, backward and a capturable AdamW: layers' numbers and gradients' norms, weights to the bit."""
    eager, graph, bare = (Job(dtype=dtype) for _ in range(3))
    plain(eager, formats=formats)
    with_probe = whole_step(graph, formats=formats)
    without = whole_step(bare, probe=False)
    assert all(torch.equal(a, b) for a, b in zip(with_probe, without, strict=True))
    assert_same(graph.worker, eager.worker, updates=False)
    assert all("grad_norm" in graph.worker.sentinels(r.step) for r in graph.worker.records[WARM_UP:])
    texts = {e.name: e.text for r in graph.worker.records for e in r.events if e.kind == "unobserved"}
    assert set(texts) == {"optimizer", "CUDA graphs"}


@pytest.mark.parametrize("linear", [nn.Linear, Fp8Linear])
def test_a_backward_in_a_graph_has_the_numbers_of_the_plain_one(linear: type[nn.Linear]) -> None:
    """The optimizer is outside and closes the steps."""
    eager, graph, bare = (Job(linear=linear) for _ in range(3))
    plain_without_losses(eager)
    with_probe = backward_only(graph)
    without = backward_only(bare, probe=False)
    assert all(torch.equal(a, b) for a, b in zip(with_probe, without, strict=True))
    assert_same(graph.worker, eager.worker)


def plain_without_losses(job: Job) -> None:
    with job.scope():
        for batch in job.batches:
            job.x.copy_(batch)
            job.step()


def test_graphed_blocks_have_the_numbers_of_the_plain_ones() -> None:
    """`make_graphed_callables` on an attached model: forward and backward of a block are two graphs."""
    eager, graph, bare = (Job() for _ in range(3))
    plain_without_losses(eager)
    with_probe = graphed_blocks(graph)
    without = graphed_blocks(bare, probe=False)
    assert all(torch.equal(a, b) for a, b in zip(with_probe, without, strict=True))
    assert_same(graph.worker, eager.worker)


def test_a_capture_needs_no_measured_step_before() -> None:
    """No step before the capture is measured: rows are there all the same, kernels are compiled and loaded
    while the stream is captured, and the numbers are those of the plain run."""
    eager, graph = Job(), Job()
    plain(eager, start_step=1)
    whole_step(graph, start_step=1)
    assert_same(graph.worker, eager.worker, updates=False)


def closed_early(job: Job, *, probe: bool) -> list[Tensor]:
    """A whole step in a graph, whose scope is closed and forgotten before the first replay."""
    scope = job.scope() if probe else None
    job.warm_up(lambda loss: None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.backward()
        job.optimizer.step()
    if scope is not None:
        scope.close()
    del scope
    gc.collect()
    torch.cuda.empty_cache()
    for batch in job.batches[WARM_UP:]:
        job.x.copy_(batch)
        graph.replay()
    return job.weights()


def test_only_the_stream_that_cannot_be_captured_is_no_side_stream() -> None:
    """Off cadence a hook asks the driver for a capture on other streams only."""
    with Job().scope() as scope:
        watch = scope._watch
        assert not watch.side_stream()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            assert watch.side_stream()
            assert not watch.asks_capturing()
        x = torch.zeros(1, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x += 1
            assert watch.side_stream()
            assert watch.asks_capturing()


def test_replays_go_on_when_the_scope_is_closed() -> None:
    """What the kernels write to is still there, though nothing else of the probe is; they do nothing."""
    with_probe, without = closed_early(Job(), probe=True), closed_early(Job(), probe=False)
    assert all(torch.equal(a, b) for a, b in zip(with_probe, without, strict=True))


def test_a_waiting_worker_spoils_no_capture() -> None:
    """While one thread captures, another one waits for steps to end and asks how long they took, as the
    worker does."""
    timer, done, failures = Timer(torch.device("cuda")), threading.Event(), []
    timer.lap(sampled=True)
    lap = timer.lap(sampled=True)

    def work() -> None:
        try:
            while not done.is_set():
                lap.wait()
                lap.time()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    job = Job()
    thread.start()
    try:
        whole_step(job)
    finally:
        done.set()
        thread.join()
    assert failures == []


def test_reduce_overhead_is_measured() -> None:
    """`torch.compile(mode="reduce-overhead")` keeps the probe's operations out of its graphs: every layer is
    measured in measured steps, and only there, and trains as without a probe."""
    eager, compiled = Job(), Job()
    plain(eager)
    call = torch.compile(compiled.model, mode="reduce-overhead")
    with compiled.scope() as scope:
        for batch in compiled.batches:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            compiled.optimizer.zero_grad()
            loss = call(batch).float().square().mean()
            loss.backward()
            compiled.optimizer.step()
            scope.step(loss=loss.detach().clone())
    assert [e for r in compiled.worker.records for e in r.events if e.kind == "probe_error"] == []
    for step in MEASURED:
        found, wanted = compiled.worker.metrics(step), eager.worker.metrics(step)
        assert found.keys() == wanted.keys()
        for key, values in wanted.items():
            assert found[key].get("elements") == values.get("elements"), (step, key)
            if key[1] != "gradient" and "amax" in values:
                assert found[key]["amax"] == pytest.approx(values["amax"], rel=0.05), (step, key)
