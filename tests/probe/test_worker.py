"""The worker as a scope sees it, in one process: it never blocks, never raises, and counts what it loses."""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8scope.cadence import Cadence
from fp8scope.ranks import Ranks
from fp8scope.segment import spool_folder
from fp8scope.settings import OFFLINE, ProbeSettings, read_settings
from fp8scope.spool import Spool
from fp8scope.sums import SENTINEL_MAX_COLUMNS, SentinelSums, StepRecord, StepResult, SumTables
from fp8scope.timer import StepTime
from fp8scope.worker import MOST_EVENTS, MOST_RESULTS, Worker
from fp8scope_protocol.commands import CommandReport
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.series import Layout, Series
from fp8scope_protocol.wire import Batch, Hello, ProbeEvent, decode_batch, decode_hello

LAYOUT = Layout(series=tuple(
    Series(name=f"layers.{i}", role="activation", format="e4m3", scaling="tile 1x128", depth=i)
    for i in range(100)
))
NONFINITE = ProbeEvent(kind="nonfinite", step=0, name="layers.3", text="1 NaN")


def record_of(step: int, *, full: bool = True, wait: Callable[[], None] | None = None,
              events: tuple[ProbeEvent, ...] = (), reports: tuple[CommandReport, ...] = ()) -> StepRecord:
    tables = SumTables.zeros(100)
    tables.histogram[0, 0] = 1
    return StepRecord(step=step, sentinels=SentinelSums.zeros(), events=events, reports=reports, wait=wait,
                      tables=tables if full else None, layout=LAYOUT if full else None)


Opener = Callable[..., Worker]


@pytest.fixture
def open_worker(tmp_path: Path) -> Iterator[Opener]:
    """Opens workers that spool below the test's folder; closes them after the test."""
    with ExitStack() as stack:

        def opener(collector: str = OFFLINE, *, remote: bool = False, cadence: Cadence | None = None,
                   **settings: Any) -> Worker:
            given = {"collector": collector, "spool": tmp_path / "spool", "exit_seconds": 10.0,
                     "poll_seconds": 0.1, "retry_seconds": 0.1, **settings}
            hello = Hello(run="run", attempt="", producer="", remote_control=remote)
            worker = Worker(hello, ranks=Ranks(), settings=ProbeSettings(**given), token=None,
                            cadence=cadence)
            stack.callback(worker.close)
            return worker

        yield opener


def spooled(worker: Worker, tmp_path: Path) -> list[Batch]:
    """What `worker`, closed by this, left in its spool."""
    worker.close()
    folder = spool_folder(tmp_path / "spool", "run", worker.hello.attempt, "all")
    spool = Spool(folder, limit=2**30, memory_limit=0)
    batches = []
    while (record := spool.peek()) is not None:
        batches.append(decode_batch(record.payload))
        spool.ack(record)
    if batches:
        assert decode_hello(spool.hello) == worker.hello
        assert LAYOUT.id in spool.layouts or all(batch.header.layout is None for batch in batches)
    spool.close()
    return batches


def test_steps_become_batches_in_order(open_worker: Opener, tmp_path: Path) -> None:
    """Offline, each step is one batch: sampled ones with planes, the others with sentinels only."""
    worker = open_worker()
    for step in range(6):
        worker.submit(record_of(step, full=step % 3 == 0))
    batches = spooled(worker, tmp_path)
    assert [(batch.header.seq, batch.header.step) for batch in batches] == [(i, i) for i in range(6)]
    assert [batch.header.layout is not None for batch in batches] == [True, False, False] * 2
    assert batches[0].arrays["exponent_histogram"].shape == (40, 100)
    assert batches[1].header.sentinels == {}


def test_a_nan_sentinel_arrives_as_nan(open_worker: Opener, tmp_path: Path) -> None:
    """A NaN in a maximum is not swallowed by the merge: NaN is what this is about."""
    sentinels = SentinelSums.zeros()
    sentinels.maxes[SENTINEL_MAX_COLUMNS.index("update_max")] = float("nan")
    sentinels.sums[:2] = float("nan")
    worker = open_worker()
    worker.submit(StepRecord(step=0, sentinels=sentinels))
    (batch,) = spooled(worker, tmp_path)
    assert str(batch.header.sentinels["loss"]) == "nan"


def test_submit_does_not_wait_for_a_copy_that_never_ends(open_worker: Opener, tmp_path: Path) -> None:
    """While one step's copy from the device hangs, the training thread hands over further steps; beyond
    the byte limit their measurements go, counted, and their events and sentinels stay."""
    gate = threading.Event()

    def wait() -> None:
        gate.wait(60.0)

    worker = open_worker(queue_bytes=2**17)  # a full measurement of this layout is 54 kB
    worker.submit(record_of(0, wait=wait))
    for step in range(1, 20):
        worker.submit(record_of(step, events=(NONFINITE,)))
    gate.set()
    batches = spooled(worker, tmp_path)
    assert [batch.header.step for batch in batches] == list(range(20))
    full = sum(batch.header.layout is not None for batch in batches)
    assert 2 <= full < 20
    assert worker.lost.total() == 20 - full
    assert worker.lost["queue full"] >= 16  # two fit; the outbox behind may be full for a further one
    assert set(worker.lost) <= {"queue full", "outbox full"}
    assert all(batch.header.events == (NONFINITE,) for batch in batches[1:])
    assert batches[-1].header.lost == worker.lost


