"""Several batches of one producer in one request, for a probe that has fallen behind.

    magic "F8SM" | u32 little-endian length | batch | u32 length | batch ...

An answer takes the collector about as long for thirty small batches as for one, so a probe whose steps are
quicker than answers keeps up by asking for fewer of them. Requests of a producer still follow each other:
with two under way the second might be stored first. A body that is one batch needs no bundle around it.
"""

import struct
from collections.abc import Sequence

from fp8scope_protocol.errors import BrokenMessage, TooLarge
from fp8scope_protocol.wire import MAX_BODY_BYTES, MAX_INFLATED_BYTES, Batch, decode_batch

MAGIC = b"F8SM"
MOST_BATCHES = 64
"""In one bundle."""
_LENGTH = struct.Struct("<I")


def join_batches(batches: Sequence[bytes]) -> bytes:
    """A request's body of encoded batches, in order."""
    if len(batches) == 1:
        return batches[0]
    return MAGIC + b"".join(_LENGTH.pack(len(batch)) + batch for batch in batches)


def decode_body(body: bytes) -> list[Batch]:
    """The batches of a request's body, one or a bundle; raises `BrokenMessage` or `TooLarge`.

    All are of one producer of one attempt, by ascending seq. The limits of a batch hold for all together.
    """
    if body[:len(MAGIC)] != MAGIC:
        return [decode_batch(body)]
    if len(body) > MAX_BODY_BYTES:
        raise TooLarge(f"a bundle of {len(body)} bytes is over the limit of {MAX_BODY_BYTES}; split it")
    batches: list[Batch] = []
    room = MAX_INFLATED_BYTES
    for data in _pieces(body):
        batch = decode_batch(data, most_inflated=room)
        room -= sum(array.nbytes for array in batch.arrays.values())
        if batches and not _follows(batch, batches[-1]):
            raise BrokenMessage("a bundle holds batches of one producer of one attempt, by ascending seq")
        batches.append(batch)
    return batches


def _pieces(body: bytes) -> list[bytes]:
    pieces = []
    start = len(MAGIC)
    while start < len(body):
        if start + _LENGTH.size > len(body):
            raise BrokenMessage(f"a bundle ends inside a length, at byte {len(body)}")
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size
        if start + length > len(body):
            raise BrokenMessage(f"a batch of a bundle is {length} bytes, {len(body) - start} are there")
        pieces.append(body[start:start + length])
        start += length
    if not 0 < len(pieces) <= MOST_BATCHES:
        raise BrokenMessage(f"a bundle of {len(pieces)} batches; 1 to {MOST_BATCHES} are accepted")
    return pieces


def _follows(batch: Batch, before: Batch) -> bool:
    one, two = before.header, batch.header
    return (one.attempt, one.producer) == (two.attempt, two.producer) and one.seq < two.seq
