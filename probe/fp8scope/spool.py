"""The spool: what was measured and not yet acknowledged, on disk.

    SPOOL/<run>/<attempt>/<producer>/00000000.f8ss, 00000001.f8ss, ...    folders 0700, files 0600

Every attempt has its own folder: a resumed run counts from seq 0 again and collides with nothing. Only
wholly acknowledged segments are deleted. There is no file of positions: after a crash a segment is sent
again from its start, and the collector knows a batch by (attempt, producer, seq).

Claims say that a living process writes the folder, or sends it (claim.py). What a dead one left is taken over
by `adopt`; what an offline job fills is sent by `fp8scope sync` (tail.py), which removes segments under the
writer's hands. A damaged record costs that record: reading goes on behind it.

The disk may fail, be full or vanish. Then the spool goes on in memory, within a limit, and every batch it
has to give up is counted by reason in `lost`; nothing is raised to the caller. Segments are flushed to the
device when they end: a killed process loses nothing, a power cut at most one segment.
"""

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from fp8scope.claim import SENDER, WRITER, claim, claimed, enter_order, in_use, place, remove_folder
from fp8scope.segment import (
    HEAD,
    MAGIC,
    SUFFIX,
    Kind,
    Record,
    Segment,
    SegmentReader,
    encode_record,
    run_folder,
    scan_segment,
    segment_paths,
)
from fp8scope_protocol.series import layout_id

LOG = logging.getLogger("fp8scope")

SEGMENT_BYTES = 16 * 2**20


