"""A tail: the batches of a spool that another process fills, or filled, in order and as they come.

The writer appends to its newest segment only, so what is behind that, and everything once the writer is gone,
is complete. A record at the very end that cannot be read yet is waited for. Segments are removed once all of
their batches are acknowledged; the newest one only after its writer. Nothing is ever written into a segment.

That the writer is gone is seen by its claim. File systems exist on which another node's claim is not seen, so
a claim of another node that seems free counts as given up only after a minute without a write, measured on
the file server's own clock.
"""

import logging
import os
import socket
from collections import Counter, deque
from pathlib import Path

import msgspec

from fp8scope.claim import SENDER, WRITER, claim, remove_folder
from fp8scope.segment import Kind, Record, SegmentReader, missing_between, segment_paths, seq_before
from fp8scope.spool import first_of
from fp8scope_protocol.errors import BrokenMessage
from fp8scope_protocol.series import layout_id
from fp8scope_protocol.wire import decode_hello

LOG = logging.getLogger("fp8scope")

QUIET_SECONDS = 60.0
"""Without a write, before the writer on another node counts as gone."""


class Tail:
    """One producer's spool, for whoever sends it; `BlockingIOError` if another process does so already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hello = b""
        self.layouts: dict[str, bytes] = {}
        self.lost: Counter[str] = Counter()
        self.ended = False
        """True once the writer is gone and everything was acknowledged."""
        self._claims = [claim(folder, SENDER)]
        self._path: Path | None = None  # of the segment being read
        self._reader: SegmentReader | None = None
        self._heads: deque[Record] = deque()
        self._last_seq: int | None = None
        self._damaged = False  # since the last batch that could be read

    def peek_many(self, most: int, most_bytes: int) -> list[Record]:
        """The oldest batches that are not acknowledged: one if there is any, more within both limits."""
        size = sum(len(record.payload) for record in self._heads)
        while len(self._heads) < most and (not self._heads or size < most_bytes):
            record = self._next()
            if record is None:
                break
            self._heads.append(record)
            size += len(record.payload)
        return first_of(self._heads, most, most_bytes)

    def ack(self, record: Record) -> None:
        """Forget `record`, the oldest that `peek_many` returned."""
        assert self._heads.popleft() is record

    def living(self) -> bool:
        """Whether a process may still write here."""
        return len(self._claims) == 1 and not self._take_over()

    def size(self) -> int:
        """Bytes that are not read yet."""
        newer = (path for path in segment_paths(self.folder) if self._path is None or path > self._path)
        rest = 0 if self._path is None or self._reader is None else (
            self._path.stat().st_size - self._reader.position() if self._path.exists() else 0)
        return rest + sum(path.stat().st_size for path in newer if path.exists())

    def close(self) -> None:
        """Let go of the folder; remove it when nothing is left to come."""
        self._end_reading()
        if self.ended:
            remove_folder(self.folder)
        for descriptor in self._claims:
            os.close(descriptor)
        self._claims.clear()

    def _next(self) -> Record | None:
        """The next batch that can be read now; steps on to the next segment, or to the end."""
        while True:
            living = self.living()  # before reading: what was written by then is seen
            newest = not self._later()
            if self._reader is None:
                if newest:
                    self.ended = not living
                    return None
                self._begin_reading()
                continue
            record = self._read(self._reader)
            if record is not None or self._heads or (newest and living):
                return record
            self._finish(newest)

    def _read(self, reader: SegmentReader) -> Record | None:
        """The next batch of this segment; hello and layouts on the way are kept."""
        while (record := reader.read()) is not None or reader.skip():
            if record is None:
                LOG.warning("fp8scope: %s is damaged before byte %d", self._path, reader.position())
                self._damaged = True
            elif record.kind is Kind.HELLO:
                self.hello = record.payload
            elif record.kind is Kind.LAYOUT:
                self.layouts[layout_id(record.payload)] = record.payload
            else:
                self._account(record.seq)
                return record
        return None

    def _account(self, seq: int) -> None:
        if self._damaged and (missing := missing_between(self._last_seq, seq)):
            self.lost["unreadable"] += missing
        self._last_seq, self._damaged = seq, False

    def _later(self) -> list[Path]:
        return [path for path in segment_paths(self.folder) if self._path is None or path > self._path]

    def _begin_reading(self) -> None:
        path = self._later()[0]
        if self._path is None:
            self._last_seq = seq_before(path)
        self._path = path
        try:
            reader = SegmentReader(path)
            reader.hold()
        except FileNotFoundError:  # its writer needed the space, and counted it
            return
        if path.exists():
            self._reader = reader
        else:
            reader.close()

    def _finish(self, newest: bool) -> None:
        """This segment is read and acknowledged to its end."""
        assert self._reader is not None
        assert self._path is not None
        if not self._reader.at_end():
            LOG.warning("fp8scope: %s ends in a torn record", self._path)
            self._damaged = True
        if newest and self._damaged:
            self.lost["torn"] += 1
        self._end_reading()
        self._path.unlink(missing_ok=True)

    def _end_reading(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _take_over(self) -> bool:
        """Whether the writer is gone; its claim is then ours."""
        try:
            descriptor = claim(self.folder, WRITER)
        except BlockingIOError:
            return False
        if self._written_here() or self._quiet():
            self._claims.append(descriptor)
            return True
        os.close(descriptor)
        return False

    def _written_here(self) -> bool:
        try:
            return decode_hello(self.hello).host == socket.gethostname()
        except (BrokenMessage, msgspec.DecodeError):
            return False

    def _quiet(self) -> bool:
        """Whether nothing was written for a while, by the clock of whoever keeps the files."""
        mark = self.folder / SENDER
        os.utime(mark)
        written = max((path.stat().st_mtime for path in segment_paths(self.folder)), default=0.0)
        return mark.stat().st_mtime - written > QUIET_SECONDS
