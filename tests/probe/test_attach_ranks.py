"""Attaching on several ranks, real processes over gloo: one that cannot, and names that mean two layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn

import fp8scope

WORLD = 2


class Stubborn(nn.Linear):
    """Takes no hooks."""

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no hooks here")


def network(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))


def rename_fails(name: str) -> str:
    raise KeyError(name)


WRONG: dict[str, dict[str, Any]] = {
    "raises": {"rename": rename_fails}, "nonsense": {"rename": lambda name: [name]},
    "doubles": {"rename": lambda name: "same"}, "argument": {"every": 0}, "model": {"model": None},
    "hooks": {"model": nn.Sequential(Stubborn(8, 8))},
}
WIDTHS: dict[str, tuple[int, int]] = {"copies": (8, 8), "stages": (8, 16), "renamed": (8, 16)}


def train(model: nn.Module, **arguments: Any) -> str:
    """Three steps; what attaching raised."""
    given: dict[str, Any] = {"model": model, "run": "r", "every": 1} | arguments
    try:
        with fp8scope.attach(**given) as scope:
            for step in range(3):
                model(torch.ones(2, model[0].in_features)).sum().backward()  # type: ignore[index]
                scope.step(step)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_rank(rank: int, case: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    if case in WRONG:
        said = [train(**({"model": network()} | (WRONG[case] if rank else {})))]
        if case != "hooks":
            said.append(train(network(), run="again"))
    else:
        rename = {"rename": lambda name: f"stages.{rank}.{name}"} if case == "renamed" else {}
        said = [train(network(WIDTHS[case][rank]), **rename)]
    Path(folder, f"said.{rank}").write_text(json.dumps(said))
    dist.barrier()


def run(folder: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What attaching raised, by rank and attach. Waiting out a handshake would outlast the test."""
    for name, value in {"HOME": str(folder), "HANDSHAKE_SECONDS": "86400", "COLLECTOR": "offline"}.items():
        monkeypatch.setenv(f"FP8SCOPE_{name}", value)
    run_ranks(run_rank, case, str(folder), ranks=WORLD)
    return [json.loads((folder / f"said.{rank}").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("case", [case for case in WRONG if case != "hooks"])
def test_a_rank_that_cannot_attach_keeps_nobody_waiting(
    case: str, tmp_path: Path, spooled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is refused, by the name of the argument. Rank 0 goes on alone and says whose fault it was; a
    second attach, right on both, brings them together."""
    (first, again), (refused, also_again) = run(tmp_path, case, monkeypatch)
    assert first == again == also_again == ""
    field = next(iter(WRONG[case]))
    assert refused.startswith(f"Invalid: {field} = ")
    steps = spooled(tmp_path / "spool", "r")
    assert [(one.header.producer, one.header.step) for one in steps] == [("rank0", n) for n in range(3)]
    (event,) = [event for one in steps for event in one.header.events]
    assert f"attaching failed on rank 1: {field} = " in event.text
    together = spooled(tmp_path / "spool", "again")
    assert [one.header.producer for one in together] == ["all"] * 3
    assert together[0].metrics["0", "activation", "rowwise"]["elements"] == 2 * 2 * 8


def test_a_rank_that_fails_after_the_handshake_leaves(
    tmp_path: Path, spooled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layer takes no hooks: rank 0 loses no step, and says that it is measured alone."""
    monkeypatch.setenv("FP8SCOPE_EXIT_SECONDS", "1")
    (first,), (failed,) = run(tmp_path, "hooks", monkeypatch)
    assert (first, failed) == ("", "RuntimeError: no hooks here")
    steps = spooled(tmp_path / "spool", "r")
    assert [one.header.step for one in steps] == [0, 1, 2]
    assert ["only rank 0 is measured" in event.text for one in steps for event in one.header.events] == [True]


@pytest.mark.parametrize("case", WIDTHS)
def test_different_layers_of_one_name_are_told(
    case: str, tmp_path: Path, spooled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that count from 0 and have other shapes: both are named, and what to do; which then helps.
    Copies, whose names are the same by right, are no clash."""
    assert run(tmp_path, case, monkeypatch) == [[""], [""]]
    steps = spooled(tmp_path / "spool", "r")
    events = [event.text for one in steps for event in one.header.events]
    if case == "stages":
        assert ["0.weight is [8, 8] on rank 0 and [16, 8] on rank 1" in text for text in events] == [True]
        assert "attach(rename=...)" in events[0]
    else:
        assert events == []
    assert {one.header.producer for one in steps} == ({"part0", "part1"} if case == "renamed" else {"all"})
