"""An optimizer's codes, scales and weights do not depend on how many ranks hold them."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.ranks import run_job

JOB = Path(__file__).with_name("mesh_job.py")


@pytest.fixture(scope="module")
def job() -> ModuleType:
    """The job, importable here for its one-process form."""
    return importlib.import_module("tests.trainer.mesh_job")


@pytest.mark.parametrize("ranks", [2, 4])
def test_states_are_those_of_one_process(ranks: int, tmp_path: Path, job: ModuleType) -> None:
    """Uneven rows, ranks without any, experts, kernels, vectors, bf16 weights, a warm-up: equal to the bit in
    every format, for a rule with two moments and one with one."""
    run_job(JOB, tmp_path / "store", tmp_path / "out", ranks=ranks)
    found = [torch.load(tmp_path / f"out.{rank}") for rank in range(ranks)]
    for rule, states in job.JOBS:
        for key, value in job.stepped(ranks=1, rule=rule, states=states).items():
            joined = torch.cat([rank[f"{rule} {states}"][key] for rank in found])
            assert torch.equal(joined, value), (rule, states, key)
