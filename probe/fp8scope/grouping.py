"""Groups of elements that share a scale, over the pieces that a matrix is summed in.

A *piece* is up to 128 elements that lie side by side in a row and in one group: 32 under `mx 1x32`, 128
otherwise, fewer at the end of a row or where groups are narrower. What is per piece is [R, T], what is per
group [GR, GT], the shape of the scales:

    tile 1x128, mx 1x32     [R, T]                          a piece each
    block 128x128           [ceil(R / 128), T]              128 pieces below one another
    rowwise                 [R, 1]                          all pieces of a row
    tensorwise, none        [1, 1]                          all
    flat n                  [ceil(RC / n), 1]               rows of the tensor written as n to a row

The last line needs no case of its own: `as_rows` writes the tensor so, the last row apart if it is shorter.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import TILE, Scaling


class Grouping:
    """The groups of a matrix of `shape`, which is [R, C], or comes from `as_rows` if the scaling is flat."""

    def __init__(self, scaling: Scaling, shape: torch.Size) -> None:
        rows, columns = shape
        self.width = min(TILE, scaling.columns or TILE)
        """Elements of a full piece."""
        self.pieces = (rows, -(-columns // self.width))
        single = not scaling.flat and scaling.columns is not None  # pieces of a row are groups of their own
        self.high = scaling.rows or max(rows, 1)
        self.wide = 1 if single else max(self.pieces[1], 1)
        """Of a group, in pieces: high x wide."""
        self.shape = (-(-rows // self.high) if scaling.rows else 1, self.pieces[1] if single else 1)
        """[GR, GT]."""

    def split(self, x: Tensor) -> Tensor:
        """x [R, C] as [R, T, width], short pieces filled with zeros."""
        return pad(x, (0, -x.shape[1] % self.width)).view(*self.pieces, self.width)

    def join(self, pieces: Tensor, columns: int) -> Tensor:
        """Inverse of `split`."""
        return pieces.flatten(1)[:, :columns].contiguous()

    def amax(self, pieces: Tensor) -> Tensor:
        """Per group, of what is per piece. NaN and Inf stay visible."""
        return self._grouped(pieces).amax(dim=(1, 3)) if pieces.numel() else pieces.new_zeros(self.shape)

    def sum(self, pieces: Tensor) -> Tensor:
        """Per group, of what is per piece."""
        return self._grouped(pieces).sum(dim=(1, 3))

    def any(self, pieces: Tensor) -> Tensor:
        """Per group, of what is per piece."""
        return self._grouped(pieces).any(dim=3).any(dim=1)

    def spread(self, groups: Tensor) -> Tensor:
        """Per piece, of what is per group or, [1, 1], the same for all."""
        rows = self.pieces[0]
        if groups.shape[0] > 1 and self.high > 1:
            groups = groups.repeat_interleave(self.high, dim=0)[:rows]
        return groups.expand(self.pieces)

    def _grouped(self, pieces: Tensor) -> Tensor:
        """[GR, rows of a group, GT, pieces of its row]; zeros fill the last group."""
        padded = pad(pieces, (0, 0, 0, -self.pieces[0] % self.high))
        return padded.view(-1, self.high, self.pieces[1] // self.wide, self.wide)


def as_rows(x: Tensor, scaling: Scaling) -> list[Tensor]:
    """x [R, C] as the matrices that `Grouping` takes: itself or, where the scaling is flat, the flattened
    tensor with a group to a row, and the last group apart if it is shorter."""
    if x.dim() != 2:
        raise Invalid("x.dim()", x.dim(), "must be 2; flatten leading dimensions first")
    if not scaling.flat or scaling.columns is None:
        return [x]
    flat, n = x.reshape(-1), scaling.columns
    whole = flat.numel() // n * n
    parts = [flat[:whole].view(-1, n), flat[whole:].view(1, -1)]
    return [part for part in parts if part.numel()]
