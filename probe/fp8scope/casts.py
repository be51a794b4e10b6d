"""How a layer that quantizes by itself casts one operand of its GEMMs, as far as its library shows it."""

from typing import NamedTuple

from torch import Tensor

from fp8scope_protocol.formats import Format


class Cast(NamedTuple):
    """How one operand is cast."""

    element: Format
    scaling: str
    power_of_two: bool = False
    multiplier: Tensor | None = None
    """Under delayed scaling what x is multiplied by, one element, as its owner keeps it up to date."""

    @property
    def policy(self) -> str:
        """As in the series."""
        return "current" if self.multiplier is None else "delayed"

    def scales(self) -> Tensor | None:
        """What x is divided by now, [1, 1]; None where the tensor's own amax decides. Never waits."""
        return None if self.multiplier is None else self.multiplier.detach().float().reciprocal().view(1, 1)
