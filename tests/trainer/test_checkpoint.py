"""Checkpoints: resumed to the bit, on any number of ranks; what does not fit is refused on every rank."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_job

from fp8scope.spool import adopt
from fp8scope_protocol.wire import decode_batch, decode_hello
from fp8scope_trainer.state_conversion import convert_states

JOB = Path(__file__).with_name("checkpoint_job.py")
STATES = ("fp32", "bf16", "int16", "fp8", "int8", "int4")

Found = list[dict[str, Any]]
Plan = dict[str, Any]


def job(folder: Path, ranks: int, plan: list[Plan]) -> list[Found]:
    """What each rank found in each run of `plan`, in new processes."""
    for number, one in enumerate(plan):
        one["out"] = str(folder / f"out{number}")
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    (folder / "store").unlink(missing_ok=True)
    run_job(JOB, folder / "store", path, ranks=ranks)
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
PLANS: dict[int, list[Plan]] = {
    1: [*({"states": states} for states in STATES), {"states": "int8", "warm_up": 7},
        {"states": "int8", "optimizer": "SGD"}, {"states": "int4", "optimizer": "Lion"},
        {"states": "int8", "block": 256, "optimizer": "Adam"}, {"states": "fp8", "spool": "spool"}],
    2: [{"states": "fp32"}, {"states": "fp8"}, {"states": "int8"}, {"states": "int4"}],
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_z5_resumed_is_uninterrupted_to_the_bit(ranks: int, tmp_path: Path) -> None:
    """Z5: 5 steps, save, a new process, to step 10: losses, parameters, states, FP8 weight codes and scales,
    histories, switched precisions and lr are those of a job that was never interrupted; at load already.

    In every format, with every rule, across the end of a warm-up, and with a probe on the interrupted jobs.
    """
    plans = [plan | ({"spool": str(tmp_path / "spool")} if "spool" in plan else {}) for plan in PLANS[ranks]]
    folders = [str(tmp_path / str(number)) for number in range(len(plans))]
    through = [{key: value for key, value in plan.items() if key != "spool"} | {"stop": 10} for plan in plans]
    first = [plan | {"stop": 5, "save": folder} for plan, folder in zip(plans, folders, strict=True)]
    found = job(tmp_path, ranks, through + first)
    second = job(tmp_path, ranks, [plan | {"stop": 10, "load": folder}
                                   for plan, folder in zip(plans, folders, strict=True)])
    for whole, before, after in zip(found[:len(plans)], found[len(plans):], second, strict=True):
        for rank in range(ranks):
            assert after[rank].get("error") is None
            loaded = after[rank]["loaded"]
            assert loaded["random"]
            assert loaded["data"] == 20
            assert loaded["extra"] == {"note": "kept"}
            assert before[rank]["losses"] + after[rank]["losses"] == whole[rank]["losses"]
            for key in RESUMED:
                assert_same(loaded["state"][key], before[rank][key], f"at load: {key}")
                assert_same(after[rank][key], whole[rank][key], key)
            assert "bf16" in after[rank]["precisions"].values()
    if ranks == 1:
        assert spooled(tmp_path / "spool") == {False: {0, 1, 2, 3, 4}, True: {5, 6, 7, 8, 9}}


def spooled(folder: Path) -> dict[bool, set[int]]:
    """The steps that the probe saw, of the attempt that began the run and of the one that resumed it."""
    found: dict[bool, set[int]] = {}
    for spool in adopt(folder, "resumed", limit=2**30):
        steps = found.setdefault(decode_hello(spool.hello).resume, set())
        while (record := spool.peek()) is not None:
            steps.add(decode_batch(record.payload).header.step)
            spool.ack(record)
        spool.close()
    return found


def alone(plan: list[Plan]) -> list[Found]:
    """As `job` on one rank, in this process."""
    module = importlib.import_module("tests.trainer.checkpoint_job")
    return [[module.run(one, 0, 1)] for one in plan]


@pytest.mark.timeout(600)
def test_saved_on_n_ranks_and_loaded_on_m(tmp_path: Path) -> None:
    """Rows that no rank number divides, and ranks that hold none: from 4 to 2 to 1 to 4 ranks all parameters,
    codes and scales are the same, and so they are converted; only torch's generators are not restored."""
    names = ("fp32", "int16", "fp8", "int8", "int4")

    def plans(ranks: int, source: int | None) -> list[Plan]:
        return [{"model": "odd", "states": states, "stop": 3, "save": str(tmp_path / f"{states}-{ranks}")}
                | ({} if source is None else {"load": str(tmp_path / f"{states}-{source}")})
                for states in names]

    first = job(tmp_path, 4, plans(4, None))
    convert_states(tmp_path / "fp8-4", tmp_path / "int8", states="int8")
    converted: Plan = {"model": "odd", "states": "int8", "stop": 3, "load": str(tmp_path / "int8")}
    *on_two, two = job(tmp_path, 2, [*plans(2, 4), converted])
    *on_one, one = alone([*plans(1, 2), converted])
    again = job(tmp_path, 4, plans(4, 1))
    for number, before in enumerate(first):
        for found in (*on_two[number], *on_one[number], *again[number]):
            assert not found["loaded"]["random"]
            for key in ("parameters", "states", "lr"):
                assert_same(found["loaded"]["state"][key], before[0][key], f"{names[number]}: {key}")
    assert_same(two[0]["loaded"]["state"], one[0]["loaded"]["state"])
    assert_same(one[0]["parameters"], first[names.index("fp8")][0]["parameters"])


def test_one_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path) -> None:
    """The files of rank 1 stop growing: no rank hangs, both name it, and the checkpoint before is loaded."""
    common = {"model": "odd", "states": "fp32", "save": str(tmp_path / "c")}
    first, second, third = job(tmp_path, 2, [
        common | {"stop": 1}, common | {"stop": 2, "limit": 1000},
        common | {"stop": 1, "load": common["save"]}])
    for rank in range(2):
        assert "the checkpoint of step 2 could not be written" in second[rank]["error"]
        assert "File too large (rank 1); those before it are untouched" in second[rank]["error"]
        assert_same(third[rank]["parameters"], first[rank]["parameters"])


def test_a_flipped_bit_in_a_file_of_one_rank_stops_all(tmp_path: Path) -> None:
    """Each rank sums the file that it writes; rank 1's is damaged, and no rank loads anything or hangs."""
    folder = str(tmp_path / "c")
    _, found = job(tmp_path, 2, [
        {"model": "odd", "states": "fp32", "stop": 1, "save": folder},
        {"model": "odd", "states": "fp32", "stop": 2, "load": folder, "damage": "__1_0.distcp"}])
    for rank in found:
        assert "its file __1_0.distcp has CRC-32" in rank["error"]


def test_other_states_are_refused_on_every_rank(tmp_path: Path) -> None:
    """No rank hangs: all say what the checkpoint holds, what the optimizer wants, and the command."""
    folder = str(tmp_path / "c")
    alone([{"states": "fp8", "stop": 1, "save": folder}])
    (found,) = job(tmp_path, 2, [{"states": "int8", "stop": 2, "load": folder}])
    for rank in found:
        assert "states = 'int8 in blocks of 1024 (layers.0.attention.qkv.weight and 7 more)'" in rank["error"]
        assert "the checkpoint holds fp8 in blocks of 128" in rank["error"]
        assert "fp8scope convert-checkpoint FROM TO --states int8 --block 1024" in rank["error"]
