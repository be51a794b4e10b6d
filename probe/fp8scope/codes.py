"""States as other libraries store them: codes, what they mean, and a scale for each run of elements.

    d = values[code] * scale[index // block]          of the flattened state

No library is imported: its states are told by their documented attributes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8scope.quantize import decode


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Codes:
    """One stored moment, this rank's part."""

    codes: Tensor
    """One byte an element, in the order of the flattened state; two elements a byte where `packed`."""
    scales: Tensor
    """fp32 [ceil(elements / block)]"""
    block: int
    values: Tensor | None
    """What each code means over its scale, fp32 [256] or [16]; None where codes are floats themselves."""
    packed: bool = False
    """The element with the even index is in the upper four bits."""
    empty_scale: float = 0.0
    """Largest scale that a block of zeros may have."""
    format: str
    """Name in `formats.FORMATS`."""

    @property
    def scaling(self) -> str:
        return f"flat {self.block}"

    def quotients(self, at: Tensor) -> Tensor:
        """y = d / scale at flat indices int64 [n], fp32."""
        flat = self.codes.reshape(-1)
        if self.values is None:
            return decode(flat.view(torch.uint8)[at].view(self.codes.dtype))
        if not self.packed:
            return self.values[flat[at].long()]
        byte = flat[at // 2].long()
        return self.values[torch.where(at % 2 == 0, byte >> 4, byte & 15)]

    def decoded(self, at: Tensor) -> Tensor:
        """d at flat indices int64 [n], fp32."""
        return self.quotients(at) * self.scales[at // self.block]
