"""Checkpoints: resumed to the bit, on any number of ranks; what does not fit is refused with both sides."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

JOB = Path(__file__).with_name("checkpoint_job.py")
STATES = ("fp32", "fp8")

Found = list[dict[str, Any]]


def job(folder: Path, ranks: int, plan: list[dict[str, Any]]) -> list[Found]:
    """What each rank found in each run of `plan`, in new processes."""
    for number, one in enumerate(plan):
        one["out"] = str(folder / f"out{number}")
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    (folder / "store").unlink(missing_ok=True)
    jobs = [subprocess.Popen([sys.executable, str(JOB), str(rank), str(ranks), str(folder / "store"), str(path)])
            for rank in range(ranks)]
    try:
        assert [one.wait(timeout=240) for one in jobs] == [0] * ranks
    finally:
        for one in jobs:
            one.kill()
    return [[torch.load(f"{one['out']}.{rank}") for rank in range(ranks)] for one in plan]


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """To the bit, all the way down."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert one == other, where


RESUMED = ("parameters", "states", "codes", "scales", "histories", "precisions", "lr")


@pytest.mark.parametrize("ranks", [1, 2])
def test_z5_resumed_is_uninterrupted_to_the_bit(ranks: int, tmp_path: Path) -> None:
    """Z5: 5 steps, save, a new process, to step 10: losses, parameters, state codes, weight codes and scales,
    histories, switched precisions and lr are those of a job that was never interrupted. Codes at load, too."""
    through = job(tmp_path, ranks, [{"states": states, "stop": 10} for states in STATES])
    first = job(tmp_path, ranks, [{"states": states, "stop": 5, "save": str(tmp_path / states)}
                                  for states in STATES])
    second = job(tmp_path, ranks, [{"states": states, "stop": 10, "load": str(tmp_path / states)}
                                   for states in STATES])
    for whole, before, after in zip(through, first, second, strict=True):
        for rank in range(ranks):
            loaded = after[rank]["loaded"]
            assert loaded.pop("random")
            assert loaded["data"] == 20
            assert loaded["extra"] == {"note": "kept"}
            assert before[rank]["losses"] + after[rank]["losses"] == whole[rank]["losses"]
            for key in RESUMED:
                assert_same(loaded["state"][key], before[rank][key], f"at load: {key}")
                assert_same(after[rank][key], whole[rank][key], key)
            assert "bf16" in after[rank]["precisions"].values()


def test_z5_with_the_probe_attached(tmp_path: Path) -> None:
    """The probe changes no bit of a resumed run, which goes on as the same run at step 5."""
    spool = str(tmp_path / "spool")
    (plain,), = job(tmp_path, 1, [{"states": "fp8", "stop": 10}])
    (first,), = job(tmp_path, 1, [{"states": "fp8", "stop": 5, "save": str(tmp_path / "c"), "spool": spool}])
    (second,), = job(tmp_path, 1, [{"states": "fp8", "stop": 10, "load": str(tmp_path / "c"), "spool": spool}])
    assert first["losses"] + second["losses"] == plain["losses"]
    for key in RESUMED:
        assert_same(second[key], plain[key], key)


def test_saved_on_n_ranks_and_loaded_on_m(tmp_path: Path) -> None:
    """Rows that no rank number divides, and ranks that hold none: from 4 to 2 to 1 to 4 ranks every parameter,
    code and scale is the same; only torch's generators, which belong to ranks, are not restored."""
    folders = {ranks: {states: str(tmp_path / f"{states}-{ranks}") for states in STATES} for ranks in (4, 2, 1)}

    def resaved(ranks: int, source: int | None, stop: int = 3) -> list[Found]:
        return job(tmp_path, ranks, [
            {"model": "odd", "states": states, "stop": stop, "save": folders[ranks][states]}
            | ({} if source is None else {"load": folders[source][states]}) for states in STATES])

    first = resaved(4, None)
    for ranks, source in ((2, 4), (1, 2), (4, 1)):
        for before, after in zip(first, resaved(ranks, source), strict=True):
            for found in after:
                assert not found["loaded"]["random"]
                for key in ("parameters", "states", "lr"):
                    assert_same(found["loaded"]["state"][key], before[0][key], f"{source} -> {ranks}: {key}")


def test_a_mesh_that_changes_goes_on_with_the_same_rounding(tmp_path: Path) -> None:
    """3 steps on 2 ranks and 3 on 1 give the codes of 6 on 1, where the gradients are alike to the bit."""
    (through,), = job(tmp_path, 1, [{"model": "odd", "states": "fp8", "stop": 6}])
    job(tmp_path, 2, [{"model": "odd", "states": "fp8", "stop": 3, "save": str(tmp_path / "c")}])
    (after,), = job(tmp_path, 1, [{"model": "odd", "states": "fp8", "stop": 6, "load": str(tmp_path / "c")}])
    assert_same(after["states"]["wide.weight.step"], through["states"]["wide.weight.step"])
    torch.testing.assert_close(after["parameters"], through["parameters"], rtol=0, atol=1e-4)


def test_other_states_are_refused_on_every_rank(tmp_path: Path) -> None:
    """No rank hangs: all say what the checkpoint holds, what the optimizer wants, and the command."""
    folder = str(tmp_path / "c")
    job(tmp_path, 1, [{"states": "fp8", "stop": 1, "save": folder}])
    (found,) = job(tmp_path, 2, [{"states": "fp32", "stop": 2, "load": folder}])
    for rank in found:
        assert "states = 'fp32 (layers.0.attention.qkv.weight and 7 more)'" in rank["error"]
        assert "the checkpoint holds fp8" in rank["error"]
        assert "fp8scope convert-checkpoint FROM TO --states fp32" in rank["error"]
