"""Where the tensors of many parameters lie, on their device, and the launch of `step_kernel` for all of them.

A table stays there for as long as addresses stay. Gradients come and go with every step and have a row of
their own, uploaded when it has changed: a copy of 8 bytes a parameter that nothing waits for.

A parameter whose columns are cut over ranks has a line for each of its rows: the kernel numbers the elements
of a line one after the other, and those of the whole have other ranks' between them.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fp8scope.launch_kernel import Launcher
from fp8scope_trainer.rounding import key_of_step
from fp8scope_trainer.rules import Rule, Scalars
from fp8scope_trainer.state_format import DTYPES, LARGEST, StateFormat
from fp8scope_trainer.step import ROW, StepTensors, update
from fp8scope_trainer.step_kernel import step_kernel

FLAT = 128
"""Elements of a row of a tile where states have no blocks."""

ALIGNMENT = 16
"""Bytes of a wide access."""

_DTYPE = attrgetter("dtype")
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
_CODES = _TYPES | {torch.float8_e4m3fn: tl.float8e4nv, torch.int16: tl.int16, torch.int8: tl.int8,
                   torch.uint8: tl.uint8}
_SMALLEST_EPS = 2.0**-100
_KEPT = 64  # tables


class Shape(NamedTuple):
    """Of a program: elements a warp and turn, registers a thread at most (0: as many as it takes), turns."""

    elements: int
    registers: int
    turns: int


SHAPE = Shape(256, 80, 8)
SHAPES = dict.fromkeys(("int8", "int16"), Shape(512, 128, 4))
"""By format, where another is quicker: two warps for a block of 1,024 take 4.25 ms where four take 4.54 and
one 4.81, for 1.07 B parameters on an H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a launch is compiled for, and its parameters have in common."""

    rule: str
    format: str
    block: int
    weight: torch.dtype
    gradient: torch.dtype
    even: bool
    aligned: bool
    master: bool
    cut: bool = False
    """Rows have a line in the table each, since their elements do not follow one another in the whole."""


def kind_of(one: StepTensors, rule: Rule, format: StateFormat, by: Scalars) -> Kind | None:
    """The kind of launch that takes it; None if there is none, and it is left to the reference."""
    moving, columns, block = _moving(one), one.weight.shape[1], format.block
    cut = one.starts is not None
    if one.slots.signed is None or (cut and block and columns % block):
        return None
    tensors = [moving, one.gradient, *(x for slot in one.slots if slot is not None for x in slot
                                       if x is not None)]
    if not all(x.is_contiguous() for x in tensors) or not 0 < columns < 1 << 26 or not moving.numel():
        return None
    if not {moving.dtype, one.gradient.dtype} <= _TYPES.keys():
        return None
    even = not block or columns % block == 0
    aligned = all(x.data_ptr() % ALIGNMENT == 0 for x in tensors) and (
        columns % 16 == 0 if cut else even or columns % 16 == 0)
    return Kind(rule="nesterov" if by.nesterov else rule.name, format=format.name, block=block or FLAT,
                weight=moving.dtype, gradient=one.gradient.dtype, even=even, aligned=aligned,
                master=one.master is not None, cut=cut)


class StepTable:
    """Where the tensors of many parameters of one kind lie, on their device."""

    def __init__(self, tensors: Sequence[StepTensors], kind: Kind, shape: Shape | None = None) -> None:
        self.kind, self.device = kind, tensors[0].weight.device
        shape = shape or SHAPES.get(kind.format, SHAPE)
        self.turns = shape.turns
        self.rows = max(1, shape.elements // kind.block)
        self.options = {"num_warps": max(1, self.rows * kind.block // shape.elements),
                        "enable_fp_fusion": False}
        if shape.registers:
            self.options["maxnreg"] = shape.registers
        lines = _rows(tensors) if kind.cut else _wholes(tensors)
        if kind.even:
            lines[5] *= lines[6]
        programs = self._programs(lines[5], lines[6])
        self.programs, self.parts = int(programs.sum()), lines.shape[1]
        self._gradients: list[int] = []
        self._wide = bool((lines[8] + lines[5] * (1 if kind.even else lines[6]) > 1 << 32).any())
        table = torch.cat((lines, (programs.cumsum(0) - programs)[None]))
        each = torch.repeat_interleave(torch.arange(self.parts, dtype=torch.int32), programs)
        self._table = table.to(self.device, non_blocking=True)
        self._each = each.to(self.device, non_blocking=True)
        self._of = _gradient_rows(tensors).to(self.device, non_blocking=True) if kind.cut else None

    def _programs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Of each line; rows: if even, elements."""
        if self.kind.even:
            return -(-rows // (self.rows * self.kind.block * self.turns))
        tiles = -(-rows // self.rows) * -(-columns // self.kind.block)
        return -(-tiles // self.turns)

    def _placed(self, gradients: list[int]) -> Tensor:
        """Addresses of the gradients of each line, on the device."""
        found = torch.tensor(gradients).to(self.device, non_blocking=True)
        return found if self._of is None else found[self._of[0]] + self._of[1]

    def step(self, tensors: Sequence[StepTensors], by: Scalars, gradient_factor: Tensor | None = None,
             gradients: list[int] | None = None) -> Tensor:
        """One step of the table's parameters. Returns one row of `step.ROW` for all of them, fp32 [5].

        gradients: what `gradients` says of them.
        """
        if gradients is None:
            gradients = self.gradients(tensors)
            assert gradients is not None
        if gradients != self._gradients:
            self._gradients = gradients
            self._gradient = self._placed(gradients)
        out = torch.empty((len(ROW), self.programs), device=self.device)
        decay = by.decay if self.kind.rule in ("adamw", "lion") else by.weight_decay
        numbers = (by.lr, decay, by.keep[0], by.take[0], by.keep[1], by.take[1], *by.correction, by.eps,
                   by.clip)
        _step(self.programs, self._table, self._gradient, self._each,
              self._table if gradient_factor is None else gradient_factor, out, self.parts,
              _signed(key_of_step(by.seed, by.step)), *map(float, numbers),
              constants=self.constants(by, scaled=gradient_factor is not None), **self.options)
        if self.kind.master:
            masters = [one.master for one in tensors if one.master is not None]
            torch._foreach_copy_([one.weight for one in tensors], masters)
        sums = out[1:].sum(dim=1)
        sums[2] *= by.lr**2
        return torch.cat((out[:1].amax(dim=1), sums))

    def gradients(self, tensors: Sequence[StepTensors]) -> list[int] | None:
        """Addresses of the gradients, which may be others in every step; None where one is not of the table's
        kind any more."""
        gradients = [one.gradient for one in tensors]
        if set(map(_DTYPE, gradients)) != {self.kind.gradient} or not all(
                map(Tensor.is_contiguous, gradients)):
            return None
        addresses = list(map(Tensor.data_ptr, gradients))
        return None if self.kind.aligned and reduce(or_, addresses) % ALIGNMENT else addresses

    def constants(self, by: Scalars, *, scaled: bool) -> dict[str, Any]:
        """What a launch is compiled for, in the kernel's order."""
        kind = self.kind
        signed, root = LARGEST.get(kind.format, (0.0, 0.0))
        stored = [_CODES[dtype] for dtype in DTYPES[kind.format]]
        narrow = kind.weight == kind.gradient == torch.bfloat16
        return {
            "RULE": kind.rule, "FORMAT": kind.format, "WEIGHT": _TYPES[kind.weight],
            "GRADIENT": _TYPES[kind.gradient], "STORED_M": stored[0], "STORED_V": stored[1],
            "LARGEST_M": float(signed), "LARGEST_V": float(root), "ROWS": self.rows, "BLOCK": kind.block,
            "TILES": self.turns, "WIDTH": min(kind.block, 128 * self.options["num_warps"]),
            "VECTOR": 8 if narrow else 4, "EVEN": kind.even, "ALIGNED": kind.aligned, "SCALED": scaled,
            "CLIPPED": by.clip < math.inf, "WIDE": self._wide,
            "QUICK": by.eps >= _SMALLEST_EPS, "COMPILED": self.device.type == "cuda",
        }


def update_all(
    tensors: Sequence[StepTensors], rule: Rule, format: StateFormat, by: Scalars,
    gradient_factor: Tensor | None, tables: dict[Any, Any],
) -> list[Tensor]:
    """See `step.update_all`: a launch for each kind, and the reference for what no launch takes."""
    if gradient_factor is not None:
        gradient_factor = gradient_factor.to(tensors[0].weight.device, torch.float32)
    key = (rule.name, by.nesterov, *map(id, tensors))  # alive for as long as the table holds them
    launches = tables.get(key)
    found = None if launches is None else _gradients(launches, rule, format, by)
    if launches is None or found is None:
        if len(tables) >= _KEPT:
            tables.clear()
        launches = tables[key] = _launches(tensors, rule, format, by)
        found = [None] * len(launches)
    rows = []
    for (table, some), gradients in zip(launches, found, strict=True):
        if table is None:
            rows += [update(one, rule, format, by, gradient_factor)[0] for one in some]
        else:
            rows.append(table.step(some, by, gradient_factor, gradients))
    return rows


def _gradients(
    launches: list[tuple[StepTable | None, list[StepTensors]]], rule: Rule, format: StateFormat, by: Scalars
) -> list[list[int] | None] | None:
    """`StepTable.gradients` of each launch; None if other gradients need others."""
    found: list[list[int] | None] = []
    for table, some in launches:
        gradients = None if table is None else table.gradients(some)
        if gradients is None if table else any(kind_of(one, rule, format, by) for one in some):
            return None
        found.append(gradients)
    return found


def _launches(
    tensors: Sequence[StepTensors], rule: Rule, format: StateFormat, by: Scalars
) -> list[tuple[StepTable | None, list[StepTensors]]]:
    kinds: dict[Kind | None, list[StepTensors]] = defaultdict(list)
    for one in tensors:
        kinds[kind_of(one, rule, format, by)].append(one)
    return [(None if kind is None else StepTable(some, kind), some) for kind, some in kinds.items()]


def _moving(one: StepTensors) -> Tensor:
    """The weight that moves."""
    return one.weight if one.master is None else one.master


def _tensors(one: StepTensors) -> tuple[Tensor | None, ...]:
    """The weight that moves, and codes and scales of both moments."""
    (m, ms), (v, vs) = ((None, None) if slot is None else slot for slot in one.slots)
    return _moving(one), m, v, ms, vs


def _wholes(tensors: Sequence[StepTensors]) -> Tensor:
    """A line for each, int64 [9, lines]: addresses, 0 of what there is not, rows, columns, stream, first."""
    addresses = ([0 if x is None else x.data_ptr() for x in _tensors(one)] for one in tensors)
    return torch.tensor([(*found, *one.weight.shape, one.stream, one.first)
                         for found, one in zip(addresses, tensors, strict=True)]).t().contiguous()


def _rows(tensors: Sequence[StepTensors]) -> Tensor:
    """A line for each row of each."""
    found = []
    for one in tensors:
        assert one.starts is not None
        rows = torch.arange(one.weight.shape[0])
        lines = [torch.zeros_like(rows) if x is None else x.data_ptr() + rows * _row_bytes(x)
                 for x in _tensors(one)]
        numbers = (1, one.weight.shape[1], one.stream)
        found.append(torch.stack((*lines, *(torch.full_like(rows, x) for x in numbers), one.starts.cpu())))
    return torch.cat(found, dim=1)


def _gradient_rows(tensors: Sequence[StepTensors]) -> Tensor:
    """int64 [2, lines]: which gradient each row is of, and how many bytes after its begin."""
    found = []
    for number, one in enumerate(tensors):
        rows = torch.arange(one.weight.shape[0])
        size = one.weight.shape[1] * one.gradient.element_size()
        found.append(torch.stack((torch.full_like(rows, number), rows * size)))
    return torch.cat(found, dim=1)


def _row_bytes(matrix: Tensor) -> int:
    return matrix.shape[1] * matrix.element_size()


def _signed(key: int) -> int:
    """The same 32 bits as an int32."""
    return key - (1 << 32) if key >= 1 << 31 else key


_step = Launcher(step_kernel)
