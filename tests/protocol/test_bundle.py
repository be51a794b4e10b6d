"""Several batches in one body."""

import numpy as np
import pytest

from fp8scope_protocol import bundle
from fp8scope_protocol.errors import BrokenMessage, TooLarge
from fp8scope_protocol.wire import MAX_INFLATED_BYTES, Batch, BatchHeader, encode_batch, planes_of


def encoded(seq: int, *, producer: str = "all", columns: int = 3) -> bytes:
    arrays = {"amax": np.full(columns, seq, dtype="<f4")}
    header = BatchHeader(run="r", attempt="a", producer=producer, seq=seq, step=10 * seq, layout="x",
                         columns=columns, planes=planes_of(arrays))
    return encode_batch(Batch(header=header, arrays=arrays))


@pytest.mark.parametrize("count", [1, 2, bundle.MOST_BATCHES])
def test_what_goes_in_comes_out(count: int) -> None:
    """All batches, in order, with their values; one batch travels as it is."""
    bodies = [encoded(seq) for seq in range(count)]
    body = bundle.join_batches(bodies)
    found = bundle.decode_body(body)
    assert [batch.header.step for batch in found] == [10 * seq for seq in range(count)]
    assert [batch.arrays["amax"][0, 0] for batch in found] == list(range(count))
    assert (body == bodies[0]) == (count == 1)


def test_a_bundle_cut_anywhere_is_broken() -> None:
    """No prefix of a bundle is taken for a shorter one, but where a batch ends."""
    bodies = [encoded(0), encoded(1)]
    body = bundle.join_batches(bodies)
    whole = len(bundle.MAGIC) + 4 + len(bodies[0])
    for size in range(len(body)):
        if size != whole:
            with pytest.raises(BrokenMessage):
                bundle.decode_body(body[:size])


@pytest.mark.parametrize("second", [encoded(0), encoded(2, producer="other")])
def test_a_bundle_is_of_one_producer_in_order(second: bytes) -> None:
    """The same batch twice, an earlier one, or another producer's do not belong together."""
    with pytest.raises(BrokenMessage, match="one producer"):
        bundle.decode_body(bundle.join_batches([encoded(1), second]))


def test_too_many_or_too_much_is_refused() -> None:
    """The limits of one body hold for all its batches together."""
    with pytest.raises(BrokenMessage, match="65 batches"):
        bundle.decode_body(bundle.join_batches([encoded(seq) for seq in range(65)]))
    third = MAX_INFLATED_BYTES // 4 // 3
    bodies = [encoded(seq, columns=third) for seq in range(4)]
    assert len(bundle.decode_body(bundle.join_batches(bodies[:3]))) == 3
    with pytest.raises(TooLarge, match="inflate"):
        bundle.decode_body(bundle.join_batches(bodies))
