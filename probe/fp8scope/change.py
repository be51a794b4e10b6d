"""What an optimizer's step did to the sampled weights, part by part, from what is there when it is done.

In plain torch, for any state that can be read: the reference of `change_kernel`, which reads weights and
moments in place where this brings copies of the sample together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope.adam import AdamForm, steps_of
from fp8scope.quantize import decode
from fp8scope.sample import Sample
from fp8scope.sharding import local
from fp8scope.stored import State, read_moments


class Change(NamedTuple):
    """Of the taken elements of each part, float64 [P] each. u is the direction of the step, in units of lr.

    The last three, if weights before the step are known (else zeros): the change that was wanted, the one
    that was got and what was missed of it, in units of lr too, so that squares stay near 1.
    """

    largest: Tensor
    """Largest |u|; NaN if one is."""
    update2: Tensor
    """Sum of u^2."""
    weight2: Tensor
    """Sum of squares of the weights."""
    vanished: Tensor
    """How many second moments are zero where the first is not."""
    wanted2: Tensor
    got2: Tensor
    missed2: Tensor


def change(sample: Sample, form: AdamForm, states: Sequence[State], before: Tensor | None) -> Change:
    """The change of `sample`, given the state of each part and `Sample.gather` of its weights before."""
    m, v = read_moments(sample, states)
    vanished = sample.sums((v == 0) & (m != 0))
    u = form.direction(sample, m, v, steps_of(states, sample.device))
    del m, v
    largest = torch.segment_reduce(u.abs(), "max", lengths=sample.lengths, unsafe=True).double()
    update2 = sample.squares(u)
    now = weights_of(sample)
    weight2 = sample.squares(now)
    if before is None:
        return Change(largest, update2, weight2, vanished, *[torch.zeros_like(vanished)] * 3)
    was = in_fp32(before, sample.dtype)
    got = (was - now).div_(form.lr)
    del now
    if form.decoupled:
        u.add_(was * form.weight_decay)
    del was
    return Change(largest, update2, weight2, vanished, *update_sums(sample, u, got).values())


def update_sums(sample: Sample, wanted: Tensor, got: Tensor) -> dict[str, Tensor]:
    """Columns of `sums.SUM_COLUMNS`, [P] each: of a step that was wanted and the one that was got, which is
    used up."""
    return {"wanted2": sample.squares(wanted), "got2": sample.squares(got),
            "missed2": sample.squares(got.sub_(wanted))}


def weights_of(sample: Sample) -> Tensor:
    """The weights as they are, fp32 [elements]."""
    return in_fp32(stored_weights_of(sample), sample.dtype)


def stored_weights_of(sample: Sample) -> Tensor:
    """The weights as they are stored, codes of one byte as uint8, which can be moved about."""
    return sample.gather([as_bytes(local(part.parameter)) for part in sample.parts])


def as_bytes(x: Tensor) -> Tensor:
    """Codes of one byte as uint8; all else as it is."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def in_fp32(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `as_bytes`, decoded."""
    return decode(x.view(dtype)) if x.dtype == torch.uint8 else x.float()
