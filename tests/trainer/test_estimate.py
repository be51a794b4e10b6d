"""The estimator against published sums and against bytes that two real ranks and one process hold."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import run_job

from fp8scope.cli import main
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.decoder import SHAPES, Decoder, DecoderConfig
from fp8scope_trainer.decoder_size import flops_per_token, size_of
from fp8scope_trainer.estimate import Plan, any_model, estimate
from fp8scope_trainer.state_block import FORMATS
from fp8scope_trainer.state_format import StateFormat

JOB = Path(__file__).with_name("estimate_job.py")
CONFIG = DecoderConfig(width=256, layers=2, heads=4, kv_heads=2, head_width=64, hidden=512, context=64)
TOKENS = 128
SEVEN_BILLION = any_model(7 * 10**9)

Found = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the first of two ranks under ZeRO-2 holds."""
    return measured(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What one process holds."""
    return measured(tmp_path_factory.mktemp("one"), 1)


def measured(folder: Path, ranks: int) -> Found:
    run_job(JOB, folder / "store", folder / "out", ranks=ranks)
    found: Found = json.loads((folder / "out.0").read_text())
    return found


@pytest.mark.parametrize(("stage", "ranks", "each"), [("0", 1, 16.0), ("0", 8, 16.0), ("1", 8, 5.5),
                                                       ("2", 8, 3.75), ("3", 8, 2.0)])
def test_the_papers_accounting_gives_the_papers_figures(stage: str, ranks: int, each: float) -> None:
    """Bytes a parameter: 16 alone; 5.5, 3.75 and 2 on eight ranks."""
    found = estimate(SEVEN_BILLION, Plan(stage=stage, ranks=ranks, accounting="paper"))
    assert found.bytes_per_parameter == each


def test_the_papers_accounting_gives_seven_billion_parameters_their_gigabytes() -> None:
    """112 GB with fp32 moments, 70 GB with 8-bit ones."""
    for states, gigabytes in (("fp32", 112), ("int8", 70)):
        found = estimate(SEVEN_BILLION, Plan(stage="0", states=states, accounting="paper"))
        assert found.bytes_per_gpu == gigabytes * 1e9


def test_fsdp2_keeps_more_in_stage_2_than_the_paper_counts() -> None:
    """The sharded gradient stays fp32: 4.0 bytes a parameter on eight ranks, not 3.75."""
    assert estimate(SEVEN_BILLION, Plan(stage="2", ranks=8)).bytes_per_parameter == 4.0
    assert estimate(SEVEN_BILLION, Plan(stage="1", ranks=8, accumulate=2)).bytes_per_parameter == 7.5


@pytest.mark.parametrize("case", ["fp32 fp32", "fp32 bf16", "fp32 fp8", "fp8 fp32", "int8 fp32", "int4 fp32",
                                  "int16 fp32", "bf16 fp32"])
def test_two_ranks_hold_what_is_estimated(case: str, two_ranks: Found, alone: Found) -> None:
    """Weights, gradients, states and gathered weights, each within 3 %; a process without a group gathers
    nothing, and so is compared in what it has."""
    states, precision = case.split()
    if case not in two_ranks:
        pytest.skip(f"{states} states do not exist yet")
    for ranks, held in ((2, two_ranks), (1, alone)):
        plan = Plan(states=states, precision=precision, ranks=ranks, stage="2" if ranks > 1 else "0")
        found = estimate(size_of(CONFIG), plan)
        for name in ("weights", "gradients", "states", "gathered weights")[: 2 + ranks]:
            assert found.of(name) == pytest.approx(held[case][name], rel=0.03), (ranks, name)


def test_activations_are_what_autograd_keeps(alone: Found) -> None:
    """In fp32, within 3 %, once the fp32 normalized inputs that torch's CPU norm keeps are added and the
    logits of the turn, which nothing keeps, are taken off."""
    c, attention, keys = CONFIG, 256, 128
    norms = 4 * TOKENS * (c.layers * (2 * c.width + attention + keys) + c.width)
    plan = Plan(precision="fp32", stage="0", tokens=TOKENS)
    found = estimate(size_of(CONFIG), plan).of("activations") + norms - 4 * TOKENS * c.vocabulary
    assert found == pytest.approx(alone["fp32 fp32"]["saved"], rel=0.03)


def test_fp8_keeps_codes_where_bf16_keeps_inputs(alone: Found) -> None:
    """What FP8 saves of the linears' inputs and adds in weight codes is, within 3 %, the measured difference
    of the bytes that autograd keeps, parameters apart."""
    size = size_of(CONFIG)
    fp8, bf16 = (estimate(size, Plan(precision=p, tokens=TOKENS)) for p in ("fp8", "bf16"))
    inputs = TOKENS * size.linear_input_elements
    assert bf16.of("activations") - fp8.of("activations") == pytest.approx(inputs * (2 - 1 - 4 / 128))
    expected = fp8.of("weight codes") - (bf16.of("activations") - fp8.of("activations"))
    assert alone["fp32 fp8"]["saved"] - alone["fp32 bf16"]["saved"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", ["demo", "hundred_million"])
def test_a_presets_size_is_its_models(name: str) -> None:
    """Every parameter, and those of the linears that the operations count."""
    import torch

    config = SHAPES[name]()
    with torch.device("meta"):
        model = Decoder(config)
    assert size_of(config).parameters == sum(p.numel() for p in model.parameters())
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    attention = 6 * config.layers * config.context * config.heads * config.head_width
    assert flops_per_token(config) == 6 * matrices + attention


def test_no_torch_is_needed() -> None:
    """Neither imported for the sum nor for the table."""
    code = ("import sys; from fp8scope.cli import main; "
            "assert main(['estimate', '--parameters', '7B', '--states', 'int8', '--json']) == 0; "
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_the_table_and_the_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """The sum of the table is that of the document; the plan is repeated."""
    arguments = ["estimate", "--preset", "demo", "--states", "int8", "--ranks", "8",
                 "--stage", "HYBRID_SHARD", "--shard-ranks", "2",
                 "--precision", "fp8", "--fp8-gather"]
    assert main([*arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    each, gigabytes = document["bytes_per_parameter"], document["bytes_per_gpu"] / 1e9
    assert last == ["sum", f"{each:.3f}", f"{gigabytes:,.3f}"]
    assert document["plan"]["shard_ranks"] == 2
    assert sum(item["bytes_per_gpu"] for item in document["items"]) == document["bytes_per_gpu"]


@pytest.mark.parametrize(("given", "rule"), [
    ({"stage": "4"}, "must be one of 0 .NO_SHARD, DDP."),
    ({"states": "fp32", "block": 128}, "fp32 states have no blocks"),
    ({"ranks": 8, "tensor_parallel": 3}, "must divide ranks = 8"),
    ({"stage": "HYBRID_SHARD"}, "goes with stage HYBRID_SHARD"),
    ({"stage": "hybrid_shard", "ranks": 8, "shard_ranks": 3}, "must divide the 8 ranks"),
    ({"fp8_gather": True, "precision": "fp8"}, "is for stage 3 and HYBRID_SHARD, not for 2"),
    ({"fp8_gather": True, "stage": "3"}, "needs precision fp8, not bf16"),
    ({"fp8_gather": True, "stage": "3", "precision": "fp8", "ranks": 4, "tensor_parallel": 2},
     "does not go with tensor parallelism"),
    ({"tokens": 8}, "activations are known of a preset only"),
    ({"accounting": "paper", "precision": "fp8"}, "counts a copy in bf16, not in fp8"),
])
def test_a_plan_that_cannot_be_is_refused(given: dict[str, Any], rule: str) -> None:
    """By field and rule."""
    with pytest.raises(Invalid, match=rule):
        estimate(SEVEN_BILLION, Plan(**given))


@pytest.mark.parametrize("states", FORMATS)
def test_blocks_are_refused_as_the_trainer_refuses_them(states: str) -> None:
    """The same words for the same blocks, 100 and True among them, and no others."""
    for block in (None, 0, True, 32, 64, 100, 128, 256, 1024, 8192, 16384):
        planned = said(partial(Plan, states=states, block=block))
        assert planned == said(partial(StateFormat.of, states, block))


@pytest.mark.parametrize(("given", "rule"), [
    ({"ranks": 8, "tensor_parallel": 8}, "kv_heads = 2: must be a multiple of 8"),
    ({"ranks": 2, "tensor_parallel": 2, "precision": "fp8"}, "384 columns': cannot be cut for 2 ranks"),
    ({"ranks": 2, "tensor_parallel": 2, "tokens": 8}, "known without tensor parallelism only"),
])
def test_a_preset_is_cut_only_as_the_trainer_cuts_it(given: dict[str, Any], rule: str) -> None:
    """Two ranks share the demo's layers in BF16; not eight, and not two in FP8."""
    demo = size_of(SHAPES["demo"]())
    estimate(demo, Plan(ranks=2, tensor_parallel=2))
    with pytest.raises(Invalid, match=rule):
        estimate(demo, Plan(**given))


def test_a_weight_that_cannot_be_gathered_as_codes_is_counted_in_bf16() -> None:
    """Of the demo on two ranks qkv and gate_up have 128 rows for each; out and down do not."""
    size = size_of(SHAPES["demo"]())
    plan = Plan(stage="3", precision="fp8", ranks=2)
    less = estimate(size, plan).of("gathered weights") - estimate(
        size, replace(plan, fp8_gather=True)).of("gathered weights")
    assert less == pytest.approx(2 * (512 + 768) * 128 * (2 - 1 - 4 / 128**2))  # two layers


def test_a_shard_of_one_rank_holds_a_second_copy_in_any_precision() -> None:
    """FSDP2 copies what it would gather from nobody: fp32 weights twice at stage 0."""
    found = estimate(SEVEN_BILLION, Plan(stage="0", precision="fp32"))
    assert found.of("gathered weights") == found.of("weights") == 28e9


@pytest.mark.parametrize(("line", "message"), [
    ("--parameters 7B --ranks 0", "--ranks = 0: must be a whole number from 1"),
    ("--parameters 7B --tensor-parallel 0", "--tensor-parallel = 0: must be"),
    ("--parameters 7B --states int8 --block 100", "--block = 100: of int8 states must be a power of two"),
    ("--parameters 7B --exempt many", "--exempt = 'many': must be a number such as"),
    ("--preset demo --layers 7", "--layers = 7: goes with --parameters; a preset has"),
    ("--preset demo --exempt 1M", "--exempt = '1M': goes with --parameters"),
    ("--preset demo --parameters 7B", "--parameters = '7B': must be given, or --preset"),
])
def test_the_command_names_the_option_that_is_wrong(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was typed."""
    assert main(["estimate", *line.split()]) == 2
    assert message in capsys.readouterr().err


def said(make: Callable[[], object]) -> str:
    """What `make` is refused with; empty if it is not."""
    try:
        make()
    except Invalid as wrong:
        return str(wrong)
    return ""
