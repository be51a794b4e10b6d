"""A fixed sample of a job's parameters: which elements, and how they are brought together.

Numbers about an optimizer's step need what the step did to single elements, but not to all of them. So a
parameter, seen as one row of elements, is cut into blocks, and every n-th block is taken, evenly spaced: at
most so many elements in all, whatever the parameter's size; a smaller one is taken whole. n shares no factor
with the blocks in a row, so the sample walks through all columns. The first block follows from the
parameter's name. What is kept and computed for a parameter is so bounded, however large it is
(docs/decisions/0008).

What is gone when the step is over is read from up to 128 blocks of 128. What is kept for the whole run are
blocks of 8, by default up to 96: spread over as many rows they tell more than 16 blocks of 128, whose
elements share a scale of the states.

Blocks are counted in the whole parameter: a shard along rows (FSDP) takes the same blocks as one process
does, apart from blocks that lie across a border between ranks, and may be left with none. Of shards along
other dimensions (tensor parallel) each takes a sample of its own. Of what several ranks hold alike one rank
takes the sample.

Bringing a sample together is one `torch.cat` of strided views, one launch for some hundred parameters, and
the sums of each parameter are one segmented sum: what follows is as cheap for many small tensors as for
one.
"""

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope.layers import ParameterPlace
from fp8scope.sharding import first_row, is_measured_here, local

BLOCK = 128
"""Elements in a block of the sample that a step is read from."""
MOST_OF_ONE = 128 * BLOCK
"""Elements of one parameter that are taken, at most."""
KEPT_BLOCK = 8
"""The same, of what is kept over steps: 32 bytes of fp32, which are read together."""
MOST_KEPT = 96 * KEPT_BLOCK
"""The default of `ProbeSettings.twin_elements`."""
MOST = 2**20
"""Elements of one sample: bounds the memory of what is computed from it."""


