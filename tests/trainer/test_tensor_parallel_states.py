"""States of parameters whose columns are cut, or rows in other ways than one after the other."""

import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("tensor_parallel_job.py")


@pytest.mark.parametrize("ranks", [2, 4])
def test_codes_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    """Matrices, experts and kernels, cut along rows, columns and both, with FSDP on 2 x 2 ranks: codes,
    scales and weights to the bit, where blocks are whole; else fp32, with the reason."""
    jobs = [subprocess.Popen([sys.executable, str(JOB), str(rank), str(ranks), str(tmp_path / "store")],
                             stdout=subprocess.PIPE, text=True) for rank in range(ranks)]
    try:
        told = [one.communicate(timeout=280)[0] for one in jobs]
    finally:
        for one in jobs:
            one.kill()
    assert "".join(told).strip() == ""
    assert [one.returncode for one in jobs] == [0] * ranks
