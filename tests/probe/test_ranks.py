"""Ranks as real processes over gloo: the handshake, the merge, and the switch at the same step."""

import json
import runpy
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import forked

from fp8scope.segment import segment_paths
from fp8scope.spool import adopt
from fp8scope_protocol.wire import Batch, decode_batch

JOB = str(Path(__file__).parent / "rank_job.py")
NOWHERE = "http://127.0.0.1:9"
PATIENCE = 60.0

Launch = Callable[..., list[dict[str, Any] | None]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Runs rank_job.py once per rank; returns what each rank saw, None for a rank that died."""
    def run(collector: str = NOWHERE, *, world: int = 2, settings: dict[str, Any] | None = None,
            **facts: Any) -> list[dict[str, Any] | None]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        given = {"collector": collector, "spool": str(tmp_path / "spool"), "poll_seconds": 0.2,
                 "retry_seconds": 0.1, "exit_seconds": 1.0 if collector == NOWHERE else 20.0,
                 **(settings or {})}
        job = {"world": world, "port": port, "out": str(tmp_path / "seen"), "settings": given, **facts}
        processes = []
        for rank in range(world):
            processes.append(forked(runpy.run_path, JOB, {"rank": rank, "job": job}, "__main__"))
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode in (0, 9), "a rank hangs, or crashed"
        found = [tmp_path / f"seen.{rank}" for rank in range(world)]
        return [json.loads(path.read_text()) if path.exists() else None for path in found]

    return run


def spooled(folder: Path) -> dict[str, list[Batch]]:
    """Batches that are left in the spool, by producer."""
    found = {}
    for spool in adopt(folder, "run", limit=2**30):
        batches = []
        while (record := spool.peek()) is not None:
            batches.append(decode_batch(record.payload))
            spool.ack(record)
        found[spool.folder.name] = batches
        spool.close()
    return found


def test_f3_z3_one_bad_rank_switches_all_ranks_at_one_step(launch: Launch, peer: Any) -> None:
    """Only rank 1's data are bad. The merged batch shows it: amax is the maximum, counts are summed, the
    ratio is sum / sum. The command that follows is applied once, at the same step on both ranks, and
    reported once with both steps."""
    peer.write("rule.json", [{"switch_over": 1000.0, "module": "layers.3"}])
    peer.start()
    first, second = launch(peer.url, steps=5000, until_switched=True, bad_rank=1)
    assert first is not None
    assert second is not None
    assert first["applied"] == second["applied"]
    step = first["applied"]["1"]
    assert step > 5
    bad = next(batch for batch in peer.batches() if batch.header.step == 5)
    assert bad.arrays["elements"].tolist() == [[2000, 2000]]
    assert bad.arrays["amax"].tolist() == [[1.0, 1e4]]
    assert bad.arrays["underflow_ratio"][0, 1] == pytest.approx(0.15)
    assert bad.header.sentinels["loss"] == 0.5
    assert bad.header.sentinels["update_max"] == 1.0
    reports = [report for batch in peer.batches() for report in batch.header.reports]
    assert [(one.id, one.state, one.steps_by_rank) for one in reports] == [(1, "applied", (step, step))]


def test_z3_the_worst_rank_of_each_series_is_named(launch: Launch, tmp_path: Path) -> None:
    """Rank 0 has the larger error in the first layer, rank 1 in the second; in the third they are alike, so
    the first one is named."""
    names = ["layers.0", "layers.1", "layers.2"]
    errors = {0: {0: 0.02, 1: 0.01, 2: 1e-3}, 1: {0: 0.01, 1: 0.02, 2: 1e-3}}
    launch(steps=2, names={0: names, 1: names}, errors=errors)
    batches = spooled(tmp_path / "spool")["all"]
    assert [batch.arrays["worst_rank"].tolist() for batch in batches] == [[[0.0, 1.0, 0.0]]] * 2


def test_z3_a_series_of_one_rank_names_it(launch: Launch, tmp_path: Path) -> None:
    """An expert that only rank 1 reached; and from step 5 on rank 1 underflows in its last series."""
    names = {0: ["layers.0", "layers.3"], 1: ["layers.0", "layers.2.expert", "layers.3"]}
    launch(steps=6, names=names, bad_rank=1, errors={0: {1: 0.2}})
    batches = spooled(tmp_path / "spool")["all"]
    assert [batch.arrays["worst_rank"].tolist() for batch in batches] == [
        *[[[0.0, 1.0, 0.0]]] * 5, [[0.0, 1.0, 1.0]]]


def test_a_stalled_rank_switches_at_the_same_step(launch: Launch, peer: Any) -> None:
    """Rank 1 sleeps for seconds while a command waits; rank 0 runs ahead no further than its own result,
    and both apply the command at the same step."""
    action = {"kind": "set_precision", "modules": ["layers.3"], "precision": "bf16"}
    peer.write("commands.json", [{"id": 4, "action": action, "issued_by": "user"}])
    peer.start()
    first, second = launch(peer.url, steps=5000, until_switched=True, stall={1: 1})
    assert first is not None
    assert second is not None
    assert list(first["applied"]) == ["4"]
    assert first["applied"] == second["applied"]


def test_a_rank_that_runs_ahead_waits_for_its_result(launch: Launch, tmp_path: Path) -> None:
    """Without any collective of the job itself, the wait in `result` keeps a fast rank within two steps of
    a stalled one; the wait is counted and no step is lost."""
    first, second = launch(steps=8, stall={1: 3})
    assert first is not None
    assert second is not None
    assert first["waits"] >= 1
    assert first["world"] == second["world"] == 2
    assert [batch.header.step for batch in spooled(tmp_path / "spool")["all"]] == list(range(8))


def test_one_costly_rank_slows_all_ranks_at_one_step(launch: Launch, tmp_path: Path) -> None:
    """Measuring costs 1 % on rank 0 and 7 % on rank 1: the largest counts, both ranks change their cadence
    at the same boundary, and one event says so."""
    first, second = launch(steps=60, cost={0: 1e-3, 1: 7e-3}, budget=0.02)
    assert first is not None
    assert second is not None
    assert first["cadences"] == second["cadences"]
    ((step, every),) = first["cadences"].items()
    assert every == 4
    batches = spooled(tmp_path / "spool")["all"]
    told = [event for batch in batches for event in batch.header.events]
    assert [(event.kind, event.step) for event in told] == [("cadence", int(step))]
    (decided,) = [batch.header.sentinels for batch in batches if batch.header.step == int(step) - 2]
    assert decided["overhead_ratio"] == pytest.approx(0.007 / 0.093)


def test_z6_a_rank_without_a_probe_hangs_nobody(launch: Launch, tmp_path: Path) -> None:
    """Rank 1 has no probe: rank 0 says so after the handshake's time, measures alone, makes no group, and
    the job's own collectives work."""
    first, second = launch(steps=3, without_probe=[1], settings={"handshake_seconds": 1.0})
    assert first is not None
    assert second is not None
    assert first["world"] == 1
    assert "no probe within 1 s on rank 1" in first["apart"]
    assert first["sum"] == second["sum"] == 2.0
    (batch, *_) = spooled(tmp_path / "spool")["rank0"]
    assert "remote control is off" in batch.header.events[0].text
    assert batch.arrays["elements"].tolist() == [[1000, 1000]]


def test_z6_ranks_with_other_settings_measure_alone(launch: Launch, tmp_path: Path) -> None:
    """Another cadence on rank 1 would pair wrong steps: both work alone, in one attempt, as two producers."""
    first, second = launch(steps=2, unlike=[1])
    assert first is not None
    assert second is not None
    assert first["apart"] == second["apart"] == "attached with other settings than rank 0: rank 1"
    assert first["attempt"] == second["attempt"]
    assert {name: len(batches) for name, batches in spooled(tmp_path / "spool").items()} == {
        "rank0": 2, "rank1": 2,
    }


def test_z6_an_unreachable_collector_costs_no_step(launch: Launch, tmp_path: Path) -> None:
    """Nobody listens: training completes, and every step waits in the spool of one producer."""
    first, _ = launch(steps=20, settings={"exit_seconds": 0.5})
    assert first is not None
    assert first["lost"] == {}
    (folder,) = {path.parent for path in (tmp_path / "spool").rglob("*.f8ss")}
    assert len(segment_paths(folder)) == 1
    batches = spooled(tmp_path / "spool")["all"]
    assert [batch.header.seq for batch in batches] == list(range(20))


def silent(kind: str, stack: ExitStack) -> str:
    """The address of a collector that lets nobody in, or lets everybody in and says nothing."""
    server = stack.enter_context(socket.socket())
    server.bind(("127.0.0.1", 0))
    server.listen(0 if kind == "unreachable" else 64)
    for _ in range(4 if kind == "unreachable" else 0):  # its queue is full: further ones get no answer at all
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(server.getsockname())
    return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["unreachable", "mute"])
