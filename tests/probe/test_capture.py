"""What CUDA graphs need of the probe, without a GPU: kernels under a flag, rows that never move, sentinels
that replays add up, and steps that close where hooks still run. With one: test_cuda_graphs.py.
"""

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.probe.kernel_cases import Case, differences, interpreted, normal
from torch import nn

from fp8scope import quantize
from fp8scope.derive import derive_sentinels
from fp8scope.hooks import install
from fp8scope.layers import find_layers
from fp8scope.rows import FIRST_CAPACITY, Rows
from fp8scope.scope import Scope
from fp8scope.sentinels import Sentinels
from fp8scope.sums import RowSums
from fp8scope.testing import MemoryWorker
from fp8scope.watch import Watch
from fp8scope_protocol.commands import Command, SetPrecision
from fp8scope_protocol.formats import E4M3
from fp8scope_protocol.recipes import parse_recipes
from fp8scope_protocol.series import Series
from fp8scope_trainer.linear import Fp8Linear

CPU = torch.device("cpu")


def series(number: int) -> Series:
    return Series(name=f"layer{number}", role="activation", orientation="rowwise", format="e4m3",
                  scaling="tile 1x128", module=f"layer{number}", depth=number)


@contextmanager
def capture(scope: Scope) -> Iterator[None]:
    """What hooks find while torch captures a CUDA graph. Nothing is kept for a replay."""
    watch = scope._watch
    watch.side_stream = watch.asks_capturing = lambda: True
    try:
        yield
    finally:
        watch.side_stream = watch.asks_capturing = lambda: False


@pytest.mark.parametrize("module", ["roundtrip_kernel", "group_kernel"])
def test_kernels_add_nothing_where_the_flag_is_0(module: str, tmp_path: Path) -> None:
    """In the interpreter: at 1 they add what they add without a flag, at 0 the row stays empty."""
    pytest.importorskip("triton", reason="triton is not installed")
    x = normal((40, 200))
    codes = quantize.quantize_tiles(x, E4M3).codes
    cases: dict[str, Case] = {
        name: (x, "e4m3", "tile 1x128", {"codes": codes, "histogram": False} | (
            {} if flag is None else {"flag": torch.tensor([flag], dtype=torch.int32)}))
        for name, flag in (("plain", None), ("on, twice", 1), ("on", 1), ("off", 0))
    }
    rows = interpreted(module, cases, tmp_path)
    assert differences(rows["off"], RowSums.zeros("cpu"), tolerance=0.0) == []
    assert differences(rows["on"], rows["plain"], tolerance=0.0) == []
    assert rows["on, twice"].counts[1] == 2


def test_rows_stay_where_they_are() -> None:
    """Over 50 steps, while four times as many series come as there was room for; and each step has the
    numbers of that step alone."""
    rows = Rows(CPU)
    first = [rows.row(series(i)) for i in range(3)]
    addresses = [part.data_ptr() for row in first for part in row]
    for step in range(50):
        for i in range(3 + 5 * step):
            rows.row(series(i)).counts[0] += i + step
        taken = rows.collect()
        assert taken is not None
        tables, layout = taken
        assert [one.name for one in layout.series] == [f"layer{i}" for i in range(rows.count)]
        wanted = [i + step if i < 3 + 5 * step else 0 for i in range(rows.count)]
        assert tables.counts[:, 0].tolist() == wanted
        now = [rows.row(series(i)) for i in range(3)]
        assert [part.data_ptr() for row in now for part in row] == addresses
    assert rows.count > 3 * FIRST_CAPACITY
    assert first[2].counts[0] == 0  # a graph that kept it would add to the next step


def test_sums_reach_rows_of_every_table() -> None:
    """`add` finds rows on both sides of where the first table ends."""
    rows = Rows(CPU)
    some = [series(i) for i in range(FIRST_CAPACITY - 2, FIRST_CAPACITY + 2)]
    for i in range(FIRST_CAPACITY + 2):
        rows.row(series(i))
    rows.add(some, elements=[1, 2, 0, 4], sums={"got2": torch.tensor([1.0, 2.0, 3.0, 4.0]).double()})
    taken = rows.collect()
    assert taken is not None
    assert taken[0].counts[-4:, :2].tolist() == [[1, 1], [2, 1], [0, 0], [4, 1]]
    assert taken[0].sums[-4:, 9].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert taken[0].counts.sum() == 10


def test_a_reserve_is_one_allocation_ahead() -> None:
    """Series that were reserved have room where memory cannot be had; others have not."""
    rows = Rows(CPU)
    rows.reserve(100)
    before = rows.bytes
    for i in range(100):
        assert rows.has_room(series(i))
        rows.row(series(i))
    assert rows.bytes == before
    for i in range(100, 2 * FIRST_CAPACITY):
        rows.row(series(i))
    assert not rows.has_room(series(1000))
    assert rows.has_room(series(5))


def test_replays_add_to_sentinels_of_the_step_they_are_in() -> None:
    """What is read during a capture goes to a board at a fixed address: a replay (the same kernels once more)
    counts in its own step, none is left over, and what the job says wins."""
    sentinels = Sentinels(CPU, world=1)
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with sentinels.recorded():
        sentinels.read_gradients(optimizer, sampled=True)
        sentinels.after_step(optimizer)
    board = sentinels.board.clone()  # what a replay leaves there
    sentinels.take()
    for norm in (None, 7.0, None):
        sentinels.board.copy_(board)
        if norm is not None:
            sentinels.log({"grad_norm": norm, "lr": 0.25})
        found = derive_sentinels(sentinels.take(), deque())
        assert found["grad_norm"] == pytest.approx(norm or 5.0)
        assert found["lr"] == (0.5 if norm is None else 0.25)
    assert "grad_norm" not in derive_sentinels(sentinels.take(), deque())


