"""Moments of our own optimizers: codes and scales of blocks along the rows of a parameter.

    states   exp_avg                         exp_avg_sq (its root)    block
    fp8      E4M3                            E4M3                     128
    int8     int8                            uint8                    a power of two
    int16    int16                           int16
    int4     uint8, two to a byte            uint8, two to a byte

Codes are shaped like the parameter, of int4 with half as many columns; scales, fp32 [.., ceil(C / block)],
lie under `exp_avg_scale` and `exp_avg_sq_scale`. A parameter of four or more dimensions is [O, the rest].
During an fp32 warm-up `exp_avg_exact` and `exp_avg_sq_exact` are there instead. The block follows from the
number of scales: one power of two gives it, where there is more than one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8scope.quantize import decode
from fp8scope.sharding import local
from fp8scope_protocol.formats import TILE

KEYS = ("exp_avg", "exp_avg_sq")
EXACT = {"exp_avg": "exp_avg_exact", "exp_avg_sq": "exp_avg_sq_exact"}
ROOTS = {(torch.float8_e4m3fn, torch.float8_e4m3fn): "e4m3", (torch.int8, torch.uint8): "uint8",
         (torch.int16, torch.int16): "int16", (torch.uint8, torch.uint8): "uint4"}
"""Format of the root, by the dtypes of both."""
TWINS_ALONE = frozenset({"uint8", "uint4", "int16"})
"""Formats of roots of which only twins tell anything: the probe has no quantizer for them."""


class OurMoments(NamedTuple):
    """Both moments of one parameter, this rank's part."""

    root_format: str
    codes: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    columns: int
    cut: bool
    """Other ranks have more columns, in whole blocks."""

    @property
    def block(self) -> int:
        """Elements that share a scale; at least a row, where there is one scale to a row that is not cut."""
        blocks, size = self.scales[0].shape[-1], TILE // 4
        while -(-self.columns // size) > blocks:
            size *= 2
        return size

    @property
    def scaling(self) -> str | None:
        """Name in `formats.parse_scaling`; None where it has none."""
        if self.root_format == "e4m3":
            return "tile 1x128"
        if self.scales[0].shape[-1] == 1 and not self.cut:
            return "rowwise"
        return f"flat {self.block}" if self.columns % self.block == 0 else None

    def decoded(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """m and v at flat indices int64 [n] of the parameter, fp32. m is 0 where the root is."""
        m, root = (self._decoded(i, at) for i in range(2))
        return torch.where(root == 0, 0.0, m), root.square()

    def _decoded(self, which: int, at: Tensor) -> Tensor:
        row, column = at // self.columns, at % self.columns
        scales = self.scales[which].reshape(-1)[row * self.scales[which].shape[-1] + column // self.block]
        flat = self.codes[which].reshape(-1)
        if self.root_format != "uint4":
            width = flat.element_size()
            found = flat.view(torch.uint8)[at].view(flat.dtype) if width == 1 else flat[at]
            return decode(found) * scales
        byte = flat[row * -(-self.columns // 2) + column // 2]
        codes = torch.where(column % 2 == 0, byte & 15, byte >> 4).to(torch.int8)
        return (codes if which else torch.where(codes > 7, codes - 16, codes)).float() * scales


def our_moments(parameter: Tensor, state: Mapping[str, Any]) -> OurMoments | None:
    """The moments of one parameter, None where they are not codes of ours."""
    stored = [local(x) for tail in ("", "_scale") for key in KEYS
              if isinstance(x := state.get(key + tail), Tensor)]
    if len(stored) < 4 or parameter.dim() < 2:
        return None
    m, root, *scales = stored
    format = ROOTS.get((m.dtype, root.dtype))
    if format is None:
        return None
    columns, whole = (shape[-1] if len(shape) < 4 else shape[1:].numel()
                      for shape in (local(parameter).shape, parameter.shape))
    return OurMoments(format, (m, root), (scales[0], scales[1]), columns, cut=columns != whole)


def is_warming_up(state: Mapping[str, Any]) -> bool:
    """Whether exact moments stand in for codes that are to come."""
    return all(isinstance(state.get(key), Tensor) for key in EXACT.values())
