"""A real training job while the collector, the network, the disk or the job itself fails.

Each time: training goes on, what was acknowledged is stored once and in order, every other batch is counted
by reason, and the count reaches the collector.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.probe.conftest import Peer, wait_until
from tests.probe.training import TrainingJob

from fp8scope.segment import segment_paths

Starter = Callable[..., TrainingJob]


@pytest.fixture
def start(tmp_path: Path, peer: Any) -> Iterator[Starter]:
    """Starts jobs that send to the peer; kills them after the test."""
    with ExitStack() as stack:
        lives = iter("abc")

        def starter(*arguments: str, **environment: str) -> TrainingJob:
            given = {"FP8SCOPE_COLLECTOR": peer.url, "FP8SCOPE_SPOOL": str(tmp_path / "spool"),
                     "FP8SCOPE_RETRY_SECONDS": "0.2", "FP8SCOPE_EXIT_SECONDS": "30", **environment}
            job = TrainingJob(tmp_path / f"job {next(lives)}", *arguments, **given)
            stack.callback(job.kill)
            return job

        yield starter


def attempts(peer: Any) -> list[str]:
    """In the order in which the collector learned of them."""
    return list(dict.fromkeys(one["attempt"] for one in peer.journal(method="POST")
                              if one["path"].endswith("/attempts")))


def stored(peer: Any, attempt: str) -> list[int]:
    """Sequence numbers, in the order in which they were stored first."""
    return [one["seq"] for one in peer.journal(status=200, duplicate=False, attempt=attempt)]


def told(peer: Any, attempt: str) -> dict[str, int]:
    """What of an attempt was lost, as the collector was told last."""
    said = [one["lost"] for one in peer.journal(attempt=attempt) if "lost" in one]
    return dict(said[-1]) if said else {}


@pytest.fixture(scope="module")
def outage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainingJob, Any, float]]:
    """A job whose collector was there at first, that collector, and when it went away."""
    folder = tmp_path_factory.mktemp("outage")
    peer = Peer(folder / "peer")
    peer.start()
    job = TrainingJob(folder / "job", "--pause", "0.1", FP8SCOPE_COLLECTOR=peer.url,
                      FP8SCOPE_SPOOL=str(folder / "spool"), FP8SCOPE_EXIT_SECONDS="30")
    wait_until(lambda: bool(peer.stored()))
    peer.stop()
    yield job, peer, time.monotonic()
    job.kill()
    peer.stop()


@pytest.mark.usefixtures("outage")  # its minute passes during the other tests
def test_training_goes_on_and_all_is_stored_once(peer: Any, start: Starter, until: Any) -> None:
    """In the middle of a run the collector is killed and started again, asks to come back later, fails, gives
    no answers, and takes 0.3 s over each, each for 50 steps, and the clock is set back by a day: no step is
    missing, none is there twice."""
    peer.start()
    job = start("--clock-back", "86400", "--clock-back-at", "100")
    until(lambda: peer.stored())
    peer.stop()
    job.advance(50)
    peer.start()
    job.advance(10)
    for rules in ({"always": {"status": 429, "headers": {"Retry-After": "1"}}}, {"always": {"status": 500}},
                  {"always": {"drop": "after"}}, {"seconds": 0.3}):
        before = len(peer.journal())
        peer.write("rules.json", rules)
        until(lambda before=before: len(peer.journal()) > before)
        job.advance(50)
        (peer.folder / "rules.json").unlink()
    steps = job.end()
    [attempt] = attempts(peer)
    assert stored(peer, attempt) == list(range(steps))
    assert told(peer, attempt) == {}
    assert {one["status"] for one in peer.journal() if "status" in one} >= {200, 429, 500}
    assert peer.journal(duplicate=True)
    sent = [one.header.sent_ns for one in peer.batches()]
    assert sent[100] < sent[99]  # the clock really was set back


def check_losses(peer: Any, steps: int, reason: str) -> None:
    """Some steps of the only attempt are not stored, not the last one, and just those are told as lost."""
    [attempt] = attempts(peer)
    found = stored(peer, attempt)
    assert found == sorted(found)
    assert found[-1] == steps - 1
    assert told(peer, attempt) == {reason: steps - len(found)}
    assert steps > len(found)


def test_what_is_refused_is_counted_and_told(peer: Any, start: Starter, until: Any) -> None:
    """For a while the collector refuses everything, as broken and then as too large: those batches are set
    aside, their number is known, and the steps after are stored."""
    peer.start()
    job = start()
    until(lambda: peer.stored())
    for status in (400, 413):
        peer.write("rules.json", {"always": {"status": status}})
        until(lambda status=status: len(peer.journal(status=status)) > 5)
    job.advance(20)
    (peer.folder / "rules.json").unlink()
    job.advance(20)
    check_losses(peer, job.end(), "rejected")


def test_a_killed_job_is_resumed_and_nothing_it_spooled_is_missing(peer: Any, start: Starter) -> None:
    """SIGKILL while the collector is away; the run is resumed twice, once with a clock that was set back by a
    day. All lives arrive, in the order in which they began, each from its first step on."""
    killed = []
    for arguments in ((), ("--resume", "--clock-back", "86400")):
        job = start(*arguments)
        job.advance(30)
        job.kill()
        killed.append(job)
    folders = list((peer.folder.parent / "spool" / "run").iterdir())
    assert len(folders) == 2
    for folder in folders:  # whatever the files' own times say
        for path in folder.rglob("*"):
            os.utime(path, (1e9, 1e9))
    peer.start()
    job = start("--resume")
    job.advance(5)
    steps = job.end()
    lives = attempts(peer)
    assert len(lives) == 3
    assert stored(peer, lives[2]) == list(range(steps))
    for attempt, job in zip(lives[:2], killed, strict=True):
        found = stored(peer, attempt)
        assert found == list(range(len(found)))
        assert len(found) >= job.steps() - 3  # what was on its way from the device died with the job
        assert told(peer, attempt) == {}
    sent = {one.header.attempt: one.header.sent_ns for one in peer.batches()}
    assert sent[lives[1]] < sent[lives[0]]  # the clock really was set back
    assert not (peer.folder.parent / "spool" / "run").exists()


@pytest.mark.parametrize("damage", ["torn", "unreadable"])
def test_a_damaged_spool_costs_the_damaged_record(peer: Any, start: Starter, damage: str) -> None:
    """The job is killed and its last record torn, or a byte in the middle is another: the next life sends
    the rest, and tells of one lost batch of the earlier attempt."""
    job = start()
    job.advance(30)
    job.kill()
    [folder] = (peer.folder.parent / "spool" / "run").glob("*/*")
    [path] = segment_paths(folder)
    if damage == "torn":
        os.truncate(path, path.stat().st_size - 7)
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    peer.start()
    job = start("--resume")
    job.advance(5)
    job.end()
    first, _ = attempts(peer)
    found = stored(peer, first)
    missing = set(range(found[-1] + 1)) - set(found)
    assert found == sorted(found)
    assert len(missing) == (damage == "unreadable")
    assert told(peer, first) == {damage: 1}


def test_a_proxy_comes_and_goes(peer: Any, start: Starter, until: Any, tmp_path: Path) -> None:
    """The collector is known to a proxy only, which dies and is started again, and whose collector is away
    for a while: a proxy's own errors are no acknowledgement, and every step is stored once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def proxy() -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).parent / "proxy.py"), str(tmp_path / "log"),
                   str(peer.port), str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    peer.start()
    with proxy() as first:
        job = start(FP8SCOPE_COLLECTOR="http://collector.example:8050", HTTP_PROXY=f"http://127.0.0.1:{port}")
        until(lambda: peer.stored())
        first.kill()
    job.advance(20)
    with proxy() as second:
        job.advance(20)
        peer.stop()
        job.advance(20)
        peer.start()
        job.advance(20)
        steps = job.end()
        second.kill()
    [attempt] = attempts(peer)
    assert stored(peer, attempt) == list(range(steps))
    assert told(peer, attempt) == {}
    assert all(line.startswith("http://collector.example") for line in (tmp_path / "log").read_text().split())


