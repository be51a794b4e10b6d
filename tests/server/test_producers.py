"""A pipeline of two stages and a real collector: one run of two producers, and a command for one of them."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.probe.stage_job import Job, train_stage
from torch.multiprocessing.spawn import start_processes

RUN = "1f1b"


@pytest.fixture(scope="module")
def ended(client: httpx.Client, collector: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run's documents, after a person sent a layer of the last stage to bf16 and the job has ended.

    Two stages of two replicas each."""
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8SCOPE_SPOOL", str(folder / "spool"))
        patch.setenv("FP8SCOPE_POLL_SECONDS", "0.2")
        patch.setenv("FP8SCOPE_EXIT_SECONDS", "60")
        job = Job(folder=str(folder), schedules=(RUN,), world=4, steps=5000,
                  collector=collector.url, until_switched="layers.3")
        processes = start_processes(train_stage, args=(job,), nprocs=job.world, join=False,  # type: ignore[no-untyped-call]
                                    start_method="spawn")
        asked = False
        while not processes.join(timeout=0.2):
            if not asked and len(read(client, "layers")) == 4:
                action = {"kind": "set_precision", "modules": ["layers.3"], "precision": "bf16"}
                answer = client.post(f"/runs/{RUN}/commands", json={"action": action})
                asked = answer.status_code == 201
    assert not list(Path(folder, "spool").rglob("*.f8ss")), "not everything was sent"
    return {what: read(client, what) for what in ("", "layers", "series", "steps", "commands", "events")}


def read(client: httpx.Client, what: str) -> Any:
    answer = client.get(f"/runs/{RUN}/{what}".rstrip("/"))
    return answer.json() if answer.status_code == 200 else []


def test_two_producers_are_one_run(ended: dict[str, Any]) -> None:
    """One attempt, with the layers of both stages in the order of the model, and no step or batch missing."""
    assert [one["producers"] for one in ended[""]["attempts"]] == [2]
    assert [one["name"] for one in ended["layers"]] == [f"layers.{i}" for i in range(4)]
    activations = [one["name"] for one in ended["series"]
                   if (one["role"], one["orientation"]) == ("activation", "rowwise")]
    assert activations == [f"layers.{i}" for i in range(4)]
    steps = ended["steps"]
    assert steps["steps"] == list(range(len(steps["steps"])))
    assert None not in steps["columns"]["loss"]
    assert not {"gap", "lost", "probe_error", "ranks"} & {one["kind"] for one in ended["events"]}


def test_frames_of_both_stages_lie_in_one_matrix(client: httpx.Client, ended: dict[str, Any]) -> None:
    """Every sampled step has every layer."""
    frames = client.get(f"/runs/{RUN}/frames", params={
        "metric": "elements", "role": "activation", "orientation": "rowwise"}).json()
    assert [one["name"] for one in frames["series"]] == [f"layers.{i}" for i in range(4)]
    assert frames["values"] == [[1024] * 4] * len(frames["steps"])


def test_only_the_owner_of_a_layer_reports(ended: dict[str, Any]) -> None:
    """The command is applied when the last stage says so, at one step on both of its ranks."""
    [command] = ended["commands"]
    assert command["state"] == "applied"
    assert command["steps_by_rank"] == [command["applied_step"]] * 2
    running = {one["name"]: one["running"] for one in ended["layers"]}
    assert running == {"layers.0": "fp8", "layers.1": "fp8", "layers.2": "fp8", "layers.3": "shadow"}
