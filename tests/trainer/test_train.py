"""`fp8scope train` from outside: its processes, its summary, its ends."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from fp8scope_trainer.progress import Record
from fp8scope_trainer.train import main

COMMAND = [sys.executable, "-m", "fp8scope_trainer.train", "--no-probe"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def summary(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, "--json", *arguments], env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_two_ranks_learn_under_a_drill_and_say_so() -> None:
    """Two FP8 ranks learn; the summary holds each step's loss, the drill, and a held-out loss."""
    found = summary("--ranks", "2", "--steps", "8", "--drill", "frozen-amax", "--fault-step", "5")
    assert found["ranks"] == 2
    assert len(found["losses"]) == found["steps"] == 8
    assert found["loss"]["last"] < found["loss"]["first"] - 0.5
    assert found["held_out_loss"] < found["loss"]["first"] - 0.5
    assert found["drill"]["layer"] == "layers.2.attention.qkv"
    assert found["stopped"] is False


def test_runs_repeat_and_seeds_and_precisions_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """The same command gives the same losses to the last digit; another seed or precision others."""

    def losses(*arguments: str) -> list[float]:
        assert main(["--no-probe", "--json", "--steps", "3", "--batch", "1", *arguments]) == 0
        found: list[float] = json.loads(capsys.readouterr().out.splitlines()[-1])["losses"]
        return found

    base = losses()
    assert losses() == base
    assert losses("--seed", "1") != base
    in_bf16 = losses("--precision", "bf16")
    assert in_bf16 != base
    assert in_bf16 == pytest.approx(base, rel=0.02)


def test_summary_has_no_nan_and_names_the_first_step_in_a_new_precision() -> None:
    """A loss that is not finite is null and counted; a switch is noted once, at the step that ran in it."""
    record = Record(tokens_per_step=10)
    steps = [(3.0, "fp8"), (math.nan, "fp8"), (2.0, "shadow"), (2.5, "shadow")]
    for step, (loss, precision) in enumerate(steps):
        record.note_precision(step, {"layers.0": precision, "layers.1": "fp8"})
        record.add(loss)
    found = record.summary()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["losses"] == [3.0, None, 2.0, 2.5]
    assert found["loss"] == {"first": 3.0, "last": 2.5, "min": 2.0, "nonfinite": 1}
    assert found["precision_changes"] == [{"step": 2, "module": "layers.0", "precision": "shadow"}]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_ends_all_ranks_with_a_summary(ranks: int) -> None:
    """SIGTERM: the step is finished, the summary says `stopped`, the exit code is 143, no process stays."""
    job = subprocess.Popen([*COMMAND, "--json", "--steps", "100000", "--ranks", str(ranks)], env=ENVIRONMENT,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert job.stderr is not None
    while not job.stderr.readline().startswith("step"):
        assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGTERM
    found = json.loads(output.splitlines()[-1])
    assert found["stopped"] is True
    assert 0 < found["steps"] < 100000
    deadline = time.monotonic() + 10
    while _alive(job.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(job.pid)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--steps", "0"], "steps = 0: must be a whole number from 1"),
    (["--steps", "many"], "--steps = 'many': must be a whole number"),
    (["--preset", "dmo"], "near misses: demo"),
    (["--lr", "nan"], "lr = nan: must be above 0"),
    (["--drill", "frozen-amax", "--drill-block", "layers.9"], "block = 'layers.9': matches nothing"),
    (["--fault-step", "3"], "must be frozen-amax to set fault_step"),
    (["--nonsense"], "unrecognized arguments: --nonsense"),
])
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is trained, started or traced back; the line says what was wrong and what is accepted."""
    assert main([*arguments, "--ranks", "2"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def _alive(session: int) -> bool:
    """Whether any process of the session is left."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_leaves_with_its_output_and_without_teardown() -> None:
    """The exit code and what was printed arrive; nothing of the interpreter's teardown runs, where torch's
    communication threads abort a finished rank."""
    code = (
        "import atexit, sys; from fp8scope_trainer.processes import leave; "
        "atexit.register(print, 'teardown'); sys.stdout.write('said'); leave(7)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "said")