def test_z6_a_collector_that_never_answers_costs_no_step(launch: Launch, tmp_path: Path, kind: str) -> None:
    """Z6: a connection and a request may take ten minutes here, so the test ends in time only if no step of
    either rank, and not the exit either, waits for one. Every step is in the spool."""
    with ExitStack() as stack:
        first, second = launch(silent(kind, stack), steps=20,
                               settings={"request_seconds": 600.0, "exit_seconds": 0.5})
    assert first is not None
    assert second is not None
    assert first["sum"] == second["sum"] == 2.0
    assert first["lost"] == {}
    batches = spooled(tmp_path / "spool")["all"]
    assert [batch.header.step for batch in batches] == list(range(20))


def test_ranks_with_different_series_are_united(launch: Launch, tmp_path: Path) -> None:
    """An expert that only rank 1 reached: the layout holds the series of both, each with its own sums."""
    names = {0: ["layers.0", "layers.3"], 1: ["layers.0", "layers.2.expert"]}
    launch(steps=2, names=names)
    batches = spooled(tmp_path / "spool")["all"]
    assert [batch.arrays["elements"].tolist() for batch in batches] == [[[2000, 1000, 1000]]] * 2
    assert len({batch.header.layout for batch in batches}) == 1


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("behind", [3, 2])
def test_a_rank_ends_while_another_one_is_far_behind(
    launch: Launch, tmp_path: Path, peer: Any, behind: int, online: bool
) -> None:
    """Rank 0 has sent its last steps and closes; rank 1 comes to them only when rank 0's process is gone, as
    seen from outside, whatever its threads still waited for. Both end well, and what nobody could merge is
    counted and told: the steps that are stored and those told to be lost are all that were submitted."""
    if online:
        peer.start()
    first, second = launch(peer.url if online else NOWHERE, steps=4, behind={1: behind}, unasked=True,
                           settings={"exit_seconds": 1.0})
    assert first is not None
    assert second is not None
    assert first["lost"] == {"closed": 4 - behind}
    batches = peer.batches() if online else spooled(tmp_path / "spool")["all"]
    whole = [batch.header.step for batch in batches if batch.header.layout is not None]
    assert whole == list(range(behind))
    assert batches[-1].header.lost == first["lost"]
    assert len(whole) + sum(batches[-1].header.lost.values()) == 4
    (event,) = batches[-1].header.events
    assert event.text.startswith(f"the last {4 - behind} steps are lost")


