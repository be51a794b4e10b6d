"""Round trips of many tensors at once: weights of a measured step, states of a detailed one.

In plain torch, one after the other; the reference of `batch_kernel`, which takes two launches for all of one
kind. Second moments are measured as their square root, in fp32.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fp8scope.roundtrip import round_trip
from fp8scope.sums import RowSums
from fp8scope_protocol.formats import Format


class Trip(NamedTuple):
    """One tensor, and the row to which its round trip with current scales is added."""

    x: Tensor
    """[R, C], on the device of the row."""
    element: Format
    scaling: str
    row: RowSums
    root: bool = False
    """Whether the square root of x is measured."""
    power_of_two: bool = False
    """See `roundtrip.round_trip`."""

    @property
    def operand(self) -> Tensor:
        """What is measured, as a tensor: x, or its square root in fp32."""
        return self.x.float().sqrt() if self.root else self.x


def round_trips(trips: Sequence[Trip], *, histogram: bool) -> None:
    """Adds every round trip to its row; see `roundtrip.round_trip`."""
    for trip in trips:
        round_trip(trip.operand, trip.element, trip.scaling, power_of_two=trip.power_of_two,
                   histogram=histogram, out=trip.row)