def test_a_full_spool_gives_up_its_oldest_segments(peer: Any, start: Starter) -> None:
    """The collector is away until the spool's limit is reached: the oldest steps go, counted."""
    job = start(FP8SCOPE_SPOOL_BYTES="65536")
    job.advance(300)
    peer.start()
    job.advance(20)
    check_losses(peer, job.end(), "spool full")


def test_a_full_disk_is_lived_with(peer: Any, start: Starter, tmp_path: Path) -> None:
    """The spool is on a file system of 128 KiB and the collector is away: when the disk is full the probe
    keeps a limited amount in memory, and what it gives up is counted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k,mode=700", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs privileges")
    try:
        job = start(FP8SCOPE_SPOOL=str(disk / "spool"), FP8SCOPE_QUEUE_BYTES="65536")
        while "up to 65536 bytes are kept in memory instead" not in job.said():
            job.advance(20)
        job.advance(job.steps())  # the memory is half of the disk
        peer.start()
        job.advance(20)
        steps = job.end()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    [attempt] = attempts(peer)
    found = stored(peer, attempt)
    assert found == sorted(found)
    assert found[-1] == steps - 1
    lost = told(peer, attempt)
    assert set(lost) == {"memory full"}
    assert lost["memory full"] == steps - len(found)


def test_a_collector_that_is_away_for_a_minute(outage: tuple[TrainingJob, Any, float]) -> None:
    """Sixty seconds by the clock: training has gone on, and every step arrives once, in order."""
    job, peer, since = outage
    steps = job.steps()
    while (left := since + 60.0 - time.monotonic()) > 0:
        job.check()
        time.sleep(min(left, 1.0))
    job.advance(1)
    assert job.steps() > steps
    peer.start()
    steps = job.end()
    [attempt] = attempts(peer)
    assert stored(peer, attempt) == list(range(steps))
    assert told(peer, attempt) == {}
