"""Segment files: what a spool is made of.

A segment is the magic and a version byte, then records: length, CRC-32, kind, seq, payload. It begins with
the producer's hello, and a layout stands before the first batch that needs it, so each segment can be
forwarded without its neighbours. Reading goes on behind a damaged record, at the next with a right checksum.
"""

import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np

MAGIC = b"F8SS\x01"
HEAD = struct.Struct("<IIBQ")
"""Length of the payload, CRC-32 of kind, seq and payload, kind, seq."""
SUFFIX = ".f8ss"
LONGEST_COMPONENT = 200
"""Of a path, in bytes; file systems take 255. A name in Chinese has nine a character."""


class Kind(IntEnum):
    """What a record holds."""

    HELLO = 1
    LAYOUT = 2
    BATCH = 3


class Record(NamedTuple):
    """One entry of a segment; `seq` is 0 for a hello or a layout."""

    kind: Kind
    seq: int
    payload: bytes


@dataclass(slots=True)
class Segment:
    """A file of the spool: its size, and how many of its batches are not acknowledged."""

    path: Path
    size: int
    pending: int


def encode_record(record: Record) -> bytes:
    """The bytes of one record."""
    return HEAD.pack(len(record.payload), _checksum(record), record.kind, record.seq) + record.payload


class SegmentReader:
    """The records of one segment in order, also while another process still writes it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)  # what it saw at the end must not stay
        if self._file.read(len(MAGIC)) != MAGIC:
            self._file.seek(0)

    def read(self) -> Record | None:
        """The next record; None where there is none yet, and where the bytes are torn or damaged."""
        start = self._file.tell()
        record = self._record()
        if record is None:
            self._file.seek(start)
        return record

    def skip(self) -> bool:
        """Go on at the next readable record behind a damaged one; False if there is none."""
        start = self._file.tell()
        data = self._file.read()
        found = next((at for at in _likely(data) if _is_record(data, at)), None)
        self._file.seek(start if found is None else start + found)
        return found is not None

    def hold(self) -> None:
        """Keep the segment from being dropped for want of space, until it is closed."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def position(self) -> int:
        """Bytes read so far."""
        return self._file.tell()

    def at_end(self) -> bool:
        """True when nothing is behind the position, not even a part of a record."""
        return os.fstat(self._file.fileno()).st_size <= self._file.tell()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _record(self) -> Record | None:
        head = self._file.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        length, checksum, kind, seq = HEAD.unpack(head)
        if kind not in set(Kind) or length > os.fstat(self._file.fileno()).st_size - self._file.tell():
            return None
        record = Record(Kind(kind), seq, self._file.read(length))
        return record if _checksum(record) == checksum else None


def _likely(data: bytes) -> Iterator[int]:
    """Where in `data`, behind its first byte, a record may begin: a known kind, and a seq under 2^40."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if len(raw) < HEAD.size:
        return
    kinds, high = raw[8:len(raw) - 8], [raw[i:len(raw) - 16 + i] for i in (14, 15, 16)]
    likely = (kinds > 0) & (kinds <= max(Kind)) & (high[0] == 0) & (high[1] == 0) & (high[2] == 0)
    yield from (int(at) for at in np.flatnonzero(likely) if at > 0)


def _is_record(data: bytes, at: int) -> bool:
    length, checksum, kind, seq = HEAD.unpack_from(data, at)
    end = at + HEAD.size + length
    if end > len(data):
        return False
    return _checksum(Record(Kind(kind), seq, data[at + HEAD.size:end])) == int(checksum)


def _checksum(record: Record) -> int:
    return zlib.crc32(record.payload, zlib.crc32(struct.pack("<BQ", record.kind, record.seq)))


def segment_paths(folder: Path) -> list[Path]:
    """The segments of one producer, oldest first."""
    return sorted(folder.glob("[0-9]" * 8 + SUFFIX))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What a segment holds."""

    hello: bytes
    """Empty where it cannot be read."""
    batches: int
    """How many can be read."""
    last_seq: int | None
    """Of the last one; None before the first."""
    unreadable: int
    """Batches that the segment has lost, by the seqs that are missing around what is damaged."""
    torn: bool
    """Whether it ends in something that is no record."""
    size: int
    """Of its readable part, in bytes."""


def scan_segment(path: Path, last_seq: int | None = None, *, damaged: bool = False) -> Scan:
    """What is in a segment that nobody writes; the one before ended with `last_seq`, or `damaged`."""
    hello, batches, unreadable = b"", 0, 0
    last_seq = seq_before(path) if last_seq is None else last_seq
    reader = SegmentReader(path)
    try:
        while (record := reader.read()) is not None or reader.skip():
            if record is None:
                damaged = True
                continue
            if record.kind is Kind.HELLO:
                hello = record.payload
            elif record.kind is Kind.BATCH:
                if damaged:
                    unreadable += missing_between(last_seq, record.seq)
                batches, last_seq, damaged = batches + 1, record.seq, False
        return Scan(hello=hello, batches=batches, last_seq=last_seq, unreadable=unreadable,
                    torn=not reader.at_end(), size=reader.position())
    finally:
        reader.close()


def seq_before(path: Path) -> int | None:
    """The seq before the first one of a segment, where only its name is known: -1 for the first segment."""
    return -1 if int(path.stem) == 0 else None


def missing_between(last_seq: int | None, seq: int) -> int:
    """How many batches damage took between two that can be read; `last_seq` is None where none was before."""
    return 1 if last_seq is None else max(0, seq - last_seq - 1)


def run_folder(root: Path, run: str) -> Path:
    """Where the attempts of one run spool."""
    return root / _component(run)


def spool_folder(root: Path, run: str, attempt: str, producer: str) -> Path:
    """Where one producer of one attempt spools."""
    return run_folder(root, run) / _component(attempt) / _component(producer)


def _component(name: str) -> str:
    """`name` as one safe path component; different names stay different."""
    safe = quote(name, safe="").replace(".", "%2E")
    if len(safe) <= LONGEST_COMPONENT:
        return safe
    return f"{safe[:LONGEST_COMPONENT - 33]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
