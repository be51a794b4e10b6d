"""`fp8scope train` from outside: its processes, its summary, its ends."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ranks import run_ranks
from torch import nn

from fp8scope.spool import adopt
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.series import decode_layout
from fp8scope_protocol.wire import decode_hello
from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.checkpoint_folder import PARTIAL, newest
from fp8scope_trainer.options import Saving, parse
from fp8scope_trainer.progress import Record
from fp8scope_trainer.saving import Checkpoints
from fp8scope_trainer.token_file import write_tokens
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


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The summary of a run in this process."""
    assert main(["--no-probe", "--json", "--batch", "1", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_recipes_set_what_goes_together_and_options_beside_them_win() -> None:
    """FP8's: 1.5 times the learning rate, clip 0.8, 2,000 steps of warm-up, a history of 1,024."""
    lr = parse(["--no-probe"]).lr
    fp8 = parse(["--no-probe", "--recipe", "fp8"])
    assert fp8.lr == pytest.approx(1.5 * lr)
    assert (fp8.recipe.clip, fp8.recipe.warmup_steps, fp8.recipe.linear.history_length) == (0.8, 2000, 1024)
    bf16 = parse(["--no-probe", "--recipe", "bf16"])
    assert (bf16.precision, bf16.recipe.states, bf16.lr, bf16.run) == ("bf16", "fp32", lr, "demo-bf16")
    int8 = parse(["--no-probe", "--recipe", "int8-states"])
    assert (int8.precision, int8.recipe.states) == ("fp8", "int8")
    own = parse(["--no-probe", "--recipe", "fp8", "--states", "int4", "--clip", "0.5", "--warmup", "7",
                 "--lr", "0.1", "--precision", "bf16"])
    assert (own.recipe.states, own.recipe.clip, own.recipe.warmup_steps) == ("int4", 0.5, 7)
    assert (own.lr, own.precision) == (0.1, "bf16")


def launched(rank: int, said: Path, port: int, arguments: list[str]) -> None:
    """One of two ranks, as a launcher starts them; the first one's summary goes to `said`."""
    os.environ |= ENVIRONMENT | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (said if rank == 0 else Path(os.devnull)).open("w") as file:
        os.dup2(file.fileno(), 1)
    main(["--no-probe", "--json", "--ranks", "2", *arguments])


@pytest.mark.parametrize("stage", ["1", "2"])
def test_micro_batches_add_up_to_the_batch_that_they_are_parts_of(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In BF16 one process with four sequences, with two times two, and two ranks with two times one read the
    same and lose the same, within 1e-4."""
    arguments = ["--steps", "3", "--precision", "bf16", "--states", "fp32"]
    whole = here(capsys, *arguments, "--batch", "4")
    parts = here(capsys, *arguments, "--batch", "2", "--accumulate", "2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = [*arguments, "--batch", "1", "--accumulate", "2", "--stage", stage]
    run_ranks(launched, tmp_path / "said", port, own, ranks=2)
    ranks = json.loads((tmp_path / "said").read_text().splitlines()[-1])
    assert whole["tokens_per_step"] == parts["tokens_per_step"] == ranks["tokens_per_step"]
    assert parts["losses"] == pytest.approx(whole["losses"], abs=1e-4)
    assert ranks["losses"] == pytest.approx(whole["losses"], abs=1e-4)


def test_a_resumed_job_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses to the last digit, those of the held-out text too; other data or seeds are refused, and so is
    starting over where checkpoints are."""
    arguments = ["--states", "int8", "--checkpoint", str(tmp_path / "saved")]
    through = here(capsys, "--steps", "5", "--states", "int8")
    first = here(capsys, "--steps", "3", "--save-every", "2", *arguments)
    assert {path.name for path in (tmp_path / "saved").glob("step-*")} == {"step-00000002", "step-00000003"}
    second = here(capsys, "--steps", "5", "--resume", *arguments)
    assert (first["first_step"], second["first_step"], second["steps"]) == (0, 3, 2)
    assert first["losses"] + second["losses"] == through["losses"]
    assert second["held_out_loss"] == through["held_out_loss"]
    beyond = here(capsys, "--steps", "4", "--resume", *arguments)
    assert (beyond["first_step"], beyond["steps"], beyond["tokens_per_second"]) == (5, 0, 0)
    assert beyond["held_out_loss"] == through["held_out_loss"]
    for other, said in ((["--resume", "--accumulate", "2"], "sequences_per_step = 2: the checkpoint was"),
                        (["--resume", "--states", "fp8"], "states"), ([], "holds checkpoints already")):
        assert main(["--no-probe", "--batch", "1", "--steps", "9", *arguments, *other]) == 2
        assert said in capsys.readouterr().err


def test_nothing_left_to_train_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of as many steps as were asked for: no step, exit code 0, and one line that says why."""
    arguments = ["--no-probe", "--batch", "1", "--steps", "1", "--checkpoint", str(tmp_path / "saved")]
    assert main(arguments) == 0
    assert "nothing is left" not in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert "nothing is left to train: the checkpoint has 1 steps, and --steps is 1" in capsys.readouterr().err


def test_a_job_that_cannot_save_says_so_trains_on_and_does_not_end_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first failed save is told at once, all steps are made, and the exit code is 1. A folder in which
    nothing can be written is refused before the first step."""
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / PARTIAL).write_text("in the way")
    arguments = ["--no-probe", "--json", "--batch", "1", "--steps", "2", "--save-every", "1"]
    assert main([*arguments, "--checkpoint", str(tmp_path / "saved")]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["steps"] == 2
    first, last = (line for line in told.err.splitlines() if line.startswith("fp8scope train: no checkpoint"))
    assert "Not a directory; training goes on" in first
    assert last.endswith("the job ends with exit code 1")
    assert main([*arguments, "--checkpoint", str(tmp_path / "file" / "saved")]) == 2
    told = capsys.readouterr()
    assert "cannot be written in: Not a directory" in told.err
    assert "step" not in told.err
    assert main([*arguments, "--checkpoint", str(tmp_path / "file")]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err


def test_a_later_checkpoint_makes_up_for_a_failed_one(tmp_path: Path) -> None:
    """Only what was trained after the last good one is lost; its failure is what counts."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    model = nn.Linear(8, 8)
    saves = Checkpoints(saving=Saving(folder=str(blocked / "saved"), every=1), model=model,
                        optimizer=AdamW(model.parameters()), reads={})
    saves.after_step(0, last=False)
    assert saves.failed
    blocked.unlink()
    saves.after_step(1, last=False)
    assert not saves.failed
    assert newest(blocked / "saved") is not None


def test_ranks_that_share_layers_train_as_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """They read the same sequences; losses are those of one rank with as many, within 1e-3."""
    arguments = ["--steps", "2", "--precision", "bf16", "--states", "fp32", "--batch", "2"]
    alone = here(capsys, *arguments)
    shared = summary(*arguments, "--ranks", "2", "--tensor-parallel", "2")
    assert shared["tokens_per_step"] == alone["tokens_per_step"]
    assert shared["losses"] == pytest.approx(alone["losses"], abs=1e-3)
    assert (shared["tensor_parallel"], shared["ranks"]) == (2, 2)


def test_weights_gathered_as_codes_are_counted_and_listed_as_not_observed(tmp_path: Path) -> None:
    """8 of the demo's 16 have rows for two ranks; the probe lists each of them and measures the others."""
    command = [sys.executable, "-m", "fp8scope_trainer.train", "--ranks", "2", "--stage", "3", "--fp8-gather",
               "--steps", "2", "--batch", "1", "--every", "1", "--collector", "offline", "--run", "codes"]
    done = subprocess.run(command, env=ENVIRONMENT | {"FP8SCOPE_HOME": str(tmp_path)}, capture_output=True,
                          text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert "8 of 16 weights are gathered as FP8 codes" in done.stderr
    (spool,) = adopt(tmp_path / "spool", "codes", limit=2**30)
    while (record := spool.peek()) is not None:
        spool.ack(record)
    hidden = decode_hello(spool.hello).unobserved
    assert {one.name for one in hidden if "gathered as FP8 codes" in one.reason} == {
        f"layers.{i}.{part}" for i in range(4) for part in ("attention.qkv", "mlp.gate_up")}
    series = [one for layout in spool.layouts.values() for one in decode_layout(layout).series]
    assert {one.name for one in series if one.role == "weight" and one.live} == {
        f"layers.{i}.{part}.weight" for i in range(4) for part in ("attention.out", "mlp.down")}
    spool.close()


def test_layers_that_no_ranks_can_share_are_refused_before_anything_starts() -> None:
    """The demo has two key/value heads."""
    with pytest.raises(Invalid, match="kv_heads = 2: must be a multiple of 4"):
        parse(["--ranks", "4", "--tensor-parallel", "4", "--states", "fp32"])


def test_a_token_file_is_trained_on_with_its_own_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model gets the file's vocabulary; a raw file must be explained; a bad token ends the job."""
    write_tokens(tmp_path / "tokens", np.arange(20_000) % 300, vocabulary=300)
    found = here(capsys, "--steps", "2", "--data", str(tmp_path / "tokens"))
    assert found["loss"]["first"] == pytest.approx(np.log(300), abs=0.3)
    assert found["parameters"] == 1_050_240 + 2 * 128 * (300 - 256)
    (np.arange(20_000) % 300).astype("<u2").tofile(tmp_path / "raw")
    raw = ["--no-probe", "--steps", "2", "--data", str(tmp_path / "raw")]
    as_uint16 = ["--data-dtype", "uint16"]
    for options, said in (([], "data_dtype = None: must be one of"),
                          (as_uint16, "vocabulary = None: must be given"),
                          ([*as_uint16, "--vocabulary", "299"], "must be below the vocabulary")):
        assert main([*raw, *options]) == 2
        assert said in capsys.readouterr().err


def test_mfu_is_shown_where_a_peak_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary's share is tokens a second times operations a token over the peak; none without a peak."""
    found = here(capsys, "--steps", "2", "--peak-tflops", "0.001")
    # 6 for each of the 983,040 + 32,768 weights that multiply, and for 4 layers x 128 tokens x 256
    flops = 6 * (983_040 + 32_768 + 4 * 128 * 256)
    share = found["tokens_per_second"] * flops / 1e9  # with one decimal, and few on a busy core
    assert found["mfu"] == pytest.approx(share, rel=0.06 / found["tokens_per_second"], abs=6e-5)
    assert found["peak_memory_bytes"] is None


def test_runs_repeat_and_seeds_and_precisions_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """The same command gives the same losses to the last digit; another seed or precision others."""

    def losses(*arguments: str) -> list[float]:
        found: list[float] = here(capsys, "--steps", "3", *arguments)["losses"]
        return found

    base = losses()
    assert losses() == losses("--deterministic") == base
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
    (["--recipe", "int8"], "near misses: int8-states"),
    (["--states", "int3"], "must be one of fp32"),
    (["--states", "fp8", "--block", "64"], "block = 64"),
    (["--stage", "4"], "stage = '4': must be one of 0"),
    (["--shard-ranks", "2"], "goes with stage HYBRID_SHARD"),
    (["--tensor-parallel", "0"], "--tensor-parallel = 0: must be a whole number from 1"),
    (["--tensor-parallel", "3"], "must divide the number of ranks, 2"),
    (["--tensor-parallel", "2", "--states", "fp32", "--drill", "frozen-amax"], "cannot be cut"),
    (["--tensor-parallel", "2", "--states", "fp32", "--stage", "HYBRID_SHARD", "--shard-ranks", "2"],
     "must divide the 1 groups"),
    (["--fp8-gather"], "is for --stage 3 and HYBRID_SHARD"),
    (["--fp8-gather", "--stage", "3", "--precision", "bf16"], "needs --precision fp8"),
    (["--fp8-gather", "--stage", "3", "--states", "fp32", "--tensor-parallel", "2"],
     "does not go with --tensor-parallel"),
    (["--fp8-gather", "--stage", "HYBRID_SHARD", "--shard-ranks", "1"], "needs two ranks or more"),
    (["--clip", "0"], "clip = 0.0: must be above 0"),
    (["--warmup", "-1"], "warmup_steps = -1: must be a whole number"),
    (["--accumulate", "0"], "accumulate = 0: must be a whole number"),
    (["--peak-tflops", "0"], "peak_tflops = 0.0: must be above 0"),
    (["--resume"], "--checkpoint = None: must be given"),
    (["--vocabulary", "9"], "--data = None: must be given"),
    (["--data", "no-such-file"], "cannot be read (No such file"),
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


def test_a_text_without_a_held_out_sequence_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after the last step: the last 20th of 300 tokens is 15, a sequence of the demo 128."""
    path = tmp_path / "short.bin"
    path.write_bytes(b"hello" * 60)
    assert main(["--no-probe", "--steps", "2", "--data", str(path), "--data-dtype", "uint8"]) == 2
    said = capsys.readouterr().err
    assert "--data = 15" in said
    assert "loss" not in said
