"""`fp8scope sync` as a process of its own, against the scripted collector."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.probe.training import TrainingJob

from fp8scope.segment import segment_paths, spool_folder
from fp8scope.spool import Spool
from fp8scope_protocol.series import Layout, Series, encode_layout
from fp8scope_protocol.wire import Batch, BatchHeader, Hello, encode_batch, encode_hello, planes_of

AMAX = {"amax": np.ones(1, dtype="<f4")}
SERIES = Series(name="layers", role="activation", format="e4m3", scaling="tile 1x128")
Starter = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def sync(peer: Any) -> Iterator[Starter]:
    """Starts `fp8scope sync` with the peer as its collector; kills it after the test."""
    with ExitStack() as stack:

        def start(*arguments: str | Path, collector: str = peer.url) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "fp8scope.cli", "sync", *map(str, arguments)]
            environment = {"FP8SCOPE_COLLECTOR": collector, "FP8SCOPE_RETRY_SECONDS": "0.2",
                           "FP8SCOPE_POLL_SECONDS": "0.2"}
            process = subprocess.Popen(command, env=os.environ | environment, text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start


def fill(root: Path, *seqs: int, run: str = "run", attempt: str = "a1") -> Spool:
    """The spool of an offline job, still open."""
    hello = encode_hello(Hello(run=run, attempt=attempt, producer="all", host=socket.gethostname()))
    spool = Spool(spool_folder(root, run, attempt, "all"), limit=2**24, memory_limit=0, hello=hello,
                  segment_bytes=2**14, sends=False)
    append(spool, run, attempt, *seqs)
    return spool


def append(spool: Spool, run: str, attempt: str, *seqs: int) -> None:
    for seq in seqs:
        header = BatchHeader(run=run, attempt=attempt, producer="all", seq=seq, step=seq)
        spool.append(seq, encode_batch(Batch(header=header, arrays={})))


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit code and what it said, but for its progress, once it has ended by itself."""
    _, said = process.communicate(timeout=90)
    return process.returncode, [line for line in said.splitlines() if not line.startswith("sync  ")]


def stored(peer: Any, attempt: str = "a1") -> list[int]:
    return [one["seq"] for one in peer.journal(status=200, duplicate=False, attempt=attempt)]


def test_what_offline_jobs_left_is_sent_and_removed(peer: Any, sync: Starter, tmp_path: Path) -> None:
    """Three attempts of two runs: each arrives in order, the earlier attempt first, and nothing stays."""
    root = tmp_path / "spool"
    for attempt, run in (("z", "run"), ("a", "run"), ("o", "other")):
        fill(root, *range(50), run=run, attempt=attempt).close()
    peer.start()
    assert ended(sync(root)) == (0, ["150 batches sent, 0 rejected"])
    assert [stored(peer, attempt) for attempt in "zao"] == [list(range(50))] * 3
    greeted = [one["attempt"] for one in peer.journal(method="POST") if one["path"].endswith("/attempts")]
    assert greeted.index("z") < greeted.index("a")
    assert list(root.iterdir()) == []
    assert ended(sync(root)) == (0, ["0 batches sent, 0 rejected"])


def test_many_short_runs_are_sent_without_a_pause(peer: Any, sync: Starter, tmp_path: Path) -> None:
    """The collector asks for each run's layout once, which is no trouble: nothing is said of any."""
    root = tmp_path / "spool"
    for i in range(12):
        layout = Layout(series=(msgspec.structs.replace(SERIES, name=f"layers.{i}"),))
        header = BatchHeader(run=f"run-{i}", attempt=f"a{i}", producer="all", seq=0, step=0,
                             layout=layout.id, columns=1, planes=planes_of(AMAX))
        spool = fill(root, run=f"run-{i}", attempt=f"a{i}")
        spool.append(0, encode_batch(Batch(header=header, arrays=AMAX)), (layout.id, encode_layout(layout)))
        spool.close()
    peer.start()
    assert ended(sync(root)) == (0, ["12 batches sent, 0 rejected"])
    assert len(peer.journal(status=409)) == 12


def test_any_folder_of_a_spool_will_do(peer: Any, sync: Starter, tmp_path: Path) -> None:
    """A producer's folder, copied from elsewhere without its locks; the rest of the spool is not touched."""
    root = tmp_path / "spool"
    fill(root, 0, 1).close()
    other = fill(root, 0, 1, run="other", attempt="o")
    other.close()
    peer.start()
    folder = spool_folder(root, "run", "a1", "all")
    for path in folder.iterdir():
        if not path.name.endswith(".f8ss"):
            path.unlink()
    assert ended(sync(folder))[0] == 0
    assert (stored(peer), stored(peer, "o")) == ([0, 1], [])
    assert len(segment_paths(other.folder)) == 1


