"""How an optimizer state is stored: what the codes are, which elements share a scale, encode and decode.

    format  first moment m, momentum      root r = sqrt(v)         scale, s       bytes of both, a parameter
    fp32    the value                     v itself                 -              8
    bf16    the value, by chance          v itself, by chance      -              4
    int16   -32767 .. 32767               0 .. 32767               amax / 32767   4 + 8 / 1024
    fp8     E4M3                          E4M3                     amax / 448     2 + 8 / 128
    int8    -127 .. 127                   0 .. 255, unsigned       amax / largest 2 + 8 / 1024
    int4    -7 .. 7, two's complement     0 .. 15, unsigned        amax / largest 1 + 8 / 256

A block is that many elements of one row [R, C]; the last one of a row may be short, and none crosses into the
next, so rows can move between ranks and keep their codes. y = x times the fp32 reciprocal of s, clamped to
the largest code and rounded by chance (see `rounding`); d = q s. s is 2^-126 or more; of a block of zeros 1.
int4 codes are packed two to a byte along the row, the even column in the low half: uint8 [R, ceil(C / 2)].

Of v its square root is stored: it spans half the binades. It has no sign, so integers give all their codes to
what there is, and what is not zero gets at least the smallest code: m / r cannot explode through a lost v.

A block with a NaN or an Inf decodes as NaN throughout: E4M3 codes NaN with s = 1, integers 0 with s = NaN.

Rejected: the quotient x / s (a division for each element, where chance takes the last bit anyway); linear
codes for v itself (largest |update| 9.8e3 lr where gradients in a block are a decade apart); scales in bf16
(one byte in 500 saved at block 1024, and an amax that need not fit its block).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8scope.quantize import decode as decode_codes
from fp8scope_protocol.formats import E4M3, SMALLEST_SCALE, TILE
from fp8scope_trainer.rounding import round_bf16, round_e4m3, round_integer
from fp8scope_trainer.state_block import block_of

LARGEST = {"int16": (32767, 32767), "fp8": (E4M3.largest, E4M3.largest), "int8": (127, 255), "int4": (7, 15)}
"""Largest code of m and of r."""

DTYPES = {"fp32": (torch.float32, torch.float32), "bf16": (torch.bfloat16, torch.bfloat16),
          "int16": (torch.int16, torch.int16), "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
          "int8": (torch.int8, torch.uint8), "int4": (torch.uint8, torch.uint8)}
"""Of the stored m and r."""


class Encoded(NamedTuple):
    """Codes as they are stored and their scales, fp32 [R, ceil(C / block)]; none without blocks."""

    codes: Tensor
    scales: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFormat:
    """One of `state_block.FORMATS` with its block; 0 where there are no blocks."""

    name: str
    block: int

    @classmethod
    def of(cls, name: str, block: int | None = None) -> "StateFormat":
        """The format `name`; `block` None is its default. `Invalid` names what is accepted."""
        return cls(name=name, block=block_of(name, block))

    @property
    def quantized(self) -> bool:
        """Whether values are stored as codes under scales."""
        return self.block > 0

    @property
    def rounds(self) -> bool:
        """Whether anything is lost when a value is stored."""
        return self.name != "fp32"

    def dtype(self, *, root: bool) -> torch.dtype:
        """Of what is stored."""
        return DTYPES[self.name][root]

    def stored_columns(self, columns: int) -> int:
        """How many elements of `dtype` a row of `columns` takes."""
        return -(-columns // 2) if self.name == "int4" else columns

    def blocks(self, columns: int) -> int:
        """Scales of a row."""
        return -(-columns // self.block)

    def scaling(self, columns: int) -> str:
        """The probe's name for blocks along rows of `columns`."""
        if self.block == TILE:
            return "tile 1x128"
        if columns <= self.block:
            return "rowwise"
        return f"flat {self.block}" if columns % self.block == 0 else f"tile 1x{self.block}"

    def code_name(self, *, root: bool) -> str:
        """The probe's name for the codes."""
        if self.name == "fp8":
            return E4M3.name
        return f"u{self.name}" if self.dtype(root=root) == torch.uint8 and root else self.name

    def encode(self, x: Tensor, u: Tensor, *, root: bool) -> Encoded:
        """x [R, C] fp32, rounded by the random bits u [R, C] (see `rounding`).

        `root`: of quantized formats x is r, without a sign; of bf16 it is v.
        """
        if self.name == "fp32":
            return Encoded(x, None)
        if self.name == "bf16":
            return Encoded(round_bf16(x, u), None)
        largest = LARGEST[self.name][root]
        whole = pad(x, (0, -x.shape[1] % self.block))
        amax = whole.view(x.shape[0], self.blocks(x.shape[1]), self.block).abs().amax(dim=-1)
        finite = torch.isfinite(amax)
        scales = (amax / torch.full_like(amax, largest)).clamp(min=SMALLEST_SCALE)
        scales = torch.where(finite & (amax > 0), scales, 1.0)
        y = x * self._spread(torch.ones_like(scales) / scales, x.shape[1])
        if self.name == "fp8":
            y = torch.where(self._spread(finite, x.shape[1]), y, torch.nan)
            return Encoded(round_e4m3(y, u, keep_nonzero=root), scales)
        codes = round_integer(y, u, largest=largest, smallest=float(root))
        codes = torch.where(self._spread(finite, x.shape[1]), codes, 0.0)
        return Encoded(self._packed(codes, root=root), torch.where(finite, scales, torch.nan))

    def decode(self, stored: Encoded, columns: int, *, root: bool) -> Tensor:
        """d [R, C] fp32."""
        if stored.scales is None:
            return stored.codes.float()
        codes = self.unpacked(stored.codes, columns, root=root)
        return decode_codes(codes) * self._spread(stored.scales, columns)

    def unpacked(self, stored: Tensor, columns: int, *, root: bool) -> Tensor:
        """Codes [R, C], one to an element; of int4 as int8."""
        if self.name != "int4":
            return stored
        codes = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)[:, :columns].to(torch.int8)
        return codes if root else torch.where(codes > 7, codes - 16, codes)

    def _packed(self, codes: Tensor, *, root: bool) -> Tensor:
        if self.name != "int4":
            return codes.to(self.dtype(root=root))
        halves = pad(codes, (0, codes.shape[1] % 2)).to(torch.int16) & 15
        return (halves[:, ::2] | halves[:, 1::2] << 4).to(torch.uint8)

    def _spread(self, blocks: Tensor, columns: int) -> Tensor:
        """Per element, of what is per block."""
        return blocks.repeat_interleave(self.block, dim=1)[:, :columns]
