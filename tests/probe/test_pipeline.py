"""Pipeline stages as producers: the numbers of one process, whatever the schedule, and no series in two."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.probe.conftest import spooled_steps
from tests.probe.stage_job import SCHEDULES, Job, Stage, train_alone, train_stage
from tests.ranks import run_ranks
from torch import nn

import fp8scope
from fp8scope_protocol.errors import Invalid

STEPS = 3
SAMPLED = {"wgrad_row_error_max", "gemm_error", "worst_rank"}
Spooled = Callable[[Path, str], list[Any]]
Metrics = dict[tuple[str, str, str], dict[str, float]]


def run(folder: Path, job: Job) -> Path:
    """The job's spool, once all ranks have ended."""
    os.environ["FP8SCOPE_HOME"] = str(folder)
    try:
        run_ranks(train_stage, job, ranks=job.world)
    finally:
        del os.environ["FP8SCOPE_HOME"]
    return folder / "spool"


def assert_alike(found: Metrics, wanted: Metrics) -> None:
    """Counts are equal, everything else is to five digits, but for what tells ranks apart."""
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert found[key].keys() - SAMPLED == values.keys() - SAMPLED, key
        for metric, value in values.items():
            if metric in SAMPLED:
                continue
            exact = metric in ("elements", "calls", "nan_count", "inf_count", "zero_block_count")
            assert found[key][metric] == (value if exact else pytest.approx(value, rel=1e-5, abs=1e-7)), (
                key, metric)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The spool of the whole model in one process."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8SCOPE_HOME", str(folder))
        train_alone("alone", STEPS)
    return folder / "spool"


@pytest.fixture(scope="module")
def reference(alone: Path) -> list[Any]:
    return spooled_steps(alone, "alone")


@pytest.mark.parametrize(("world", "schedules"), [(2, (*SCHEDULES, "interleaved")), (4, ("gpipe", "1f1b"))])
def test_stages_have_the_numbers_of_one_process(
    world: int, schedules: tuple[str, ...], tmp_path: Path, reference: list[Any], spooled: Spooled
) -> None:
    """Two stages, of one and of two replicas, and two stages on each rank. Every micro-batch counts once: not
    the pass by which the stages learn their shapes, nor a gradient twice where inputs and weights have passes
    of their own (zero bubble). Sentinels are the whole job's, told once; series keep the order of a rank."""
    spool = run(tmp_path, Job(folder=str(tmp_path), schedules=schedules, world=world, steps=STEPS))
    for schedule in schedules:
        steps = spooled(spool, schedule)
        by_producer = {name: [one for one in steps if one.header.producer == name]
                       for name in ("part0", "part1")}
        first, second = by_producer["part0"], by_producer["part1"]
        assert [one.header.step for one in first] == [0, 1, 2]
        assert [one.header.step for one in second] == [0, 2]
        assert {one.hello.attempt for one in steps} == {first[0].hello.attempt}
        order = (0, 2, 1, 3) if schedule == "interleaved" else range(4)
        assert [layer.name for one in (first, second) for layer in one[0].hello.precision] == [
            f"layers.{i}" for i in order]
        assert max(s.depth for s in first[0].series) < min(s.depth for s in second[0].series)
        assert all(one.header.sentinels == {} and one.header.events == () for one in second)
        for ours, theirs in zip(first, reference, strict=True):
            assert ours.header.sentinels == pytest.approx(theirs.header.sentinels, rel=1e-6)
        for mine, yours, theirs in zip(first[::2], second, reference[::2], strict=True):
            assert not mine.metrics.keys() & yours.metrics.keys()
            assert_alike(mine.metrics | yours.metrics, theirs.metrics)


def test_z6_a_stage_without_a_probe_hangs_nobody(
    tmp_path: Path, spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage has none: the first one says so and measures what it has, alone."""
    monkeypatch.setenv("FP8SCOPE_HANDSHAKE_SECONDS", "1")
    spool = run(tmp_path, Job(folder=str(tmp_path), schedules=("1f1b",), without_probe=(1,)))
    steps = spooled(spool, "1f1b")
    assert [one.header.producer for one in steps] == ["rank0"] * STEPS
    assert "no probe within 1 s on rank 1" in steps[0].header.events[0].text
    assert {name for name, _, _ in steps[0].metrics} == {
        "layers.0", "layers.0.weight", "layers.1", "layers.1.weight"}


def test_stages_in_a_list_close_their_steps(
    tmp_path: Path, spooled: Spooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interleaved schedules give a rank several stages, which are called one by one: the list that holds them
    never is. A step closes at the first forward of any of them, and `rename` gives back the model's names."""
    monkeypatch.setenv("FP8SCOPE_HOME", str(tmp_path))
    stages = nn.ModuleList([Stage(0, 1), Stage(2, 3)])
    optimizer = torch.optim.SGD(stages.parameters(), lr=1e-3)
    with fp8scope.attach(stages, optimizer, run="list", every=1, detail_every=1,
                         collector="offline", rename=lambda name: name.partition(".")[2]):
        for _ in range(3):
            for stage in stages:
                stage(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
    steps = spooled(tmp_path / "spool", "list")
    assert [one.header.step for one in steps] == [0, 1, 2]
    for one in steps:
        assert {(name, metrics["calls"]) for (name, role, _), metrics in one.metrics.items()
                if role == "activation"} == {("layers.0", 1), ("layers.2", 1)}


def test_names_that_cannot_be_used_are_refused() -> None:
    """Two layers of one name, a name that is none, no function: told before anything is hooked."""
    model = Stage(0, 2)
    wrong = ((lambda name: "same", "its own name; 2 have this one"),
             (lambda name: name.strip("layers.0"), "1 to 256"), ("stage1.", "must be a function"))
    for rename, told in wrong:
        with pytest.raises(Invalid, match=told):
            fp8scope.attach(model, run="names", collector="offline", rename=rename)  # type: ignore[arg-type]