def test_follow_is_the_only_way_out_and_back(peer: Any, sync: Starter, tmp_path: Path, until: Any) -> None:
    """A real offline job: its steps reach the collector while it runs, a command reaches it and is applied,
    the report comes back. Told to end, sync ends well; nothing is left in the spool."""
    peer.start()
    follower = sync("--follow", tmp_path / "spool")
    job = TrainingJob(tmp_path / "job", FP8SCOPE_COLLECTOR="offline", FP8SCOPE_SPOOL=str(tmp_path / "spool"),
                      FP8SCOPE_POLL_SECONDS="0.2")
    try:
        job.advance(20)
        until(lambda: len(peer.stored()) > 20)
        action = {"kind": "set_precision", "modules": ["0"], "precision": "bf16"}
        peer.write("commands.json", [{"id": 1, "action": action, "issued_by": "user"}])
        until(lambda: job.switches())
        job.advance(10)
        steps = job.end()
    finally:
        job.kill()
    until(lambda: len(peer.stored()) == steps)
    assert peer.stored() == list(range(steps))
    [report] = [report for batch in peer.batches() for report in batch.header.reports]
    assert (report.id, report.state) == (1, "applied")
    assert report.step == job.switches()[0]["step"]
    until(lambda: not any(name.endswith(".f8ss") for _, _, names in os.walk(tmp_path / "spool")
                          for name in names))
    follower.send_signal(signal.SIGTERM)
    assert ended(follower) == (0, [f"{steps} batches sent, 0 rejected"])
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_second_sync_of_one_folder_says_so(peer: Any, sync: Starter, tmp_path: Path, until: Any) -> None:
    """It leaves everything to the first; a spool that a job sends itself is left alone, too."""
    root = tmp_path / "spool"
    spool = fill(root, 0)
    peer.start()
    first = sync("--follow", root)
    until(lambda: stored(peer) == [0])
    code, said = ended(sync(root))
    assert code == 3
    assert said[0] == f"fp8scope: {spool.folder} is not sent from: another process does"
    first.send_signal(signal.SIGINT)
    assert ended(first)[0] == 0
    spool.close()


def test_a_killed_sync_loses_nothing(peer: Any, sync: Starter, tmp_path: Path, until: Any) -> None:
    """SIGKILL in the middle of sending what a living job writes: the next one goes on; each batch is stored
    once, whatever was sent twice."""
    root = tmp_path / "spool"
    spool = fill(root, *range(300))
    peer.write("rules.json", {"seconds": 0.05})
    peer.start()
    first = sync("--follow", root)
    until(lambda: len(stored(peer)) > 20)
    first.kill()
    first.wait()
    append(spool, "run", "a1", *range(300, 400))
    (peer.folder / "rules.json").unlink()
    second = sync("--follow", root)
    until(lambda: len(stored(peer)) == 400)
    append(spool, "run", "a1", *range(400, 410))
    spool.close()
    until(lambda: not segment_paths(spool.folder))
    second.send_signal(signal.SIGTERM)
    assert ended(second)[0] == 0
    assert stored(peer) == list(range(410))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sync_says_what_is_left(
    sync: Starter, tmp_path: Path, number: signal.Signals
) -> None:
    """Nobody listens: the signal ends it with 1, and everything is still there."""
    root = tmp_path / "spool"
    spool = fill(root, 0, 1, 2)
    spool.close()
    process = sync(root, collector="http://127.0.0.1:9")
    assert process.stderr is not None
    assert "no answer from http://127.0.0.1:9" in process.stderr.readline()
    process.send_signal(number)
    assert ended(process) == (1, ["0 batches sent, 0 rejected", f"{spool.folder}: not all is sent"])
    assert len(segment_paths(spool.folder)) == 1


def test_losses_on_the_way_are_told(peer: Any, sync: Starter, tmp_path: Path) -> None:
    """A batch that is rejected, a damaged one and a torn one: set aside or counted, told, and exit code 1."""
    root = tmp_path / "spool"
    spool = fill(root, *range(10))
    spool.close()
    [path] = segment_paths(spool.folder)
    data = bytearray(path.read_bytes())
    middle = data.index(encode_batch(Batch(header=BatchHeader(
        run="run", attempt="a1", producer="all", seq=5, step=5), arrays={})))
    data[middle] ^= 1
    path.write_bytes(data[:-3])
    peer.write("rules.json", {"never": [2]})
    peer.start()
    code, said = ended(sync(root))
    assert (code, said[-1]) == (1, "7 batches sent, 1 rejected")
    assert stored(peer) == [0, 1, 3, 4, 6, 7, 8]
    assert [one["lost"] for one in peer.journal(attempt="a1") if "lost" in one][-1] == {
        "rejected": 1, "torn": 1, "unreadable": 1}
    assert [path.name for path in spool.folder.iterdir()] == ["rejected.f8sr"]


@pytest.mark.parametrize(("arguments", "collector", "said"), [
    (["nowhere"], "http://127.0.0.1:9", "DIR = 'nowhere': must be a folder"),
    (["."], "offline", "collector = 'offline': must be an address here"),
    ([".", "--collector", "ftp://x"], "offline", "must be http(s)://HOST[:PORT]"),
])
def test_bad_input_is_one_line_and_exit_code_2(
    sync: Starter, arguments: list[str], collector: str, said: str
) -> None:
    """No traceback."""
    code, shown = ended(sync(*arguments, collector=collector))
    assert code == 2
    assert len(shown) == 1
    assert said in shown[0]


def test_certificates_that_are_missing_are_one_line(
    sync: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What httpx raises when it is set up is no traceback either."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "no such file"))
    code, shown = ended(sync(tmp_path))
    assert code == 2
    assert len(shown) == 1
    assert "see SSL_CERT_FILE" in shown[0]
