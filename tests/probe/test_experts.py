"""Expert parallel: each rank has other experts. The numbers are those of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.probe.expert_job import EXPERTS, IDLE, STEPS, Experts, Job, train, train_expert_rank
from tests.ranks import run_ranks

Spooled = Callable[[Path, str], list[Any]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs a job of two ranks; its spool."""

    def run(**facts: Any) -> Path:
        monkeypatch.setenv("FP8SCOPE_HOME", str(tmp_path))
        run_ranks(train_expert_rank, Job(folder=str(tmp_path), **facts), ranks=2)
        return tmp_path / "spool"

    return run


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spooled: Spooled) -> Callable[[bool], list[Any]]:
    """The same job in this process."""

    def run(dense: bool) -> list[Any]:
        monkeypatch.setenv("FP8SCOPE_HOME", str(tmp_path / "alone"))
        train(Experts(range(EXPERTS), dense=dense), Job(folder="", dense=dense))
        return spooled(tmp_path / "alone" / "spool", "experts")

    return run


def assert_alike(found: Any, wanted: Any) -> None:
    """The same series; counts equal, everything else to four digits. Each rank calls the dense layer on its
    own tokens, and tiles of columns lie in one call."""
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        if key[0] == "dense" and key[2] == "columnwise":
            assert found[key]["elements"] == values["elements"]
            continue
        for metric in found[key].keys() | values.keys():
            if metric in ("gemm_error", "wgrad_row_error_max", "channel_outlier_ratio", "worst_rank"):
                continue  # the worst of each rank's calls
            if metric == "calls" and key[0] == "dense":
                continue
            exact = metric in ("elements", "calls", "nan_count", "zero_block_count")
            assert found[key][metric] == (
                values[metric] if exact else pytest.approx(values[metric], rel=1e-4, abs=1e-7)), (key, metric)


@pytest.mark.parametrize("local_names", [False, True])
def test_groups_that_share_a_layer_are_one_producer(
    local_names: bool, launch: Callable[..., Path], alone: Callable[[bool], list[Any]], spooled: Spooled
) -> None:
    """The dense layer is held by both and counts once; experts by one each, under their names in the whole,
    whatever they are called on their rank; gradients of both kinds make the norm of one process."""
    found = spooled(launch(local_names=local_names), "experts")
    assert {one.header.producer for one in found} == {"all"}
    assert [layer.name for layer in found[0].hello.precision] == [
        "dense", *(f"experts.{i}" for i in range(EXPERTS))]
    for ours, theirs in zip(found, alone(True), strict=True):
        for name in ("loss", "grad_norm", "update_weight_ratio", "update_max"):
            assert ours.header.sentinels[name] == pytest.approx(theirs.header.sentinels[name], rel=1e-5), name
        assert_alike(ours.metrics, theirs.metrics)


def test_groups_that_share_nothing_are_producers(
    launch: Callable[..., Path], alone: Callable[[bool], list[Any]], spooled: Spooled
) -> None:
    """Without a layer in common each group has its own batches, and the two have no series in common."""
    found = spooled(launch(dense=False), "experts")
    first, second = ([one for one in found if one.header.producer == name] for name in ("part0", "part1"))
    assert len(first) == len(second) == STEPS
    for mine, yours, theirs in zip(first, second, alone(False), strict=True):
        assert not mine.metrics.keys() & yours.metrics.keys()
        assert_alike(mine.metrics | yours.metrics, theirs.metrics)
        assert mine.header.sentinels["grad_norm"] == pytest.approx(theirs.header.sentinels["grad_norm"])


def test_q9_an_expert_without_tokens_has_a_count_of_zero(
    launch: Callable[..., Path], spooled: Spooled
) -> None:
    """Q9: its activation's row is there, with no element, and no ratio: not 0, not NaN."""
    for one in spooled(launch(), "experts"):
        row = one.metrics[f"experts.{IDLE}", "activation", "rowwise"]
        assert row["elements"] == 0
        assert not {"underflow_ratio", "distortion", "amax", "rms"} & row.keys()
        assert one.metrics[f"experts.{IDLE}.weight", "weight", "rowwise"]["elements"] == 32 * 32


def test_a_command_for_an_expert_is_applied_and_reported_once(
    launch: Callable[..., Path], peer: Any
) -> None:
    """Only rank 1 holds it: rank 0 passes, and the one producer of both reports rank 1's step."""
    action = {"kind": "set_precision", "modules": ["experts.2"], "precision": "bf16"}
    peer.write("commands.json", [{"id": 4, "action": action, "issued_by": "user"}])
    peer.start()
    launch(collector=peer.url, steps=5000, until_switched=True)
    reports = [report for batch in peer.batches() for report in batch.header.reports]
    assert [(one.id, one.state, len(one.steps_by_rank)) for one in reports] == [(4, "applied", 1)]
