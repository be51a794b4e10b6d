"""The wire: what goes in comes out to the bit, and nothing else comes in."""

import struct

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from fp8scope_protocol import wire
from fp8scope_protocol.errors import BrokenMessage, Invalid, TooLarge


def _batch(**header: object) -> wire.Batch:
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "elements": np.array([1, 2**63, 0], dtype="<u8"),
        "amax": np.array([np.nan, np.inf, wire.MISSING], dtype="<f4"),
        "exponent_histogram": np.arange(120, dtype="<u8").reshape(40, 3),
    }
    plain = wire.BatchHeader(run="r", attempt="a", producer="p", seq=1, step=2, layout="x" * 32, columns=3,
                             planes=wire.planes_of(arrays), sentinels={"loss": float("nan"), "lr": 1e-3})
    return wire.Batch(header=msgspec.structs.replace(plain, **header), arrays=arrays)


def test_round_trip_keeps_every_bit() -> None:
    """NaN, Inf, "not measured" and counts beyond 2^53 survive."""
    batch = _batch()
    back = wire.decode_batch(wire.encode_batch(batch))
    for key, array in batch.arrays.items():
        assert back.arrays[key].tobytes() == array.tobytes()
    assert wire.is_missing(back.arrays["amax"][0]).tolist() == [False, False, True]
    assert np.isnan(back.header.sentinels["loss"])


def test_a_step_without_planes() -> None:
    """Off the cadence a batch is its header."""
    header = wire.BatchHeader(run="r", attempt="a", producer="p", seq=0, step=0, sentinels={"loss": 1.5})
    back = wire.decode_batch(wire.encode_batch(wire.Batch(header=header, arrays={})))
    assert back.header == header
    assert back.arrays == {}


@pytest.mark.parametrize("cut", [0, 3, 7, 20, -1])
def test_a_cut_body_is_broken(cut: int) -> None:
    """A message that ends early is refused, wherever it was cut."""
    with pytest.raises(BrokenMessage):
        wire.decode_batch(wire.encode_batch(_batch())[:cut])


def test_wrong_magic_version_and_negative_numbers() -> None:
    """Each refusal says what it found."""
    good = wire.encode_batch(_batch())
    with pytest.raises(BrokenMessage, match="begins with"):
        wire.decode_batch(b"HTTP" + good[4:])
    with pytest.raises(BrokenMessage, match="wire version 9"):
        wire.decode_batch(wire.encode_batch(_batch(version=9)))
    with pytest.raises(BrokenMessage, match="none may be negative"):
        wire.decode_batch(wire.encode_batch(_batch(step=-1)))


def test_a_zip_bomb_is_refused_before_it_inflates() -> None:
    """The declared size decides, and a frame that holds more than declared is refused too."""
    huge = wire.BatchHeader(run="r", attempt="a", producer="p", seq=0, step=0, layout="x", columns=2**28,
                            planes=(wire.Plane(key="amax", type="f4"),))
    head = msgspec.msgpack.encode(huge)
    with pytest.raises(TooLarge, match="inflate"):
        wire.decode_batch(wire.MAGIC + struct.pack("<I", len(head)) + head)
    small = msgspec.structs.replace(huge, columns=4)
    head = msgspec.msgpack.encode(small)
    bomb = zstandard.ZstdCompressor().compress(bytes(2**26))
    with pytest.raises(BrokenMessage, match="more are there"):
        wire.decode_batch(wire.MAGIC + struct.pack("<I", len(head)) + head + bomb)


def test_planes_must_be_counts_or_values() -> None:
    """float64 does not travel by accident."""
    with pytest.raises(Invalid, match="float64"):
        wire.planes_of({"amax": np.zeros(3)})
