"""Messages from a probe to the collector.

    Hello    opens an attempt: who measures, what it watches, what it cannot watch
    Layout   the ordered series of later matrices (series.py)
    Batch    one step of one producer: a header, and on sampled steps one matrix plane per metric

A batch on the wire is

    magic "F8SB" | u32 little-endian header length | header, msgpack | zstd(plane, plane, ...)

Plane i holds `rows x columns` little-endian numbers, `u8` (uint64) for counts and `f4` (float32) for
values; `columns` is the number of series of the layout. A value that was not measured is the NaN with
the bits MISSING_BITS, so that a NaN of the training run stays a NaN, to the bit. JSON was rejected: it
cannot carry NaN and costs 150x the time of this (0.01 against 1.5 ms a step of 36,000 values).
"""

import struct
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from fp8scope_protocol.commands import CommandReport
from fp8scope_protocol.errors import BrokenMessage, Invalid, TooLarge

VERSION = 1
MAGIC = b"F8SB"
MAX_BODY_BYTES = 16 * 2**20
"""Largest request body, compressed."""
MAX_INFLATED_BYTES = 64 * 2**20
"""Largest matrix after decompression; a body that would inflate beyond it is refused unread."""
MAX_STEP_BYTES = 256 * 2**20
"""Largest batch that may come in parts, compressed and inflated."""

MISSING_BITS = np.uint32(0x7FC0F850)
MISSING = np.array([MISSING_BITS], dtype="<u4").view("<f4")[0]
"""A float32 that says "not measured". Compare bits (`is_missing`), never values."""

RUN_LIMIT = 128
"""Longest name of a run, in characters."""

PlaneType = Literal["u8", "f4"]


class Unobserved(msgspec.Struct, frozen=True, kw_only=True):
    """Something a user would expect to see measured that is not, and why."""

    name: str
    reason: str