class Spool:
    """First in, first out, across crashes. One thread appends, another one peeks and acknowledges.

    With `sends` False another process may send what is written here.
    """

    def __init__(
        self, folder: Path, *, limit: int, memory_limit: int, hello: bytes = b"",
        segment_bytes: int = SEGMENT_BYTES, sends: bool = True,
    ) -> None:
        self.folder = folder
        self.hello = hello
        self.layouts: dict[str, bytes] = {}
        """Layouts by id; that of every batch that `peek` returned is there."""
        self.lost: Counter[str] = Counter()
        self.trouble = ""
        """Why batches are kept in memory: the disk failed, or another process owns the folder."""
        self._limit = limit
        self._sends = sends
        self._memory_limit = memory_limit
        self._segment_bytes = min(segment_bytes, limit // 4)
        self._lock = threading.Lock()
        self._segments: deque[Segment] = deque()
        self._number = 0  # of the next segment
        self._claims: list[int] = []  # descriptors
        self._writer: FileIO | None = None
        self._reader: SegmentReader | None = None
        self._written: set[str] = set()  # layouts in the segment being written
        self._heads: deque[Record] = deque()  # read from the oldest segment, not acknowledged
        self._rescued: deque[Record] = deque()  # the same, of what a limit has removed since
        self._memory: deque[Record] = deque()
        self._lent = 0  # how many of `_memory` `peek` has returned
        self._memory_bytes = 0
        try:
            _make_folder(folder)
            self._claims.append(claim(folder, WRITER))
            if sends:
                self._claims.append(claim(folder, SENDER))
            enter_order(folder, self._claims[0])
            self._recover()
        except OSError as error:
            self._leave_disk(error)

    def append(self, seq: int, payload: bytes, layout: tuple[str, bytes] | None = None) -> None:
        """Keep a batch; `layout` is the id and bytes of the layout its planes name."""
        record = Record(Kind.BATCH, seq, payload)
        with self._lock:
            if layout is not None:
                self.layouts.setdefault(*layout)
            if not self.trouble:
                try:
                    self._write(record, layout)
                    return
                except OSError as error:
                    self._leave_disk(error)
            self._keep_in_memory(record)

    def peek(self) -> Record | None:
        """The oldest batch that is not acknowledged, or None."""
        return next(iter(self.peek_many(1, 0)), None)

    def peek_many(self, most: int, most_bytes: int) -> list[Record]:
        """The oldest batches that are not acknowledged: one if there is any, more within both limits."""
        with self._lock:
            while self._segments and not self._rescued:
                if self._segments[0].pending:
                    self._read(most, most_bytes)
                    if self._heads:
                        break
                elif len(self._segments) > 1:
                    self._remove(self._segments[0])
                else:
                    break
            source = self._rescued or self._heads or self._memory
            found = first_of(source, most, most_bytes)
            if source is self._memory:
                self._lent = max(self._lent, len(found))
            return found

    def ack(self, record: Record) -> None:
        """Forget `record`, the oldest that `peek` returned. Harmless when a limit dropped it meanwhile."""
        with self._lock:
            if self._rescued and self._rescued[0] is record:
                self._rescued.popleft()
            elif self._memory and self._memory[0] is record:
                self._memory_bytes -= len(self._memory.popleft().payload)
                self._lent = max(0, self._lent - 1)
            elif self._heads and self._heads[0] is record:
                self._heads.popleft()
                self._segments[0].pending -= 1

    def pending(self) -> int:
        """How many batches are not acknowledged."""
        with self._lock:
            self._forget_forwarded()
            return sum(segment.pending for segment in self._segments) + self.in_memory()

    def in_memory(self) -> int:
        """How many of them only this process has."""
        return len(self._memory) + len(self._rescued)

    def size(self) -> int:
        """Bytes on disk."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    def trim(self, limit: int) -> None:
        """Drop oldest segments, counted, until at most `limit` bytes are left."""
        with self._lock:
            self._drop_beyond(limit)

    def close(self) -> None:
        """Flush, let go of the folder, and remove what is wholly acknowledged."""
        with self._lock:
            self._end_segment()
            while self._segments and self._segments[0].pending == 0:
                self._remove(self._segments[0])
            self._end_reading()
            self._forget_forwarded()
            if self._claims and not self._segments and not self.trouble:
                remove_folder(self.folder)
            for descriptor in self._claims:
                os.close(descriptor)
            self._claims.clear()

    def _recover(self) -> None:
        """Take over segments that an earlier process left, without a torn last record."""
        last_seq, damaged = None, False
        for path in segment_paths(self.folder):
            self._number = int(path.stem) + 1
            scan = scan_segment(path, last_seq, damaged=damaged)
            last_seq, damaged = scan.last_seq, scan.torn
            self.hello = self.hello or scan.hello
            self.lost["unreadable"] += scan.unreadable
            if scan.torn:
                LOG.warning("fp8scope: %s ends in a torn record; it is cut off at byte %d", path, scan.size)
                os.truncate(path, scan.size)
            if scan.batches:
                self._segments.append(Segment(path, scan.size, scan.batches))
            else:
                path.unlink()
        self.lost["torn"] += damaged
        self.lost += Counter()  # without zeros

    def _write(self, record: Record, layout: tuple[str, bytes] | None) -> None:
        data = encode_record(record)
        announced = encode_record(Record(Kind.LAYOUT, 0, layout[1])) if layout is not None else b""
        size = len(announced) + len(data)
        if self._writer is None or self._segments[-1].size + size > self._segment_bytes:
            self._end_segment()
            if not self._make_room(size):
                self.lost["spool full"] += 1
                return
            self._begin_segment()
        if layout is not None and layout[0] not in self._written:
            data = announced + data
            self._written.add(layout[0])
        self._put(data)
        self._segments[-1].pending += 1

    def _put(self, data: bytes) -> None:
        """Write `data` wholly, or leave the segment as it was and raise."""
        assert self._writer is not None
        segment = self._segments[-1]
        try:
            if self._writer.write(data) != len(data):
                raise OSError("the disk took only a part of a record")
        except OSError:
            os.truncate(segment.path, segment.size)
            raise
        segment.size += len(data)

    def _begin_segment(self) -> None:
        path = self.folder / f"{self._number:08d}{SUFFIX}"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._writer = FileIO(handle, "wb")
        self._number += 1
        self._segments.append(Segment(path, 0, 0))
        self._written.clear()
        self._put(MAGIC + encode_record(Record(Kind.HELLO, 0, self.hello)))

    def _end_segment(self) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            with writer:
                os.fdatasync(writer.fileno())
        except OSError as error:
            LOG.warning("fp8scope: cannot flush the spool %s: %s", self.folder, error)

    def _make_room(self, size: int) -> bool:
        """Drop oldest segments until one with a record of `size` fits; False if it never will."""
        needed = max(size + len(self.hello) + len(MAGIC) + HEAD.size, self._segment_bytes)
        return needed <= self._limit and self._drop_beyond(self._limit - needed)

    def _forget_forwarded(self) -> None:
        """Segments that another process has sent and removed are neither there nor lost."""
        if not self._sends:
            self._segments = deque(segment for segment in self._segments if segment.path.exists())

    def _drop_beyond(self, limit: int) -> bool:
        """Drop the oldest segments until `limit` bytes are left, but none that another process is sending."""
        self._forget_forwarded()
        for segment in list(self._segments):
            if sum(segment.size for segment in self._segments) <= limit:
                break
            if not self._sends and in_use(segment.path):
                continue
            reading = segment is self._segments[0]
            if reading:  # they may be on their way already
                self._rescued.extend(self._heads)
            dropped = segment.pending - (len(self._heads) if reading else 0)
            if dropped and not self.lost["spool full"]:
                LOG.warning("fp8scope: the spool %s is full; its oldest batches are dropped", self.folder)
            self.lost["spool full"] += dropped
            self._remove(segment)
        return sum(segment.size for segment in self._segments) <= limit

    def _remove(self, segment: Segment) -> None:
        if segment is self._segments[0]:
            self._heads.clear()
            self._end_reading()
        self._segments.remove(segment)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            LOG.warning("fp8scope: cannot remove %s: %s", segment.path, error)

    def _read(self, most: int, most_bytes: int) -> None:
        """Read ahead in the oldest segment; what cannot be read there any more is given up, counted."""
        segment = self._segments[0]
        size = sum(len(record.payload) for record in self._heads)
        reason = ""
        try:
            while len(self._heads) < min(most, segment.pending) and (not self._heads or size < most_bytes):
                record = self._next(segment)
                if record is None:
                    reason = "the rest is damaged"
                    break
                self._heads.append(record)
                size += len(record.payload)
        except OSError as error:
            reason = str(error)
        if reason:
            lost = segment.pending - len(self._heads)
            LOG.warning("fp8scope: %d batches of %s are lost: %s", lost, segment.path, reason)
            self.lost["unreadable"] += lost
            segment.pending -= lost
            if segment is self._segments[-1]:
                self._end_segment()

    def _next(self, segment: Segment) -> Record | None:
        """The next batch of `segment`; layouts and hello on the way are kept."""
        if self._reader is None:
            self._reader = SegmentReader(segment.path)
        while (record := self._reader.read()) is not None or self._reader.skip():
            if record is None:
                LOG.warning("fp8scope: %s is damaged before byte %d", segment.path, self._reader.position())
            elif record.kind is Kind.BATCH:
                return record
            elif record.kind is Kind.HELLO:
                self.hello = record.payload
            else:
                self.layouts[layout_id(record.payload)] = record.payload
        return None

    def _end_reading(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _keep_in_memory(self, record: Record) -> None:
        self._memory.append(record)
        self._memory_bytes += len(record.payload)
        while self._memory_bytes > self._memory_limit:
            oldest = self._memory.popleft()
            self._memory_bytes -= len(oldest.payload)
            if self._lent:  # it may be on its way already
                self._lent -= 1
                self._rescued.append(oldest)
            else:
                self.lost["memory full"] += 1

    def _leave_disk(self, error: OSError) -> None:
        why = "another process writes it" if isinstance(error, BlockingIOError) else error.strerror or error
        self.trouble = (f"the spool {self.folder} cannot be used ({why}); "
                        f"up to {self._memory_limit} bytes are kept in memory instead")
        self._end_segment()
        LOG.warning("fp8scope: %s", self.trouble)


def first_of(records: Iterable[Record], most: int, most_bytes: int) -> list[Record]:
    """The first of `records`: one if there is any, more within both limits."""
    found: list[Record] = []
    for record in records:
        most_bytes -= len(record.payload)
        if found and (len(found) >= most or most_bytes < 0):
            break
        found.append(record)
    return found


def adopt(root: Path, run: str, *, limit: int) -> list[Spool]:
    """Spools of `run` that no living process works on, the oldest attempt first, within `limit` bytes."""
    folders = [path for path in run_folder(root, run).glob("*/*")
               if segment_paths(path) and not claimed(path, WRITER, SENDER)]
    spools = [Spool(path, limit=limit, memory_limit=0) for path in sorted(folders, key=place)]
    for spool in reversed(spools):
        spool.trim(limit)
        limit -= spool.size()
    return spools


def _make_folder(folder: Path) -> None:
    """SPOOL/run/attempt/producer, closed to others; what is above SPOOL is not ours to close."""
    own = (*reversed(folder.parents[:3]), folder)
    own[0].parent.mkdir(parents=True, exist_ok=True)
    for path in own:
        path.mkdir(mode=0o700, exist_ok=True)
