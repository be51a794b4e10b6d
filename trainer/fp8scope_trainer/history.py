"""Delayed scaling: the scale of a step comes from the amaxes of earlier steps.

    scale = max(history) / largest * 2^margin,  1 while the history is empty

largest: 448 of E4M3, 57344 of E5M2. `observe` merges the amax of every call of a step into `pending`;
`advance_histories`, at the step boundary, moves it into the ring. A recomputed forward therefore sees the
scale of its first run and leaves nothing behind that the first run did not.

Rejected: moving on with each call, which gives micro-batches and recomputation other scales than one large
batch would have.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8scope.quantize import scale_of
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, Format
from fp8scope_trainer.tensor import amax_of

LONGEST = 1024


class AmaxHistory(nn.Module):
    """A ring of `length` amaxes. Not part of the `state_dict`, whose keys stay those of `nn.Linear`."""

    amaxes: Tensor
    pending: Tensor

    def __init__(
        self, length: int = LONGEST, *, margin: int = 0, element: Format = E4M3,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= length <= LONGEST:
            raise Invalid("history_length", length, f"must be 1 to {LONGEST} steps")
        self.margin = margin
        self.element = element
        self.cursor = 0
        self.frozen = False
        """A stuck cache: amaxes are seen and thrown away. Set by fault drills."""
        self.register_buffer("amaxes", torch.zeros(length, device=device), persistent=False)
        self.register_buffer("pending", torch.zeros((), device=device), persistent=False)
        self._scale: tuple[Tensor, int, Tensor] | None = None
        """The ring, its version, and the scale that came from it."""

    def scale(self) -> Tensor:
        """fp32 [1, 1]; computed once as long as nothing is written into the ring."""
        ring = self.amaxes
        if self._scale is None or self._scale[0] is not ring or self._scale[1] != ring._version:
            amax = ring.amax()
            scale = scale_of(amax, self.element)
            scale = torch.where(amax > 0, scale * 2.0**self.margin, scale).view(1, 1)
            self._scale = ring, ring._version, scale
        return self._scale[2]

    def observe(self, x: Tensor) -> None:
        """Merges the largest |x|, unless x holds NaN or Inf."""
        self.merge(amax_of(x.detach()))

    def merge(self, amax: Tensor) -> None:
        """fp32 [1]; NaN leaves the step as it is: one Inf must not blind the scale for 1,024 steps."""
        torch.fmax(self.pending, amax.view(()), out=self.pending)

    def advance(self) -> None:
        """Moves the step's amax into the ring."""
        if not self.frozen:
            self.amaxes[self.cursor] = self.pending
            self.cursor = (self.cursor + 1) % self.amaxes.numel()
        self.pending.zero_()

    def __getstate__(self) -> dict[str, object]:
        """A copy computes its scale itself."""
        return self.__dict__ | {"_scale": None}


def advance_histories(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Ends the step for every history of `model`, on all ranks alike: call it after `optimizer.step()`.

    With a process group the amaxes are the maximum over its ranks: one collective of one number a history.
    """
    histories = [m for m in model.modules() if isinstance(m, AmaxHistory)]
    if not histories:
        return
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        merged = torch.stack([h.pending for h in histories])
        dist.all_reduce(merged, dist.ReduceOp.MAX, group=group)
        for history, amax in zip(histories, merged.unbind(), strict=True):
            history.pending = amax
    for history in histories:
        history.advance()
