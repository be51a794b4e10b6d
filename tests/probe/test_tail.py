"""A spool that one process fills and another one sends: what each sees of the other's work."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from fp8scope.claim import WRITER
from fp8scope.letterbox import Letterbox
from fp8scope.segment import Kind, Record, encode_record, segment_paths, spool_folder
from fp8scope.spool import Spool, adopt
from fp8scope.tail import Tail
from fp8scope_protocol.commands import Command, SetPrecision
from fp8scope_protocol.wire import Hello, encode_hello


class Opener(Protocol):
    def __call__(self, folder: Path, *, host: str = ..., limit: int = ..., sends: bool = ...) -> Spool: ...


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Opener]:
    """Opens the spool of an offline job; closes it after the test."""
    with ExitStack() as stack:

        def opener(folder: Path, *, host: str = socket.gethostname(), limit: int = 2**20,
                   sends: bool = False) -> Spool:
            hello = encode_hello(Hello(run="run", attempt="a", producer="all", host=host))
            spool = Spool(folder, limit=limit, memory_limit=0, hello=hello, segment_bytes=2**14, sends=sends)
            stack.callback(spool.close)
            return spool

        yield opener


@pytest.fixture
def follow() -> Iterator[type[Tail]]:
    """Opens tails; closes them after the test."""
    with ExitStack() as stack:

        class Closed(Tail):
            def __init__(self, folder: Path) -> None:
                super().__init__(folder)
                stack.callback(self.close)

        yield Closed


def drain(tail: Tail) -> list[int]:
    """The seqs of what can be read now, each acknowledged."""
    found = []
    while records := tail.peek_many(3, 2**20):
        for record in records:
            found.append(record.seq)
            tail.ack(record)
    return found


def test_batches_come_as_they_are_written(write: Opener, follow: type[Tail], tmp_path: Path) -> None:
    """In order, each once; segments go once they are sent, the newest only after its writer."""
    spool = write(tmp_path / "s")
    spool.append(0, bytes(5000), ("id", b"layout"))
    tail = follow(spool.folder)
    assert drain(tail) == [0]
    assert (tail.hello, b"layout" in tail.layouts.values()) == (spool.hello, True)
    for seq in range(1, 10):
        spool.append(seq, bytes(5000))
    assert drain(tail) == list(range(1, 10))
    assert len(segment_paths(spool.folder)) == 1
    assert spool.pending() == 1  # the rest has left
    assert not tail.ended
    spool.close()
    assert drain(tail) == []
    assert tail.ended
    tail.close()
    assert not spool.folder.exists()
    assert not tail.lost


def test_a_record_that_is_being_written_is_waited_for(
    write: Opener, follow: type[Tail], tmp_path: Path
) -> None:
    """At each of its bytes: nothing comes out, nothing is lost, and it comes when it is whole."""
    spool = write(tmp_path / "s")
    spool.append(0, b"zero")
    tail = follow(spool.folder)
    assert drain(tail) == [0]
    [path] = segment_paths(spool.folder)
    with path.open("ab", buffering=0) as file:
        for byte in encode_record(Record(Kind.BATCH, 1, b"one")):
            assert drain(tail) == []
            file.write(bytes([byte]))
    assert drain(tail) == [1]
    assert not tail.lost


@pytest.mark.parametrize("cut", range(1, 21))
def test_a_torn_tail_of_a_dead_writer_is_counted(
    write: Opener, follow: type[Tail], tmp_path: Path, cut: int
) -> None:
    """A writer that died in the middle of a record: all before it comes, the torn one is counted."""
    spool = write(tmp_path / "s")
    for seq in range(3):
        spool.append(seq, b"abc")
    spool.close()
    [path] = segment_paths(spool.folder)
    os.truncate(path, path.stat().st_size - min(cut, 19))
    tail = follow(spool.folder)
    assert drain(tail) == [0, 1]
    assert tail.ended
    assert tail.lost == {"torn": 1}


def test_damage_costs_the_damaged_record(write: Opener, follow: type[Tail], tmp_path: Path) -> None:
    """In the middle of a segment, and of the last record of one that others follow."""
    spool = write(tmp_path / "s")
    for seq in range(9):
        spool.append(seq, bytes(5000))  # three a segment
    first, second, _ = segment_paths(spool.folder)
    for path, at in ((first, 7_000), (second, -100)):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
    tail = follow(spool.folder)
    assert drain(tail) == [0, 2, 3, 4, 6, 7, 8]
    assert tail.lost == {"unreadable": 2}


def test_what_was_sent_is_not_counted_as_lost(write: Opener, follow: type[Tail], tmp_path: Path) -> None:
    """Many times the limit goes through a spool that is sent as fast as it is filled."""
    spool = write(tmp_path / "s", limit=2**16)
    spool.append(0, bytes(5000))
    tail = follow(spool.folder)
    found = drain(tail)
    for seq in range(1, 100):
        spool.append(seq, bytes(5000))
        found += drain(tail)
    assert found == list(range(100))
    assert not spool.lost.total()


def test_a_full_spool_drops_nothing_that_is_on_its_way(
    write: Opener, follow: type[Tail], tmp_path: Path
) -> None:
    """The sender has read part of a segment when the space is needed: that segment stays, others go, and what
    was lost is exactly what never came."""
    spool = write(tmp_path / "s", limit=2**16)
    for seq in range(3):
        spool.append(seq, bytes(5000))
    tail = follow(spool.folder)
    assert [one.seq for one in tail.peek_many(2, 2**20)] == [0, 1]
    for seq in range(3, 60):
        spool.append(seq, bytes(5000))
        assert spool.size() <= 2**16
    found = drain(tail)
    assert found[:3] == [0, 1, 2]
    assert found[-1] == 59
    assert spool.lost == {"spool full": 60 - len(found)}
    assert not tail.lost


def test_one_sends_at_a_time(write: Opener, follow: type[Tail], tmp_path: Path) -> None:
    """A spool that a job sends itself, or that another process sends already, is refused; adopting leaves
    both alone."""
    online = write(spool_folder(tmp_path, "run", "a", "all"), sends=True)
    offline = write(spool_folder(tmp_path, "run", "b", "all"))
    for spool in (online, offline):
        spool.append(0, b"x")
    with pytest.raises(BlockingIOError):
        follow(online.folder)
    tail = follow(offline.folder)
    with pytest.raises(BlockingIOError):
        follow(offline.folder)
    offline.close()
    assert adopt(tmp_path, "run", limit=2**20) == []
    tail.close()
    [adopted] = adopt(tmp_path, "run", limit=2**20)
    adopted.close()


def test_a_claim_of_another_node_is_not_trusted_at_once(
    write: Opener, follow: type[Tail], tmp_path: Path
) -> None:
    """Where locks do not reach other nodes the writer only seems gone: the end comes after a quiet minute."""
    spool = write(tmp_path / "s", host="another-node")
    spool.append(0, b"zero")
    spool.close()
    tail = follow(spool.folder)
    assert drain(tail) == [0]
    assert tail.living()
    assert not tail.ended
    [path] = segment_paths(spool.folder)
    with path.open("ab") as file:  # it lives
        file.write(encode_record(Record(Kind.BATCH, 1, b"one")))
    assert drain(tail) == [1]
    assert path.exists()
    quiet = path.stat().st_mtime - 61
    os.utime(path, (quiet, quiet))
    assert drain(tail) == []
    assert tail.ended


def test_attempts_keep_their_order_whatever_the_files_say(write: Opener, tmp_path: Path) -> None:
    """Attempts are ordered by a count, not by times, which a clock that was set back would reverse."""
    for number, attempt in enumerate(("zz", "mm", "aa")):
        spool = write(spool_folder(tmp_path, "run", attempt, "all"))
        spool.append(number, b"x")
        spool.close()
        for path in (spool.folder / WRITER, *segment_paths(spool.folder)):
            os.utime(path, (2e9 - number, 2e9 - number))
    spools = adopt(tmp_path, "run", limit=2**20)
    assert [spool.folder.parent.name for spool in spools] == ["zz", "mm", "aa"]
    for spool in spools:
        spool.close()


def command(number: int) -> Command:
    return Command(id=number, action=SetPrecision(modules=("fc1",), precision="bf16"), issued_by="user")


def test_commands_are_left_and_read(tmp_path: Path) -> None:
    """The job reads what was left, when it changed; the sender knows after a restart what it had left."""
    sender, job = Letterbox(tmp_path), Letterbox(tmp_path)
    assert (sender.known, job.read()) == (0, [])
    sender.add([])
    assert list(tmp_path.iterdir()) == []
    sender.add([command(3)])
    assert (sender.known, Letterbox(tmp_path).known) == (3, 3)
    assert job.read() == [command(3)]
    assert job.read() == []
    sender.add([command(3), command(4)])
    assert job.read() == [command(3), command(4)]
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]


def test_commands_that_cannot_be_read_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised into the job."""
    box = Letterbox(tmp_path)
    box.add([command(1)])
    [path] = tmp_path.iterdir()
    path.write_text("half a comm")
    assert box.read() == []
    assert "cannot be read" in caplog.text