class Part(NamedTuple):
    """What is taken of one parameter; offsets in elements of this rank's part, flattened."""

    parameter: Tensor
    place: ParameterPlace
    first: int
    stride: int
    """From the start of a block to that of the next one that is taken; 0 if everything is."""
    elements: int
    """How many are taken on this rank."""
    weight: int
    """Elements of the parameter for each one that is taken."""
    block: int = BLOCK
    """Elements in a block."""

    def indices(self, device: torch.device) -> Tensor:
        """Where the taken elements lie in the flattened local part, int64 [elements]."""
        if not self.stride:
            return torch.arange(self.elements, device=device)
        starts = torch.arange(self.elements // self.block, device=device) * self.stride + self.first
        return (starts.unsqueeze(1) + torch.arange(self.block, device=device)).flatten()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """Parts of parameters of one group, device and dtype; those taken whole come first."""

    parts: tuple[Part, ...]
    lengths: Tensor
    """Elements of each part, int64 [P], on the device."""
    weights: Tensor
    """Elements of the parameter for each one that is taken, float64 [P], on the device."""

    @property
    def elements(self) -> int:
        return sum(part.elements for part in self.parts)

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.parts[0].parameter.dtype

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sample of `tensors`, one for each part and shaped like its local part -> [elements]."""
        wholes = [x.reshape(-1) for part, x in zip(self.parts, tensors, strict=True) if not part.stride]
        strided = [_blocks(part, x) for part, x in zip(self.parts, tensors, strict=True) if part.stride]
        found = [torch.cat(wholes)] if wholes else []
        if strided:
            found.append(torch.cat(strided).view(-1))
        return found[0] if len(found) == 1 else torch.cat(found)

    def of_the_same(self, other: "Sample") -> bool:
        """Whether both are of the same parameters."""
        return [id(part.parameter) for part in self.parts] == [id(part.parameter) for part in other.parts]

    def only(self, kept: Sequence[int]) -> "Sample":
        """The sample of some of the parts."""
        return self if len(kept) == len(self.parts) else _sample([self.parts[i] for i in kept])

    def pick(self, x: Tensor, kept: Sequence[int]) -> Tensor:
        """What x [elements] holds of some of the parts."""
        if len(kept) == len(self.parts):
            return x
        each = torch.split(x, [part.elements for part in self.parts])
        return torch.cat([each[i] for i in kept])

    def spread(self, values: Tensor) -> Tensor:
        """values [P], one of each part, for each of its elements -> [elements]."""
        return torch.repeat_interleave(values, self.lengths, output_size=self.elements)

    def sums(self, x: Tensor) -> Tensor:
        """Sum of x [elements] over each part -> float64 [P]."""
        return torch.segment_reduce(x.double(), "sum", lengths=self.lengths, unsafe=True)

    def squares(self, x: Tensor) -> Tensor:
        """Sum of x^2 over each part -> float64 [P]."""
        return self.sums(x.double().square_())


def draw(
    parameters: Sequence[Tensor], places: dict[int, ParameterPlace], *, rank: int, world: int,
    block: int = BLOCK, most: int = MOST_OF_ONE,
) -> tuple[Sample, ...]:
    """The samples of `parameters` (of one group) that this rank takes, at most MOST elements each: of one
    parameter at most `most`, in blocks of `block`."""
    found = [_part(parameter, places, rank, world, block, most) for parameter in parameters]
    parts = [part for part in found if part is not None]
    parts.sort(key=lambda part: (str(part.parameter.device), str(part.parameter.dtype), part.stride > 0))
    return tuple(map(_sample, _portions(parts)))


def stride_of(shape: torch.Size, *, block: int = BLOCK, most: int = MOST_OF_ONE) -> int:
    """Every how manieth block of a parameter of this global shape is taken; 1 is all of them."""
    least, in_row = -(-shape.numel() // most), shape[-1] // block if shape else 0
    return next(n for n in itertools.count(max(least, 1)) if math.gcd(n, max(in_row, 1)) == 1)


def _part(
    parameter: Tensor, places: dict[int, ParameterPlace], rank: int, world: int, block: int, most: int
) -> Part | None:
    place = places.get(id(parameter))
    if place is None or not is_measured_here(parameter, rank=rank, world=world, index=place.index):
        return None
    if not parameter.is_floating_point() or not (whole := local(parameter).numel()):
        return None
    stride = stride_of(parameter.shape, block=block, most=most)
    if stride == 1:
        return Part(parameter, place, 0, 0, whole, 1, block)
    begin = first_row(parameter) * (parameter.numel() // parameter.shape[0])
    skipped = -begin % block  # up to the first block that begins here
    first = (begin + skipped) // block
    ahead = (zlib.crc32(place.name.encode()) - first) % stride
    here = max(whole - skipped, 0) // block
    blocks = -(-(here - ahead) // stride) if here > ahead else 0
    if not blocks:
        return None
    return Part(parameter, place, skipped + ahead * block, stride * block, blocks * block, stride, block)


def _sample(parts: Sequence[Part]) -> Sample:
    device = parts[0].parameter.device
    lengths = torch.tensor([part.elements for part in parts])
    weights = torch.tensor([part.weight for part in parts], dtype=torch.float64)
    return Sample(parts=tuple(parts), lengths=lengths.to(device, non_blocking=True),
                  weights=weights.to(device, non_blocking=True))


def _portions(parts: list[Part]) -> Iterator[list[Part]]:
    """Runs of `parts` of one device and dtype, of MOST elements at most unless one alone has more."""
    some: list[Part] = []
    for part in parts:
        full = sum(one.elements for one in some) + part.elements > MOST
        if some and (full or _kind(part) != _kind(some[0])):
            yield some
            some = []
        some.append(part)
    if some:
        yield some


def _kind(part: Part) -> tuple[torch.device, torch.dtype]:
    return part.parameter.device, part.parameter.dtype


def _blocks(part: Part, x: Tensor) -> Tensor:
    """The taken blocks as a view, [blocks, part.block]."""
    x, shape = x.contiguous(), (part.elements // part.block, part.block)
    return x.as_strided(shape, (part.stride, 1), x.storage_offset() + part.first)