@pytest.mark.parametrize("how", ["close", "die"])
def test_a_rank_that_goes_early_leaves_the_other_one_running(
    launch: Launch, tmp_path: Path, how: str
) -> None:
    """Rank 1 closes its probe, or is killed, after 4 steps: rank 0 goes on alone, says so, loses no step."""
    first, _ = launch(steps=10, **{how: {1: 4}})
    assert first is not None
    assert first["world"] == 1
    batches = spooled(tmp_path / "spool")["all"]
    assert [batch.header.step for batch in batches] == list(range(10))
    told = [event.text for batch in batches for event in batch.header.events if event.kind == "ranks"]
    assert len(told) == 1
    assert "only rank 0 is measured" in told[0]
    assert batches[-1].arrays["elements"].tolist() == [[1000, 1000]]


def test_a_reduction_that_fails_in_one_producer_leaves_no_rank_waiting(
    launch: Launch, tmp_path: Path
) -> None:
    """Rank 0 is a stage of its own, 1 and 2 share one; what rank 2 measured in step 3 cannot be merged: it
    gives up in the middle of the reduction that rank 1 waits in. Each rank goes on alone and says so; the
    other stage loses nothing, this one the measurement of one step, counted."""
    names = {0: ["layers.0"], 1: ["layers.1", "layers.2"], 2: ["layers.1", "layers.3"]}
    seen = launch(world=3, steps=8, names=names, holds=names, damaged={2: 3})
    assert None not in seen
    stages = spooled(tmp_path / "spool")
    assert {name: [batch.header.step for batch in stages[name]] for name in stages} == {
        "part0": list(range(8)), "part1": [0, 1, 2, 4, 5, 6, 7]}
    assert [batch.arrays["elements"].tolist() for batch in stages["part0"]] == [[[1000]]] * 8
    assert [batch.arrays["elements"].tolist() for batch in stages["part1"]] == [
        *[[[2000, 1000, 1000]]] * 3, *[[[1000, 1000]]] * 4]
    assert stages["part0"][-1].header.lost == {}
    assert stages["part1"][-1].header.lost == {"unmatched": 1}
    for rank, name in enumerate(("part0", "part1")):
        (event,) = [event for batch in stages[name] for event in batch.header.events]
        assert event.text.startswith(f"only rank {rank} is measured from here on")