class ModulePrecision(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer really runs in, and why if that is not what was asked for."""

    name: str
    precision: str
    switchable: bool = False
    reason: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Opens an attempt, once per producer.

    A collector that meets an unknown `attempt` starts a new run called `run`, or, with `resume`, a new
    attempt of the newest run of that name.
    """

    version: int = VERSION
    run: str
    attempt: str
    producer: str
    resume: bool = False
    world_size: int = 1
    every: int = 1
    """Steps between two full measurements."""
    remote_control: bool = False
    started_ns: int = 0
    """Sender's clock, Unix nanoseconds; data, never used for ordering."""
    host: str = ""
    precision: tuple[ModulePrecision, ...] = ()
    unobserved: tuple[Unobserved, ...] = ()
    facts: dict[str, str] = {}
    """Free text about the run: versions, model size, optimizer."""


class ProbeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in the training process at a step."""

    kind: str
    step: int
    name: str = ""
    text: str = ""


class Plane(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of a batch: its key, element type and rows (1, or HISTOGRAM_BINS)."""

    key: str
    type: PlaneType
    rows: int = 1


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What one producer has to say about one step. Its key is (attempt, producer, seq)."""

    version: int = VERSION
    run: str
    attempt: str
    producer: str
    seq: int
    step: int
    sent_ns: int = 0
    skipped: bool = False
    """True when the optimizer skipped the step (gradient scaler found a non-finite value)."""
    sentinels: dict[str, float] = {}
    lost: dict[str, int] = {}
    """Batches this producer lost so far in this attempt, by reason."""
    events: tuple[ProbeEvent, ...] = ()
    reports: tuple[CommandReport, ...] = ()
    layout: str | None = None
    """Id of the layout of the planes; None on steps without full metrics."""
    columns: int = 0
    planes: tuple[Plane, ...] = ()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A header and its planes, by metric key; each array has shape [rows, columns]."""

    header: BatchHeader
    arrays: dict[str, npt.NDArray[np.generic]]


class IngestReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a stored batch. `commands` > 0 tells the probe to fetch commands now."""

    acked_seq: int
    run: str
    duplicate: bool = False
    commands: int = 0
    """Highest command id of the run that is waiting for this attempt; 0 when there is none."""
    alert: bool = False
    """Whether a rule holds a layer of the run out of FP8; then the probe does not measure less often."""


_DTYPES: dict[str, np.dtype[np.generic]] = {"u8": np.dtype("<u8"), "f4": np.dtype("<f4")}


def is_missing(values: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """True where a float32 array says "not measured"; all False for counts."""
    if values.dtype != np.dtype("<f4"):
        return np.zeros(values.shape, dtype=np.bool_)
    bits: npt.NDArray[np.uint32] = np.ascontiguousarray(values).view("<u4")
    return np.equal(bits, MISSING_BITS)


def planes_of(arrays: dict[str, npt.NDArray[np.generic]]) -> tuple[Plane, ...]:
    """Plane descriptions of `arrays` ([columns] or [rows, columns]; uint64 or float32)."""
    planes = []
    for key, array in arrays.items():
        if array.dtype not in (np.dtype("<u8"), np.dtype("<f4")):
            raise Invalid("dtype", str(array.dtype), f"plane {key} must be uint64 or float32")
        kind: PlaneType = "u8" if array.dtype == np.dtype("<u8") else "f4"
        planes.append(Plane(key=key, type=kind, rows=1 if array.ndim == 1 else array.shape[0]))
    return tuple(planes)


def encode_batch(batch: Batch, *, level: int = 1) -> bytes:
    """The bytes of `batch`; header.planes and header.columns must describe `batch.arrays`."""
    header = batch.header
    parts = []
    for plane in header.planes:
        array = np.ascontiguousarray(batch.arrays[plane.key], dtype=_DTYPES[plane.type])
        if array.size != plane.rows * header.columns:
            raise Invalid("size", array.size, f"plane {plane.key} must hold {plane.rows} x {header.columns}")
        parts.append(array.tobytes())
    head = msgspec.msgpack.encode(header)
    body = zstandard.ZstdCompressor(level=level).compress(b"".join(parts)) if parts else b""
    return MAGIC + struct.pack("<I", len(head)) + head + body


def decode_header(data: bytes, *, most_bytes: int = MAX_BODY_BYTES) -> tuple[BatchHeader, int]:
    """The header of an encoded batch and the offset of its planes."""
    if len(data) > most_bytes:
        raise TooLarge(f"a batch of {len(data)} bytes is over the limit of {most_bytes}; send it in parts")
    if data[:4] != MAGIC or len(data) < 8:
        raise BrokenMessage(f"a batch begins with {MAGIC!r}, this begins with {data[:4]!r}")
    (length,) = struct.unpack_from("<I", data, 4)
    if 8 + length > len(data):
        raise BrokenMessage(f"the header says {length} bytes, {len(data) - 8} are there")
    try:
        header = msgspec.msgpack.decode(data[8:8 + length], type=BatchHeader)
    except (msgspec.DecodeError, ValueError) as error:
        raise BrokenMessage(f"the header is not a batch header: {error}") from None
    if header.version != VERSION:
        raise BrokenMessage(f"wire version {header.version}; this collector reads {VERSION}")
    if header.step < 0 or header.seq < 0 or header.columns < 0:
        numbers = f"step {header.step}, seq {header.seq}, columns {header.columns}"
        raise BrokenMessage(f"{numbers}: none may be negative")
    if (header.layout is None) != (not header.planes):
        raise BrokenMessage("a batch names a layout exactly when it has planes")
    return header, 8 + length


def decode_batch(
    data: bytes, *, most_bytes: int = MAX_BODY_BYTES, most_inflated: int = MAX_INFLATED_BYTES
) -> Batch:
    """Inverse of `encode_batch`; raises `BrokenMessage` or `TooLarge`, never anything else."""
    header, offset = decode_header(data, most_bytes=most_bytes)
    sizes = []
    for plane in header.planes:
        if not 0 < plane.rows <= 1024 or len(plane.key) > 64:
            raise BrokenMessage(f"plane {plane.key[:64]!r} has {plane.rows} rows; 1 to 1024 are accepted")
        sizes.append(plane.rows * header.columns * _DTYPES[plane.type].itemsize)
    total = sum(sizes)
    if total > most_inflated:
        raise TooLarge(f"the planes inflate to {total} bytes; the limit is {most_inflated}")
    raw = _inflate(data[offset:], total) if header.planes else b""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    start = 0
    for plane, size in zip(header.planes, sizes, strict=True):
        flat = np.frombuffer(raw, dtype=_DTYPES[plane.type], count=plane.rows * header.columns, offset=start)
        if plane.key in arrays:
            raise BrokenMessage(f"plane {plane.key!r} is there twice")
        arrays[plane.key] = flat.reshape(plane.rows, header.columns)
        start += size
    return Batch(header=header, arrays=arrays)


def _inflate(data: bytes, expected: int) -> bytes:
    """Decompress exactly `expected` bytes. Reads one byte more at most, whatever the frame declares."""
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(data) as reader:
            raw = reader.read(expected + 1)
    except zstandard.ZstdError as error:
        raise BrokenMessage(f"the planes do not decompress: {error}") from None
    if len(raw) != expected:
        more = "more" if len(raw) > expected else f"{len(raw)}"
        raise BrokenMessage(f"the planes must hold {expected} bytes, {more} are there")
    return raw


def check_run(name: str) -> str:
    """`name` if it can name a run; it is part of addresses, so it has no slash and is not a dot or two."""
    if not isinstance(name, str) or not 0 < len(name) <= RUN_LIMIT or not name.isprintable():
        raise Invalid("run", name, f"must be 1 to {RUN_LIMIT} printable characters")
    if "/" in name or name in (".", ".."):
        raise Invalid("run", name, "must be usable in an address: no /, and not . or ..")
    return name


def encode_hello(hello: Hello) -> bytes:
    """msgpack bytes of `hello`."""
    return msgspec.msgpack.encode(hello)


def decode_hello(data: bytes) -> Hello:
    """Inverse of `encode_hello`; raises `BrokenMessage`."""
    try:
        hello = msgspec.msgpack.decode(data, type=Hello)
    except (msgspec.DecodeError, ValueError) as error:
        raise BrokenMessage(f"not a hello: {error}") from None
    if hello.version != VERSION:
        raise BrokenMessage(f"wire version {hello.version}; this collector reads {VERSION}")
    return hello