def test_a_capture_leaves_the_step_alone_and_says_what_is_missing() -> None:
    """Forward, backward and optimizer inside: nothing is added, no step closes, weights of the step under way
    count once; what will be missing is told with the next step, and that only `scope.step` closes steps."""
    model, worker = nn.Sequential(nn.Linear(16, 16)), MemoryWorker()
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(scope: Scope) -> None:
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        scope.log(loss=1.0)

    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        train_step(scope)
        with capture(scope):
            train_step(scope)
            train_step(scope)
        assert worker.records == []
        assert not scope._watch.capturing()
        model(torch.randn(4, 16)).sum().backward()  # closes step 0
        assert [record.step for record in worker.records] == [0]
    texts = {event.name: event.text for event in worker.record(0).events}
    assert "not measured in CUDA graphs" in texts["0"]
    assert "what it does to weights and states is not measured" in texts["optimizer"]
    assert [e.kind for e in worker.record(0).events] == ["unobserved"] * len(worker.record(0).events)
    told = [event.text for event in worker.record(0).events if event.name == "step"]
    assert any("call scope.step(n) after each replay" in text for text in told)
    assert any("scope.log has no effect while" in text for text in told)
    metrics = worker.metrics(0)
    assert metrics["0", "activation", "rowwise"]["elements"] == 4 * 16
    assert metrics["0.weight", "weight", "rowwise"]["calls"] == 1


def test_a_hidden_forward_closes_steps_after_the_optimizers() -> None:
    """Where replays hide the model's forward, a step ends when all optimizers have stepped, so that the next
    replay measures the next step."""
    model, worker = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), MemoryWorker()
    optimizers = tuple(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    with Scope(model, optimizers, worker=worker, every=2) as scope:
        with capture(scope):
            model(torch.randn(4, 16)).sum().backward()
        for step in range(4):
            assert scope._watch.sampling == (step % 2 == 0)
            optimizers[0].step()
            assert len(worker.records) == step
            optimizers[1].step()
            assert len(worker.records) == step + 1
    assert [record.step for record in worker.records] == [0, 1, 2, 3]


def test_a_step_that_only_replays_make_is_told_when_the_scope_closes() -> None:
    """A job whose whole step is in a graph and that never calls `scope.step` has a record that says so."""
    model, worker = nn.Linear(16, 16), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope, capture(scope):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
    assert any("call scope.step(n) after each replay" in e.text for r in worker.records for e in r.events)


def test_scope_step_inside_of_a_capture_has_no_effect() -> None:
    """It would put copies to the host into the graph; it is said instead."""
    model, worker = nn.Linear(16, 16), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        with capture(scope):
            scope.step(3)
        assert worker.records == []
        scope.step(0)
    assert any("scope.step has no effect while" in event.text for event in worker.record(0).events)


def test_what_graphs_write_to_lives_as_long_as_the_model() -> None:
    """A scope may be closed and forgotten while replays go on."""
    model = nn.Linear(16, 16)
    scope = Scope(model, (), worker=MemoryWorker(), every=1)
    with capture(scope):
        model(torch.randn(4, 16))
    watch = weakref.ref(scope._watch)
    rows, flag = weakref.ref(scope._watch.rows), weakref.ref(scope._watch.flag)
    scope.close()
    del scope
    gc.collect()
    assert watch() is None
    assert rows() is not None
    assert flag() is not None
    del model
    gc.collect()
    assert rows() is None
    assert flag() is None


def test_weights_of_every_captured_pass_are_recorded() -> None:
    """Each graph must measure its weights, also where the step under way or another graph has: what `once`
    has seen outside of a capture does not count inside, and the other way round."""
    model = nn.Linear(16, 16)
    watch = Watch(Rows(CPU), recipes=parse_recipes(("e4m3",)), rank=0, world=1)
    install(find_layers(model), watch)
    watch.begin(sampling=True, detailed=True)
    assert watch.once("weight")
    watch.side_stream = watch.asks_capturing = lambda: True
    assert watch.measuring
    assert not watch.detailed
    assert watch.once("weight")
    assert not watch.once("weight")
    watch.pass_begins()
    assert watch.once("weight")
    watch.side_stream = watch.asks_capturing = lambda: False
    assert watch.measuring
    assert watch.detailed
    assert not watch.once("weight")


def test_a_layer_in_a_graph_cannot_be_switched() -> None:
    """A replay would go on in the old precision: the command is rejected, and says why."""
    model, worker = nn.Sequential(Fp8Linear(128, 128)), MemoryWorker()
    worker.commands[0] = (Command(id=7, issued_by="user",
                                  action=SetPrecision(modules=("0",), precision="bf16")),)
    with Scope(model, (), worker=worker, every=1) as scope:
        scope._watch.recorded.add(("0", "activation"))
        for step in range(3):
            scope.step(step)
    (report,) = worker.record(2).reports
    assert (report.id, report.state) == (7, "rejected")
    assert "CUDA graph" in report.reason
    assert model[0].precision == "fp8"