def test_events_of_dropped_steps_are_kept(
    open_worker: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when whole steps are dropped, their non-finite events go out with the next step, in order."""
    monkeypatch.setattr("fp8scope.worker.MOST_WAITING", 2)
    gate, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(60.0)

    worker = open_worker()
    worker.submit(record_of(0, wait=wait))
    assert begun.wait(60.0)
    for step in range(1, 6):
        event = ProbeEvent(kind="nonfinite", step=step)
        worker.submit(record_of(step, full=False, events=(event,)))
    assert worker.result(5) == StepResult(step=5)  # dropped: there is nothing to wait for
    gate.set()
    batches = spooled(worker, tmp_path)
    assert [batch.header.step for batch in batches] == [0, 1, 2]
    told = [event.step for batch in batches for event in batch.header.events]
    assert sorted(told) == [1, 2, 3, 4, 5]
    assert worker.lost == {"steps": 3}


def test_a_flood_of_events_is_bounded_and_says_so(open_worker: Opener, tmp_path: Path) -> None:
    """All 1000 layers turn NaN in one step: the batch stays small and says how many more there were."""
    worker = open_worker()
    worker.submit(record_of(0, events=tuple(ProbeEvent(kind="nonfinite", step=0, name=str(i))
                                            for i in range(1000))))
    (batch,) = spooled(worker, tmp_path)
    assert len(batch.header.events) == MOST_EVENTS + 1
    assert batch.header.events[-1].text == f"{1000 - MOST_EVENTS} more events in this step"


def test_p12_a_fault_in_the_probe_is_counted_and_training_goes_on(
    open_worker: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy that fails (a lost device, say) raises nothing into the training thread; later steps are fine
    and carry the count."""

    def fail() -> None:
        raise RuntimeError("the device is lost")

    worker = open_worker()
    worker.submit(record_of(0, wait=fail))
    assert worker.result(0) == StepResult(step=0)
    worker.submit(record_of(1))
    batches = spooled(worker, tmp_path)
    assert [batch.header.layout is not None for batch in batches] == [False, True]
    assert batches[1].header.lost == {"probe error": 1}
    assert "the device is lost" in caplog.text


def test_result_of_a_step_that_was_never_submitted_returns(open_worker: Opener) -> None:
    """The first boundaries ask for steps before the attach; that is no reason to wait."""
    worker = open_worker()
    assert worker.result(-2) == StepResult(step=-2)
    assert worker.waits == 0


def test_results_nobody_asks_for_do_not_pile_up(open_worker: Opener) -> None:
    """A loop that never asks for results leaves a bounded number of them."""
    worker = open_worker()
    for step in range(MOST_RESULTS * 2):
        worker.submit(record_of(step, full=False))
    worker.result(MOST_RESULTS * 2 - 1)
    assert len(worker._results) < MOST_RESULTS


def test_a_command_is_given_once_and_its_report_goes_out(open_worker: Opener, peer: Any, until: Any) -> None:
    """A command from a poll comes with the result of the step that carried it, once, and is reported; one
    past its last step is reported as expired instead."""
    action = {"kind": "set_precision", "modules": ["layers.3"], "precision": "bf16"}
    peer.write("commands.json", [
        {"id": 1, "action": action, "issued_by": "user", "expires_step": 1},
        {"id": 2, "action": action, "issued_by": "user", "expires_step": 10**6},
    ])
    peer.start()
    worker = open_worker(peer.url, remote=True)
    until(lambda: bool(peer.journal(method="GET")))
    given: list[int] = []
    step = 0
    while not given:
        worker.submit(record_of(step, full=False))
        given = [command.id for command in worker.result(step).commands]
        step += 1
    applied = CommandReport(id=2, state="applied", step=step)
    worker.submit(record_of(step, full=False, reports=(applied,)))
    assert worker.result(step).commands == ()
    assert given == [2]
    worker.close()
    reports = [report for batch in peer.batches() for report in batch.header.reports]
    assert [(one.id, one.state, one.steps_by_rank) for one in reports] == [
        (1, "expired", ()), (2, "applied", (step,)),
    ]


def test_a_file_system_without_locks_is_told_to_the_job_and_the_collector(
    open_worker: Opener, peer: Any, until: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of Lustre mounted without `flock`: batches go out from memory, and both hear why, once."""
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no_locks)
    peer.start()
    worker = open_worker(peer.url)
    for step in range(3):
        worker.submit(record_of(step))
    until(lambda: peer.stored() == [0, 1, 2])
    first, *others = [[event.text for event in batch.header.events] for batch in peer.batches()]
    assert others == [[], []]
    [said] = first
    assert "gives no locks (flock: Function not implemented); choose another with FP8SCOPE_SPOOL" in said
    assert caplog.text.count(said) == 1


def test_an_alert_at_the_collector_keeps_the_cadence(open_worker: Opener, peer: Any, until: Any) -> None:
    """The answers to batches tell of an alert: measuring stays as frequent as it is, at ten times its budget,
    until they no longer do."""
    (peer.folder / "alert").touch()
    peer.start()
    worker = open_worker(peer.url, cadence=Cadence(1, budget=0.01))
    time = StepTime(sampled=True, seconds=1.1, probe_seconds=0.1)

    def play(steps: range) -> list[tuple[int, int]]:
        found = []
        for step in steps:
            worker.submit(replace(record_of(step, full=False), time=lambda: time))
            if (every := worker.result(step).every) is not None:
                found.append((step, every))
        return found

    assert play(range(1)) == []
    until(lambda: peer.stored() == [0])
    until(lambda: worker._alert())
    assert play(range(1, 60)) == []
    (peer.folder / "alert").unlink()
    calm = play(range(60, 61))  # answers to earlier steps may say already that it is over
    until(lambda: not worker._alert())
    assert [every for _, every in calm + play(range(61, 120))] == [16]


def test_without_remote_control_nothing_is_asked(open_worker: Opener, peer: Any) -> None:
    """A run that did not opt in fetches no command, whatever the collector has for it."""
    action = {"kind": "set_precision", "modules": ["layers.3"], "precision": "bf16"}
    peer.write("commands.json", [{"id": 1, "action": action, "issued_by": "user"}])
    peer.start()
    worker = open_worker(peer.url)
    worker.submit(record_of(0))
    worker.close()
    assert peer.stored() == [0]
    assert peer.journal(method="GET") == []


def test_closing_says_what_remains(
    open_worker: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With nobody listening, closing returns, names the number of batches and the folder that keeps them."""
    worker = open_worker("http://127.0.0.1:9", exit_seconds=0.2)
    for step in range(3):
        worker.submit(record_of(step))
    worker.close()
    assert "3 batches are unsent" in caplog.text
    assert worker.hello.attempt in caplog.text
    assert len(spooled(worker, tmp_path)) == 3


def test_after_closing_the_worker_is_inert(open_worker: Opener, tmp_path: Path) -> None:
    """A late step, a second close: neither raises, and no thread of the probe is left."""
    worker = open_worker()
    worker.submit(record_of(0))
    worker.close()
    worker.submit(record_of(1))
    worker.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("fp8scope")]
    assert len(spooled(worker, tmp_path)) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_inert(open_worker: Opener, tmp_path: Path) -> None:
    """A DataLoader's worker inherits the worker but not its threads: every call returns at once, though
    another thread held the lock at the time of the fork, and nothing of the child reaches the spool."""
    held, gate = threading.Event(), threading.Event()
    worker = open_worker()

    def hold() -> None:
        with worker._ready:
            held.set()
            gate.wait(60.0)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60.0)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a hang ends as a failure
        worker.submit(record_of(1))
        quiet = worker.result(1) == StepResult(step=1)
        worker.close()
        os._exit(0 if quiet else 1)
    gate.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
    worker.submit(record_of(2))
    assert [batch.header.step for batch in spooled(worker, tmp_path)] == [2]


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    """Variables set fields by name; an argument wins; what cannot be right is named with its value."""
    environment = {"FP8SCOPE_COLLECTOR": "https://scope.example:1", "FP8SCOPE_SPOOL": str(tmp_path),
                   "FP8SCOPE_EXIT_SECONDS": "1.5", "FP8SCOPE_SPOOL_BYTES": "1000000"}
    settings = read_settings(environment, exit_seconds=2.0)
    assert (settings.collector, settings.spool) == ("https://scope.example:1", tmp_path)
    assert (settings.exit_seconds, settings.spool_bytes) == (2.0, 1_000_000)
    with pytest.raises(Invalid, match=r"FP8SCOPE_EXIT_SECONDS = 'soon': must be a number"):
        read_settings({"FP8SCOPE_EXIT_SECONDS": "soon"})
    with pytest.raises(Invalid, match="collector = 'ftp://x'"):
        read_settings({"FP8SCOPE_COLLECTOR": "ftp://x"})
    with pytest.raises(Invalid, match=r"//\.\.\.@host") as refused:
        read_settings({"FP8SCOPE_COLLECTOR": "http://user:secret@host:1"})
    assert "secret" not in str(refused.value)
    with pytest.raises(Invalid, match="exit_seconds = -1"):
        read_settings({"FP8SCOPE_EXIT_SECONDS": "-1"})
