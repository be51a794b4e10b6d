"""States of parameters whose columns are cut, or rows in other ways than one after the other."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fp8scope_trainer.checkpoint import load

JOB = Path(__file__).with_name("tensor_parallel_job.py")


@pytest.fixture(scope="module")
def job() -> ModuleType:
    """The job, importable here for its one-process form."""
    return importlib.import_module("tests.trainer.tensor_parallel_job")


@pytest.mark.parametrize("ranks", [2, 4])
def test_codes_are_those_of_one_process(ranks: int, tmp_path: Path, job: ModuleType) -> None:
    """Matrices, experts and kernels, cut along rows, columns and both, with FSDP on 2 x 2 ranks: codes,
    scales and weights to the bit, where blocks are whole; else fp32, with the reason. A checkpoint of the
    parts is loaded into parts, and by one process."""
    command = [sys.executable, str(JOB)]
    jobs = [subprocess.Popen([*command, str(rank), str(ranks), str(tmp_path)], stdout=subprocess.PIPE,
                             text=True) for rank in range(ranks)]
    try:
        told = [one.communicate(timeout=280)[0] for one in jobs]
    finally:
        for one in jobs:
            one.kill()
    assert "".join(told).strip() == ""
    assert [one.returncode for one in jobs] == [0] * ranks
    cases = job.possible(job.TWO if ranks == 2 else job.FOUR)
    trained, fresh = job.Run(cases, job.JOBS[0]), job.Run(cases, job.JOBS[0])
    trained.train()
    load(tmp_path / "saved", fresh.model, fresh.optimizer)
    for a, b in zip(trained.parameters, fresh.parameters, strict=True):
        assert torch.equal(a, b)
        wanted, found = trained.optimizer.state[a], fresh.optimizer.state[b]
        assert wanted.keys() == found.keys()
        assert all(torch.equal(job.raw(wanted[key]), job.raw(found[key])) for key in wanted)
