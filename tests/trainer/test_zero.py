"""Every ZeRO stage on two and four real ranks gives what one process gives; what cannot work is refused."""

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.ranks import run_job
from torch import nn

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.communication import expected_traffic
from fp8scope_trainer.mesh import training_mesh
from fp8scope_trainer.shard import micro_batch, shard
from fp8scope_trainer.stage import Stage, parse_stage

JOB = Path(__file__).with_name("zero_job.py")
STAGES = ("NO_SHARD", "1", "shard_grad_op", "3", "Hybrid_Shard")
Ranks = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def job() -> ModuleType:
    """The job, importable here for its one-process form."""
    return importlib.import_module("tests.trainer.zero_job")


@pytest.fixture(scope="module")
def alone(job: ModuleType) -> dict[str, dict[str, Any]]:
    """One process, the whole batch at once."""
    train = partial(job.trained, 0, rank=0, ranks=1)
    return {"decoder": train(), "cut": train(cut=True), "cut fp8": train(cut=True, fp8=True),
            "odd": job.odd(0, rank=0, ranks=1)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of two processes found."""
    return _run(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of four processes found."""
    return _run(4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of eight processes found."""
    return _run(8, tmp_path_factory.mktemp("eight"))


@pytest.fixture(params=["two", "four"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue(request.param)
    return found


def _run(world: int, folder: Path, device: str = "cpu") -> Ranks:
    if device == "cpu":
        run_job(JOB, folder, device, ranks=world, strict=True)
        return [torch.load(folder / f"out.{rank}") for rank in range(world)]
    jobs = [subprocess.Popen([sys.executable, str(JOB), str(rank), str(world), str(folder), device],
                             stderr=subprocess.PIPE, text=True) for rank in range(world)]
    try:
        errors = [job.communicate(timeout=280)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * world, "\n".join(errors)
    return [torch.load(folder / f"out.{rank}", map_location="cpu") for rank in range(world)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["", " accumulated"])
def test_a_stage_trains_as_one_process(
    ranks: Ranks, alone: dict[str, dict[str, Any]], stage: str, how: str
) -> None:
    """fp32, same seed and data: losses within 1e-5 relative, weights within 1e-5; ranks are alike."""
    _agree(ranks, f"{stage}{how}", alone["decoder"])


@pytest.mark.parametrize("stage", STAGES)
def test_odd_models_train_as_one_process(
    ranks: Ranks, alone: dict[str, dict[str, Any]], stage: str
) -> None:
    """Uneven and empty shards; frozen and unused parameters have no gradient and do not move."""
    _agree(ranks, f"{stage} odd", alone["odd"])
    without_gradient = ["frozen.bias", "frozen.weight", "unused.bias", "unused.weight"]
    assert ranks[0][f"{stage} odd"]["none"] == without_gradient


@pytest.mark.parametrize("stage", STAGES)
def test_stages_train_as_one_process_with_tensor_parallelism(
    two: Ranks, four: Ranks, alone: dict[str, dict[str, Any]], stage: str
) -> None:
    """Two ranks share each layer, times two data-parallel ranks: losses and weights within 1e-5.

    Two ranks in all, at stage 3, too."""
    _agree(four, f"{stage} cut", alone["cut"])
    _agree(two, "3 cut", alone["cut"])


@pytest.mark.parametrize("stage", ["3", "Hybrid_Shard"])
def test_replicas_of_shards_of_cut_layers_train_as_one_process(
    eight: Ranks, alone: dict[str, dict[str, Any]], stage: str
) -> None:
    """Eight ranks, two for each layer, two micro-batches: losses and weights within 1e-5 on two replicas of
    two shards and on four shards. Cut layers add nothing to what is sent but their activations."""
    _agree(eight, f"{stage} cut", alone["cut"])
    found = eight[0][f"{stage} cut"]
    assert found["sent"].keys() == {"all_gather", "reduce_scatter", "all_reduce"}
    whole = sum(p.numel() for p in found["parameters"].values())
    shared = sum(p.numel() for name, p in found["parameters"].items()
                 if name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "down.weight")))
    mine = whole - shared / 2  # of the linears a rank has half
    shards = 4 if stage == "3" else 2
    held = {"parameters": 4 * mine / shards, "gradients": 4 * mine / shards, "states": 8 * mine / shards}
    assert found["held"] == pytest.approx(held, rel=0.03)
    theory = expected_traffic(stage, gathered_bytes=4 * mine, reduced_bytes=4 * mine, shard=shards,
                              replicate=4 // shards, accumulate=2)
    for kind in ("all_gather", "reduce_scatter"):
        assert found["sent"][kind] == pytest.approx(theory[kind], rel=0.05)
    activations = 2 * 4 * 2 * 16 * 128 * 4  # two blocks, four sums each over a pair, of two sequences
    assert found["sent"]["all_reduce"] == pytest.approx(theory.get("all_reduce", 0) + activations, rel=0.05)


def test_a_cut_layer_runs_in_fp8(ranks: Ranks, alone: dict[str, dict[str, Any]]) -> None:
    """Losses within 1e-3 of one process's FP8 run, and not those of fp32; ranks are alike."""
    found = [rank["3 cut fp8"] for rank in ranks]
    assert found[0]["losses"] == pytest.approx(alone["cut fp8"]["losses"], rel=1e-3)
    assert found[0]["losses"] != ranks[0]["3 cut"]["losses"]
    for name, value in found[0]["parameters"].items():
        assert all(torch.equal(value, one["parameters"][name]) for one in found), name


def test_tensor_parallelism_sends_four_activations_a_block(two: Ranks) -> None:
    """Two all_reduces forward and two backward of [8, 16, 128] in fp32, in two blocks, on two ranks."""
    for name in ("3 cut", "3 cut fp8"):
        assert two[0][name]["sent"] == pytest.approx({"all_reduce": 2 * 4 * 8 * 16 * 128 * 4}, rel=0.05)


@pytest.mark.parametrize("pair", [("1", "3"), ("shard_grad_op", "3"),
                                  ("shard_grad_op accumulated", "3 accumulated")])
def test_stages_with_one_order_of_additions_agree_to_the_bit(ranks: Ranks, pair: tuple[str, str]) -> None:
    """1, 2 and 3 reduce the same gradients in the same order; accumulated, 1 adds micro-batches first."""
    first, second = (ranks[0][name] for name in pair)
    assert first["losses"] == second["losses"]
    for name, value in first["parameters"].items():
        assert torch.equal(value, second["parameters"][name]), name


@pytest.mark.parametrize("stage", ["1", "3"])
@pytest.mark.parametrize("what", ["probed", "evaluated"])
def test_watching_changes_no_bit(two: Ranks, stage: str, what: str) -> None:
    """The bits with the probe at every step, or an evaluation before the step, are those without."""
    for rank in two:
        assert rank[f"{stage} {what}"]["losses"] == rank[stage]["losses"]
        for name, value in rank[stage]["parameters"].items():
            assert torch.equal(rank[f"{stage} {what}"]["parameters"][name], value), name


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stage_sends_and_holds_what_theory_says(ranks: Ranks, stage: str, accumulate: int) -> None:
    """Bytes sent by kind within 5 %; parameters, gradients and states held within 3 %; fp32, N parameters."""
    found = ranks[0][stage if accumulate == 1 else f"{stage} accumulated"]
    n, which, world = sum(p.numel() for p in found["parameters"].values()), parse_stage(stage), len(ranks)
    shards = {Stage.REPLICATED: 1, Stage.HYBRID: 2}.get(which, world)
    sent = expected_traffic(stage, gathered_bytes=4 * n, reduced_bytes=4 * n, shard=shards,
                            replicate=world // shards, accumulate=accumulate)
    assert found["sent"] == pytest.approx(sent, rel=0.05)
    whole_gradients = which is Stage.STATES and accumulate > 1
    held = {"parameters": 4 * n / shards, "gradients": 4 * n / (1 if whole_gradients else shards),
            "states": 8 * n / shards}
    assert found["held"] == pytest.approx(held, rel=0.03)


def test_every_kind_of_collective_is_counted_by_the_ring(ranks: Ranks) -> None:
    """32 bytes on w ranks through torch.distributed, three also by DTensor; a barrier is none."""
    w = len(ranks)
    share = 32 * (w - 1) / w
    for rank, found in enumerate(ranks):
        expected = {"all_gather": (2, 2 * w * share), "reduce_scatter": (2, (w + 1) * share),
                    "all_reduce": (2, 4 * share), "all_to_all": (1, share), "broadcast": (1, share)}
        assert found["collectives"] == expected | ({"send": (1, 32)} if rank == 0 else {})


def test_gathered_codes_are_those_of_the_whole_weight(ranks: Ranks) -> None:
    """To the bit, where 128 rows divide evenly; other layers gather the weight. A shard is saved as it is."""
    for rank in ranks:
        assert rank["gathered"]["codes"] == {"layers.0.attention.qkv": True, "layers.0.mlp.gate_up": True}
        assert rank["gathered"]["other"] == ["layers.0.attention.out", "layers.0.mlp.down"]
        assert rank["gathered"]["saved"]


def test_a_weight_that_is_gathered_as_codes_is_listed_as_not_observed(ranks: Ranks) -> None:
    """By the doctor and at attaching, with the reason; one that is gathered itself is measured."""
    for rank in ranks:
        qkv, out, gate_up, down = rank["gathered"]["unobserved"]
        assert qkv == gate_up
        assert qkv.startswith("weight not observed: it is gathered as FP8 codes")
        assert out is down is None


@pytest.mark.parametrize(("world", "how"), [
    ("two", ""), ("two", ", switched"), ("two", ", accumulated"), ("two", ", probed"), ("two", ", in shadow"),
    ("four", ""), ("four", ", hybrid"),
])
def test_gathering_codes_changes_no_bit(world: str, how: str, request: pytest.FixtureRequest) -> None:
    """Losses and weights as without: in BF16, a layer in bf16 or shadow for a step, accumulated, probed."""
    for rank in request.getfixturevalue(world):
        codes, weights = (rank[f"gathered {word}{how}"] for word in ("codes", "weights"))
        assert codes["losses"] == weights["losses"]
        for name, value in weights["parameters"].items():
            assert torch.equal(codes["parameters"][name], value), name


def test_codes_are_half_of_bf16(ranks: Ranks) -> None:
    """Four weights of [512, 128], gathered twice: N + N / 4,096 bytes instead of 2 N each time."""
    n, share = 4 * 512 * 128, (len(ranks) - 1) / len(ranks)
    codes, weights = (ranks[0][f"gathered {word}"]["sent"]["all_gather"] for word in ("codes", "weights"))
    assert weights - codes == pytest.approx(2 * share * (2 * n - n * (1 + 1 / 4096)))


def test_theory_is_that_of_the_papers() -> None:
    """Of one dtype and without accumulation 1 and 2 send what DDP sends, 3 sends 1.5 times as much."""
    sent = {stage: sum(expected_traffic(stage, gathered_bytes=1, reduced_bytes=1, shard=shard,
                                        replicate=8 // shard).values())
            for stage, shard in ((0, 1), (1, 8), (2, 8), (3, 8))}
    assert sent[1] == sent[2] == pytest.approx(sent[0])
    assert sent[3] == pytest.approx(1.5 * sent[0])
    with pytest.raises(Invalid, match="at least 1"):
        expected_traffic(2, gathered_bytes=1, reduced_bytes=1, shard=0)


@pytest.mark.parametrize(("name", "stage"), [
    (0, Stage.REPLICATED), ("no_shard", Stage.REPLICATED), ("DDP", Stage.REPLICATED), ("1", Stage.STATES),
    (2, Stage.GRADIENTS), ("SHARD_GRAD_OP", Stage.GRADIENTS), ("Full_Shard", Stage.PARAMETERS),
    (3, Stage.PARAMETERS), ("hybrid-shard", Stage.HYBRID), (Stage.HYBRID, Stage.HYBRID),
])
def test_stages_have_the_names_of_other_engines(name: int | str | Stage, stage: Stage) -> None:
    """Numbers, FSDP's strategies and their spelling in any case mean one stage."""
    assert parse_stage(name) is stage


@pytest.mark.parametrize("name", [4, -1, True, None, "ZERO", "", 2.0])
def test_other_stages_are_refused_with_what_is_accepted(name: Any) -> None:
    """The message lists numbers and names."""
    accepted = r"0 \(NO_SHARD, DDP\), 1, 2 \(SHARD_GRAD_OP\), 3 \(FULL_SHARD\), HYBRID_SHARD"
    with pytest.raises(Invalid, match=rf"stage = .*{accepted}"):
        parse_stage(name)


@pytest.mark.parametrize("stage", [1, 2, "FULL_SHARD", "HYBRID_SHARD"])
def test_stages_that_need_a_process_group_say_so(stage: int | str) -> None:
    """Without one only stage 0 is accepted, which leaves the model as it is."""
    model = nn.Linear(2, 2)
    for call in (lambda: shard(model, stage=stage), lambda: training_mesh("cpu", stage)):
        with pytest.raises(Invalid, match=r"init_process_group; accepted without: 0"):
            call()
    with pytest.raises(Invalid, match="compute"):
        shard(model, stage=0, compute=torch.bfloat16)
    assert shard(model, stage="no_shard") is model
    micro_batch(model, stage=0, last=False)


def test_what_cannot_work_is_refused_on_every_rank(two: Ranks, four: Ranks) -> None:
    """Meshes that do not fit, weights tied across units, a model sharded twice: each with its reason."""
    for rank in (*two, *four):
        for name, message in rank["expected"].items():
            assert message in rank["refusals"].get(name, "accepted"), (name, rank["refusals"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_stages_agree_on_gpus(tmp_path: Path) -> None:
    """FP8 layers, BF16, NCCL: stages, gathered codes, shared layers and a switch agree within 1 %; codes are
    half of BF16's bytes, and the first loss is the same bits with them and without."""
    ranks = _run(2, tmp_path, "cuda")
    base = ranks[0]["3"]
    for name, found in ranks[0].items():
        assert found["losses"] == pytest.approx(base["losses"], rel=0.01), name
    assert ranks[0]["codes"]["losses"][0] == base["losses"][0]
    n = 4 * 512 * 128
    saved = base["sent"]["all_gather"] - ranks[0]["codes"]["sent"]["all_gather"]
    assert saved == pytest.approx(2 * 0.5 * (2 * n - n * (1 + 1 / 4096)))


def _agree(ranks: Ranks, case: str, alone: dict[str, Any]) -> None:
    for rank in ranks:
        assert rank[case]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        for name, value in alone["parameters"].items():
            torch.testing.assert_close(rank[case]["parameters"][name], value, rtol=0, atol=1e-5)
            assert torch.equal(rank[case]["parameters"][name], ranks[0][case]["parameters"][name]), name
