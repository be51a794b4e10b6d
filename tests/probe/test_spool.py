"""The spool on a real disk: order, recovery, limits, and disks that fail."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from fp8scope.segment import MAGIC, Kind, Record, encode_record, run_folder, segment_paths, spool_folder
from fp8scope.spool import Spool, adopt

WRITER = """
import sys, json
from pathlib import Path
from fp8scope.spool import Spool
spool = Spool(Path(sys.argv[1]), limit=2**20, memory_limit=0, hello=b"hello")
for seq in range(10**9):
    spool.append(seq, json.dumps(seq).encode() * 40)
    print(seq, flush=True)
"""


class Opener(Protocol):
    def __call__(self, folder: Path, *, limit: int = ..., memory: int = ..., segment: int = ...) -> Spool: ...


@pytest.fixture
def open_spool() -> Iterator[Opener]:
    """Opens spools with small limits; closes them after the test."""
    with ExitStack() as stack:

        def opener(
            folder: Path, *, limit: int = 2**20, memory: int = 2**20, segment: int = 2**16
        ) -> Spool:
            spool = Spool(folder, limit=limit, memory_limit=memory, hello=b"hello", segment_bytes=segment)
            stack.callback(spool.close)
            return spool

        yield opener


def drain(spool: Spool) -> list[Record]:
    """Every batch of `spool`, each acknowledged before the next is asked for."""
    found = []
    while (record := spool.peek()) is not None:
        found.append(record)
        spool.ack(record)
    return found


def test_batches_come_back_in_order_with_hello_and_layouts(open_spool: Opener, tmp_path: Path) -> None:
    """What goes in comes out once, in order; the hello and the layout of each batch are known by then."""
    spool = open_spool(tmp_path / "s")
    for seq in range(5):
        spool.append(seq, b"batch %d" % seq, ("id", b"layout"))
    assert spool.pending() == 5
    assert [(record.seq, record.payload) for record in drain(spool)] == [
        (seq, b"batch %d" % seq) for seq in range(5)
    ]
    assert spool.hello == b"hello"
    assert b"layout" in spool.layouts.values()
    assert spool.pending() == 0


def test_only_the_owner_may_look(open_spool: Opener, tmp_path: Path) -> None:
    """Folders of the spool are 0700 and files 0600, whatever the umask; the data home stays open, since a
    database under another user may live beside the spool."""
    before = os.umask(0)
    try:
        folder = spool_folder(tmp_path / "home" / "spool", "run", "attempt", "all")
        open_spool(folder).append(0, b"x")
    finally:
        os.umask(before)
    made = [folder, *folder.parents[:3]]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 4
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o777
    assert segment_paths(folder)[0].stat().st_mode & 0o777 == 0o600


def test_segments_go_when_wholly_acknowledged(open_spool: Opener, tmp_path: Path) -> None:
    """A segment stays until its last batch is acknowledged, then its file is gone."""
    spool = open_spool(tmp_path / "s", segment=2**14)
    for seq in range(9):
        spool.append(seq, bytes(5000))  # three a segment
    files = segment_paths(spool.folder)
    assert len(files) == 3
    for _ in range(2):
        record = spool.peek()
        assert record is not None
        spool.ack(record)
    assert segment_paths(spool.folder) == files
    record = spool.peek()
    assert record is not None
    spool.ack(record)
    assert spool.peek() is not None
    assert segment_paths(spool.folder) == files[1:]


def test_each_segment_stands_alone(open_spool: Opener, tmp_path: Path) -> None:
    """Every segment repeats the hello, and the layout before its first batch that needs it."""
    spool = open_spool(tmp_path / "s", segment=2**14)
    for seq in range(6):
        spool.append(seq, bytes(5000), ("id", b"layout"))
    spool.close()
    first, second = segment_paths(spool.folder)
    for path in (first, second):
        data = path.read_bytes()
        assert data.startswith(MAGIC + encode_record(Record(Kind.HELLO, 0, b"hello")))
        assert data.count(encode_record(Record(Kind.LAYOUT, 0, b"layout"))) == 1


def test_what_a_process_left_is_read_by_the_next(open_spool: Opener, tmp_path: Path) -> None:
    """Unacknowledged batches survive the process; the new life writes after them."""
    first = open_spool(tmp_path / "s")
    for seq in range(3):
        first.append(seq, b"%d" % seq)
    first.close()
    second = open_spool(tmp_path / "s")
    second.append(3, b"3")
    assert [record.seq for record in drain(second)] == [0, 1, 2, 3]
    assert not second.lost


def test_a_tail_torn_at_any_byte_is_cut_off_and_counted(
    open_spool: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A last record that lacks any number of its bytes is dropped, counted once; all before it is kept."""
    spool = open_spool(tmp_path / "s")
    for seq in range(3):
        spool.append(seq, b"some payload %d" % seq)
    spool.close()
    (path,) = segment_paths(spool.folder)
    whole = path.read_bytes()
    last = len(encode_record(Record(Kind.BATCH, 2, b"some payload 2")))
    for cut in range(1, last):
        folder = tmp_path / f"cut {cut}"
        folder.mkdir()
        (folder / path.name).write_bytes(whole[:-cut])
        again = open_spool(folder)
        assert [record.seq for record in drain(again)] == [0, 1]
        assert again.lost == {"torn": 1}
    assert caplog.text.count("torn record") == last - 1


