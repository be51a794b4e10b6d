"""ZeRO-2: two real ranks give what one process gives."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.ranks import run_job

Found = list[dict[str, Any]]

JOB = Path(__file__).with_name("shard_job.py")


@pytest.fixture(scope="module")
def job() -> ModuleType:
    """The job, importable here for its one-process form."""
    return importlib.import_module("tests.trainer.shard_job")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_job(JOB, folder / "store", folder / "out", ranks=2)
    return [torch.load(folder / f"out.{rank}") for rank in range(2)]


def test_two_ranks_train_as_one_process_in_fp32(ranks: Found, job: ModuleType) -> None:
    """Losses and every parameter after five steps agree within 1e-5; both ranks hold the same."""
    alone = job.trained(rank=0, ranks=1, fp8=False)
    for rank in ranks:
        assert rank["fp32"]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        for name, value in alone["parameters"].items():
            torch.testing.assert_close(rank["fp32"]["parameters"][name], value, rtol=0, atol=1e-5)


def test_two_ranks_train_as_one_process_in_fp8(ranks: Found, job: ModuleType) -> None:
    """In FP8, with E4M3 moments and a switch on the way, losses agree within 1 %; ranks are alike."""
    alone = job.trained(rank=0, ranks=1, fp8=True)
    assert ranks[0]["fp8"]["losses"] == pytest.approx(alone["losses"], rel=0.01)
    assert ranks[0]["fp8"]["losses"][-1] < ranks[0]["fp8"]["losses"][0]
    for name, value in ranks[0]["fp8"]["parameters"].items():
        assert torch.equal(value, ranks[1]["fp8"]["parameters"][name]), name


def test_histories_hold_the_amax_over_ranks(ranks: Found, job: ModuleType) -> None:
    """A delayed scale is the same on both ranks, and the first one that of the whole batch."""
    alone = job.trained(rank=0, ranks=1, fp8=True)
    (first,), (second,) = (rank["fp8"]["histories"] for rank in ranks)
    (whole,) = alone["histories"]
    assert torch.equal(first, second)
    assert bool((first > 0).all())
    torch.testing.assert_close(first[0], whole[0])


def test_rounding_does_not_depend_on_the_mesh(ranks: Found, job: ModuleType) -> None:
    """33 rows on two ranks (17 and 16): codes, scales and weights are the bits that one process computes."""
    alone = job.stepped(ranks=1)
    for key, value in alone.items():
        parts = [rank["stepped"][key] for rank in ranks]
        assert [part.shape[0] for part in parts] == [17, 16]
        joined = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        assert torch.equal(joined, value.reshape(-1).view(torch.uint8)), key
