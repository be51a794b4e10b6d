"""One optimizer step on local tensors: decode, update, encode. The plain-torch reference of the fused kernel.

`update` steps one parameter; `update_all` steps those of one call, which share rule, format, scalars and
dtypes. Everything is fp32 in between. A weight is stored

    fp32                  as it is
    16 bits, a master     rounded to nearest from the fp32 master, which is what moves
    bf16, no master       rounded by chance, so that a change below half a unit in the last place arrives in
                          the mean: at lr 1e-4, 0.31 of it arrives to nearest, all of it by chance

Of every step there is a row of five sums, from which the optimizer makes its `StepStats`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8scope_trainer.moments import Draw, Slots, Stored, decode, store
from fp8scope_trainer.place import Place
from fp8scope_trainer.rounding import round_bf16, upper
from fp8scope_trainer.rules import Moved, Rule, Scalars, move
from fp8scope_trainer.state_format import StateFormat

ROW = ("update_max", "lost", "clipped", "change_square", "weight_square")
"""Columns of a row: largest |u| before clipping; elements whose v is 0 where m is not; elements clipped;
sum (lr u)^2, clipped; sum w^2 before the step."""


@dataclass(kw_only=True, slots=True, eq=False)
class StepTensors:
    """What one step reads and writes of one parameter: this rank's part, seen as a matrix [R, C].

    From step to step only the gradient may be replaced."""

    weight: Tensor
    """[R, C], a view of the parameter where that is contiguous; fp32, bf16, or with a master fp16."""
    gradient: Tensor
    """fp32 or 16 bits, [R, C] or the same elements in another shape."""
    slots: Slots
    master: Tensor | None
    """fp32 [R, C]"""
    stream: int
    """The parameter's number in the optimizer."""
    first: int
    """Index of the first element in the whole tensor."""
    starts: Tensor | None = None
    """Of the first of each row, where not all elements follow one another; see `place.Place`."""


def update_all(
    tensors: Sequence[StepTensors], rule: Rule, format: StateFormat, by: Scalars,
    gradient_factor: Tensor | None = None, tables: dict[Any, Any] | None = None,
) -> list[Tensor]:
    """Steps all of them, of one device, in place; rows (see `ROW`), fp32 [5], of one or of several each.

    tables: what a caller keeps from step to step, see `step_table`; the codes do not depend on it.
    """
    device = tensors[0].weight.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        from fp8scope_trainer import step_table

        return step_table.update_all(tensors, rule, format, by, gradient_factor,
                                     {} if tables is None else tables)
    return [update(one, rule, format, by, gradient_factor)[0] for one in tensors]


def update(
    tensors: StepTensors, rule: Rule, format: StateFormat, by: Scalars, gradient_factor: Tensor | None = None
) -> tuple[Tensor, tuple[Stored, ...]]:
    """Steps one parameter in place: its row, fp32 [5], and what was stored of its moments.

    gradient_factor: fp32 [] or [1]; what the gradient is multiplied by first.
    """
    gradient = tensors.gradient.reshape(tensors.weight.shape).float()
    if gradient_factor is not None:
        gradient = gradient * gradient_factor
    weight = tensors.weight.float() if tensors.master is None else tensors.master
    old = decode(tensors.slots, format, weight.shape[1])
    moved = move(rule, weight, gradient, *old, by)
    row = _row(weight, moved, by)
    draw = Draw(seed=by.seed, step=by.step, stream=tensors.stream,
                place=Place(tensors.first, tensors.starts))
    stored = store(tensors.slots, moved.moments, rule, format, draw)
    if tensors.master is not None:
        tensors.master.copy_(moved.weight)
    elif tensors.weight.dtype == torch.bfloat16:
        tensors.weight.copy_(round_bf16(moved.weight, upper(draw.bits(weight, weight=True))))
        return row, stored
    tensors.weight.copy_(moved.weight)
    return row, stored


def _row(weight: Tensor, moved: Moved, by: Scalars) -> Tensor:
    if not weight.numel():
        return torch.zeros(len(ROW), device=weight.device)
    size = moved.direction.abs()
    lost = weight.new_zeros(())
    signed, square = moved.moments
    if signed is not None and square is not None:
        lost = ((square == 0) & (signed != 0)).sum().float()
    return torch.stack((
        size.amax(), lost, (size > by.clip).sum().float(),
        size.clamp(max=by.clip).square().sum() * by.lr**2, weight.square().sum(),
    ))