def test_damage_at_any_byte_costs_the_records_it_hits(open_spool: Opener, tmp_path: Path) -> None:
    """A flipped byte anywhere in what a process left, or a hole over several records: the batches that are
    whole come out, in order, and the others are counted."""
    spool = open_spool(tmp_path / "s")
    batches = [Record(Kind.BATCH, seq, b"payload of %d" % seq) for seq in range(6)]
    for record in batches:
        spool.append(record.seq, record.payload)
    spool.close()
    (path,) = segment_paths(spool.folder)
    whole = path.read_bytes()
    size = len(encode_record(batches[0]))
    first = len(whole) - 6 * size
    assert whole[first:] == b"".join(encode_record(record) for record in batches)
    damaged = [(at, at + 1) for at in range(len(whole))] + [(first + size - 3, first + 3 * size + 2)]
    for start, end in damaged:
        folder = tmp_path / f"{start} {end}"
        folder.mkdir()
        data = bytearray(whole)
        data[start:end] = bytes(byte ^ 0xFF for byte in data[start:end])
        (folder / path.name).write_bytes(data)
        again = open_spool(folder)
        hit = {(at - first) // size for at in range(max(start, first), end)}
        assert drain(again) == [record for record in batches if record.seq not in hit]
        assert again.lost.total() == len(hit), (start, end, again.lost)


def test_a_payload_that_looks_like_records_is_none(open_spool: Opener, tmp_path: Path) -> None:
    """Damage before a batch whose payload holds the bytes of another segment: those are not taken for ours
    unless the batch around them cannot be read either."""
    inner = b"".join(encode_record(Record(Kind.BATCH, seq, b"inner")) for seq in range(3))
    spool = open_spool(tmp_path / "s")
    for seq, payload in enumerate((b"first", inner, b"last")):
        spool.append(seq, payload)
    spool.close()
    (path,) = segment_paths(spool.folder)
    data = bytearray(path.read_bytes())
    data[data.index(b"first")] ^= 1
    path.write_bytes(data)
    again = open_spool(tmp_path / "s")
    assert [record.payload for record in drain(again)] == [inner, b"last"]
    assert again.lost == {"unreadable": 1}


def test_several_are_read_at_once_and_acknowledged_in_order(open_spool: Opener, tmp_path: Path) -> None:
    """`peek_many` keeps within both limits but for the first, shows the same ones until they are
    acknowledged, and what a limit drops meanwhile takes no acknowledgement from others."""
    spool = open_spool(tmp_path / "s", segment=2**14)
    for seq in range(12):
        spool.append(seq, bytes(5000))  # three a segment
    assert [one.seq for one in spool.peek_many(2, 10**6)] == [0, 1]
    assert [one.seq for one in spool.peek_many(9, 10_000)] == [0, 1]
    assert [one.seq for one in spool.peek_many(9, 1)] == [0]
    flying = spool.peek_many(9, 10**6)
    assert [one.seq for one in flying] == [0, 1, 2]
    for record in flying[:2]:
        spool.ack(record)
    assert [one.seq for one in spool.peek_many(9, 10**6)] == [2]
    spool.trim(3 * 2**14)
    spool.ack(flying[2])
    assert not spool.lost.total()
    assert [one.seq for one in drain(spool)] == list(range(3, 12))


def test_a_damaged_record_never_comes_out(
    open_spool: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit is found by the checksum; the loss is counted and later segments are still sent."""
    spool = open_spool(tmp_path / "s", segment=2**14)
    for seq in range(6):
        spool.append(seq, bytes(5000))
    path = segment_paths(spool.folder)[0]
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1  # in the third record of the first segment
    path.write_bytes(data)
    assert [record.seq for record in drain(spool)] == [0, 1, 3, 4, 5]
    assert spool.lost == {"unreadable": 1}


def test_a_killed_writer_loses_nothing_it_had_written(open_spool: Opener, tmp_path: Path) -> None:
    """kill -9 in the middle of writing: every batch whose append had returned is there, in order."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 300:
                break
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    acknowledged = int(rest[-1]) if rest else 300
    spool = open_spool(tmp_path / "s")
    found = drain(spool)
    assert [record.seq for record in found] == list(range(len(found)))
    assert len(found) > acknowledged
    assert all(json.loads(record.payload[: len(record.payload) // 40]) == record.seq for record in found)


def test_the_oldest_segment_goes_when_the_spool_is_full(
    open_spool: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The size limit holds at every moment; what it costs is counted, and it is the oldest."""
    spool = open_spool(tmp_path / "s", limit=2**17, segment=2**14)
    for seq in range(100):
        spool.append(seq, bytes(5000))
        assert sum(path.stat().st_size for path in segment_paths(spool.folder)) <= 2**17
    left = [record.seq for record in drain(spool)]
    assert left == list(range(100 - len(left), 100))
    assert spool.lost == {"spool full": 100 - len(left)}
    assert caplog.text.count("is full") == 1


def test_a_batch_on_its_way_is_not_lost_to_the_limit(open_spool: Opener, tmp_path: Path) -> None:
    """Its segment may be dropped meanwhile: it is not counted, and its acknowledgement takes no other one."""
    spool = open_spool(tmp_path / "s", limit=2**16, segment=2**14)
    spool.append(0, bytes(5000))
    flying = spool.peek()
    assert flying is not None
    for seq in range(1, 30):
        spool.append(seq, bytes(5000))
    pending = spool.pending()
    assert pending + spool.lost["spool full"] == 30
    assert spool.peek() is flying
    spool.ack(flying)
    assert spool.pending() == pending - 1
    assert len(drain(spool)) == pending - 1


def test_a_batch_over_the_whole_limit_is_counted(open_spool: Opener, tmp_path: Path) -> None:
    """A single batch that can never fit is dropped, not everything else for its sake."""
    spool = open_spool(tmp_path / "s", limit=2**16)
    spool.append(0, b"small")
    spool.append(1, bytes(2**17))
    spool.append(2, b"small")
    assert [record.seq for record in drain(spool)] == [0, 2]
    assert spool.lost == {"spool full": 1}


def test_c4_a_resumed_attempt_that_counts_from_0_again_keeps_all(open_spool: Opener, tmp_path: Path) -> None:
    """Two attempts of one run both start at seq 0: all batches of both are sent, the older ones first."""
    for attempt, count in (("first", 3), ("second", 2)):
        spool = open_spool(spool_folder(tmp_path, "run", attempt, "all"))
        for seq in range(count):
            spool.append(seq, f"{attempt} {seq}".encode())
        spool.close()
    found = []
    for spool in adopt(tmp_path, "run", limit=2**20):
        found += [record.payload.decode() for record in drain(spool)]
        spool.close()
    assert found == ["first 0", "first 1", "first 2", "second 0", "second 1"]


def test_a_living_owner_is_left_alone(open_spool: Opener, tmp_path: Path) -> None:
    """`adopt` takes nothing that a process still writes to, nor another run's; a dead owner's it takes."""
    living = open_spool(spool_folder(tmp_path, "run", "a", "all"))
    living.append(0, b"x")
    other = open_spool(spool_folder(tmp_path, "run.2", "a", "all"))
    other.append(0, b"x")
    other.close()
    assert adopt(tmp_path, "run", limit=2**20) == []
    living.close()
    (spool,) = adopt(tmp_path, "run", limit=2**20)
    assert len(drain(spool)) == 1
    spool.close()


def test_what_earlier_attempts_left_keeps_within_the_limit(open_spool: Opener, tmp_path: Path) -> None:
    """Many crashed attempts cannot fill the disk: beyond the limit the oldest segments go, counted."""
    for attempt in "abc":
        spool = open_spool(spool_folder(tmp_path, "run", attempt, "all"), segment=2**14)
        for seq in range(9):
            spool.append(seq, bytes(5000))
        spool.close()
    spools = adopt(tmp_path, "run", limit=70_000)
    assert sum(spool.size() for spool in spools) <= 70_000
    assert sum(spool.pending() + spool.lost["spool full"] for spool in spools) == 27
    assert spools[-1].pending() == 9
    for spool in spools:
        spool.close()


def test_an_emptied_spool_leaves_nothing_behind(open_spool: Opener, tmp_path: Path) -> None:
    """When all is acknowledged, closing removes the folders of the attempt and the run."""
    spool = open_spool(spool_folder(tmp_path, "run", "a", "all"))
    spool.append(0, b"x")
    drain(spool)
    spool.close()
    assert not run_folder(tmp_path, "run").exists()


@pytest.mark.parametrize("name", ["..", ".", "a/b", "a\\b", "50 %", "naïve"])
def test_any_name_is_one_folder_below_the_spool(tmp_path: Path, name: str) -> None:
    """A run's name cannot lead out of the spool, and different names never share a folder."""
    folder = run_folder(tmp_path, name)
    assert folder.parent == tmp_path
    assert folder.name not in (".", "..")
    assert folder != run_folder(tmp_path, name + "%2E")


def test_a_folder_that_cannot_be_made_degrades_to_memory(
    open_spool: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A spool below a file: said once, batches go on in memory, what does not fit is counted."""
    (tmp_path / "file").write_text("")
    spool = open_spool(tmp_path / "file" / "s", memory=12_000)
    for seq in range(4):
        spool.append(seq, bytes(5000))
    assert [record.seq for record in drain(spool)] == [2, 3]
    assert spool.lost == {"memory full": 2}
    assert caplog.text.count("cannot be used") == 1
    spool.close()


def test_what_may_be_on_its_way_is_not_counted_as_lost(open_spool: Opener, tmp_path: Path) -> None:
    """Memory is full while a request with its two oldest batches is under way: those stay until they are
    acknowledged, in order, and only what nobody has sent is dropped and counted."""
    (tmp_path / "file").touch()
    spool = open_spool(tmp_path / "file" / "s", memory=4_000)
    for seq in range(4):
        spool.append(seq, bytes(1_000))
    sent = spool.peek_many(2, 10_000)
    for seq in range(4, 8):
        spool.append(seq, bytes(1_000))
    assert spool.lost == {"memory full": 2}
    for record in sent:
        spool.ack(record)
    assert [record.seq for record in sent] == [0, 1]
    assert [record.seq for record in drain(spool)] == [4, 5, 6, 7]


def test_a_disk_that_fills_up_degrades_to_memory(
    open_spool: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No space left in the middle of a record: the record is kept in memory, nothing is lost or raised."""
    spool = open_spool(tmp_path / "s")
    spool.append(0, bytes(3000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))  # EFBIG: the disk takes 5000 bytes
        with caplog.at_level(logging.WARNING):
            spool.append(1, bytes(3000))
            spool.append(2, bytes(3000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert spool.trouble
    assert [record.seq for record in drain(spool)] == [0, 1, 2]
    assert not spool.lost
