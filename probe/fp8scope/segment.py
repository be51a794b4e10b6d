"""Segment files: what a spool is made of.

A segment is the magic and a version byte, then records: length, CRC-32, kind, seq, payload. It begins with
the producer's hello, and a layout stands before the first batch that needs it, so each segment can be
forwarded without its neighbours.
"""

import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

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


def read_record(file: BufferedReader) -> Record | None:
    """The record at the file's position; None at the end and where the bytes are torn or damaged."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    length, checksum, kind, seq = HEAD.unpack(head)
    if kind not in set(Kind) or length > os.fstat(file.fileno()).st_size - file.tell():
        return None
    record = Record(Kind(kind), seq, file.read(length))
    return record if _checksum(record) == checksum else None


def _checksum(record: Record) -> int:
    return zlib.crc32(record.payload, zlib.crc32(struct.pack("<BQ", record.kind, record.seq)))


def segment_paths(folder: Path) -> list[Path]:
    """The segments of one producer, oldest first."""
    return sorted(folder.glob("[0-9]" * 8 + SUFFIX))


def scan_segment(path: Path) -> tuple[int, int]:
    """How many batches a segment holds, and the length of its readable part."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return 0, 0
        batches, good = 0, len(MAGIC)
        while (record := read_record(file)) is not None:
            batches += record.kind is Kind.BATCH
            good = file.tell()
        return batches, good


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
