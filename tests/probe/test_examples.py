"""The examples run as they stand, offline, and measure what they show."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
RUNS = {"huggingface_trainer": 20, "lightning_trainer": 30, "plain_loop": 20}
"""Steps by example; each measures every fifth."""


def test_every_example_is_run() -> None:
    """A new file in the folder is a new row here."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_the_example_runs(name: str, tmp_path: Path, spooled: Any) -> None:
    """All its steps are in the spool, in full at the cadence, with a loss that falls; nothing went wrong."""
    environment = {"FP8SCOPE_COLLECTOR": "offline", "FP8SCOPE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1",
                   "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], env=os.environ | environment,
                          cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "spool").iterdir()
    steps = spooled(tmp_path / "spool", folder.name)
    assert [step.header.step for step in steps] == list(range(RUNS[name]))
    assert [bool(step.series) for step in steps] == [n % 5 == 0 for n in range(RUNS[name])]
    roles = {(one.name.removesuffix(".weight"), one.role) for one in steps[0].series}
    for layer in {name for name, role in roles if role == "weight"}:
        for role in ("activation", "gradient", "exp_avg", "exp_avg_sq"):
            assert (layer, role) in roles
    losses = [step.header.sentinels["loss"] for step in steps]
    assert losses[-1] < losses[0]
    assert all(step.header.sentinels["grad_norm"] > 0 for step in steps if step.series)
    assert [event for step in steps for event in step.header.events] == []
