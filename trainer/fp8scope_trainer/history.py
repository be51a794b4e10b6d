"""Delayed scaling: the scale of a step comes from the amaxes of earlier steps.

    scale = max(history) / largest * 2^margin,  1 while the history is empty

largest: 448 of E4M3, 57344 of E5M2. `observe` merges the amax of every call of a step into `pending`;
`advance_histories`, at the step boundary, moves it into the ring. A recomputed forward therefore sees the
scale of its first run and leaves nothing behind that the first run did not.

Rejected: moving on with each call, which gives micro-batches and recomputation other scales than one large
batch would have.
"""

from collections import defaultdict

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
            self.take(_scales(ring.amax().view(1), self.element, self.margin)[0])
            assert self._scale is not None
        return self._scale[2]

    def observe(self, x: Tensor) -> None:
        """Merges the largest |x|, unless x holds NaN or Inf."""
        self.merge(amax_of(x.detach()))

    def merge(self, amax: Tensor) -> None:
        """fp32 [1]; NaN leaves the step as it is: one Inf must not blind the scale for 1,024 steps."""
        torch.fmax(self.pending, amax.view(()), out=self.pending)

    def place(self) -> Tensor:
        """Where in the ring this step's amax goes, as a view of one element; the next step's is another."""
        here = self.amaxes[self.cursor]
        self.cursor = (self.cursor + 1) % self.amaxes.numel()
        return here

    def take(self, scale: Tensor) -> None:
        """fp32 [1, 1], of the ring as it is now."""
        self._scale = self.amaxes, self.amaxes._version, scale

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
    _advance([history for history in histories if not history.frozen])
    torch._foreach_zero_([history.pending for history in histories])


def _advance(histories: list[AmaxHistory]) -> None:
    """All of a kind together: one by one they would take twenty launches each."""
    kinds = defaultdict[tuple[object, ...], list[AmaxHistory]](list)
    for history in histories:
        kinds[history.amaxes.device, history.element, history.margin].append(history)
    for alike in kinds.values():
        torch._foreach_copy_([history.place() for history in alike], [history.pending for history in alike])
        largest = torch.stack(torch._foreach_max([history.amaxes for history in alike]))
        for history, scale in zip(alike, _scales(largest, alike[0].element, alike[0].margin), strict=True):
            history.take(scale)


def _scales(amaxes: Tensor, element: Format, margin: int) -> tuple[Tensor, ...]:
    """The scale [1, 1] of each of `amaxes` [N]."""
    scales = scale_of(amaxes, element)
    return torch.where(amaxes > 0, scales * 2.0**margin, scales).view(-1, 1, 1).unbind()
