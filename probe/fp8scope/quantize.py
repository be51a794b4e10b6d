"""Reference quantizers: one scale policy, tiles and blocks of 128, in plain torch.

The maths. y = x / s is rounded to the nearest code and d = q s. One function, `scale_of`, decides s:

    s = max(amax / largest, 2^-126)          of the tile, block or tensor, in fp32
    s = 1                                    where every element is zero (0 / 0 would be NaN)
    s = 1 and every code NaN                 where an element is NaN or Inf

The last line is a choice. Clamping, as most quantizers do, turns Inf into 448 and, through 448 / Inf = 0,
zeroes its 127 neighbours, and the output looks finite; a NaN code keeps gradient scalers and NaN checks
downstream working. Finite values are clamped before the cast, because fp32 -> E4M3 above 464 gives NaN up
to torch 2.12 and 448 from 2.13 on.

Layout. x is [R, C]. Tiles lie along a row: scales are [R, ceil(C / 128)]; the last tile of a row may be
short, and never crosses into the next row. Blocks are 128 x 128: scales [ceil(R / 128), ceil(C / 128)].
The columnwise orientation of x is the tile quantization of x.t().

Rejected: multiplying by 1 / s (other codes for 7e-7 of elements); a floor on amax of 1e-4 (gradients near
1e-8 lose their range); scales as reciprocals (two senses of one word).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import SMALLEST_SCALE, TILE, Format

DTYPES: dict[str, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
}


class Quantized(NamedTuple):
    """Codes [R, C] and the fp32 scales that turn them back: d = codes * scales, scale by scale."""

    codes: Tensor
    scales: Tensor
    scaling: str


def scale_of(amax: Tensor, element: Format, *, power_of_two: bool = False) -> Tensor:
    """Dequantization scale (fp32) for each `amax`; 1 where amax is zero, NaN or Inf.

    With `power_of_two` the scale is rounded up to one on its bits: exact on every device.
    """
    usable = torch.isfinite(amax) & (amax > 0)
    # Dividing by a Python number would, on CUDA, multiply by its reciprocal: another scale in the last bit.
    largest = amax.new_full((), element.largest, dtype=torch.float32)
    scale = (amax.float() / largest).clamp_min(SMALLEST_SCALE)
    if power_of_two:  # carry any mantissa bit into the exponent, then drop the mantissa
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(usable, scale, torch.ones_like(scale))


def tile_amax(x: Tensor) -> Tensor:
    """Largest |x| of each [1,128] tile of x [R, C] -> fp32 [R, ceil(C / 128)]. NaN and Inf stay visible."""
    if x.numel() == 0:
        return x.new_zeros(_tiles_shape(x), dtype=torch.float32)
    return _tiled(x.float().abs()).amax(dim=-1)


def block_amax(x: Tensor) -> Tensor:
    """Largest |x| of each [128,128] block of x [R, C] -> fp32 [ceil(R / 128), ceil(C / 128)]."""
    rows = tile_amax(x)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % TILE))
    return padded.view(padded.shape[0] // TILE, TILE, rows.shape[1]).amax(dim=1)


def quantize_tiles(
    x: Tensor, element: Format, *, scales: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """[1,128] tiles of x [R, C]. `scales` [R, ceil(C / 128)] (or broadcastable) replaces the current ones."""
    amax = tile_amax(x)
    used = scale_of(amax, element, power_of_two=power_of_two) if scales is None else scales.expand(amax.shape)
    return Quantized(_encode(x, amax, used, element, rows_per_scale=1), used, "tile 1x128")


def quantize_tiles_both(
    x: Tensor, element: Format, *, power_of_two: bool = False
) -> tuple[Quantized, Quantized]:
    """Both orientations: [1,128] tiles of x [R, C], and of x.t() [C, R]."""
    rowwise = quantize_tiles(x, element, power_of_two=power_of_two)
    return rowwise, quantize_tiles(x.t(), element, power_of_two=power_of_two)


def quantize_blocks(
    x: Tensor, element: Format, *, scales: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """[128,128] blocks of x [R, C]. `scales` [ceil(R/128), ceil(C/128)] replaces the current ones."""
    amax = block_amax(x)
    used = scale_of(amax, element, power_of_two=power_of_two) if scales is None else scales.expand(amax.shape)
    return Quantized(_encode(x, amax, used, element, rows_per_scale=TILE), used, "block 128x128")


def quantize_tensor(
    x: Tensor, element: Format, *, scales: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """One scale, shape [1, 1], for the whole of x [R, C]."""
    amax = x.float().abs().amax().view(1, 1) if x.numel() else x.new_zeros((1, 1), dtype=torch.float32)
    used = scale_of(amax, element, power_of_two=power_of_two) if scales is None else scales.view(1, 1)
    bad = ~torch.isfinite(amax)
    y = (x.float() / used).clamp(-element.largest, element.largest)
    return Quantized(torch.where(bad, torch.nan, y).to(DTYPES[element.name]), used, "tensorwise")


def dequantize(q: Quantized) -> Tensor:
    """d = q s in fp32, shape [R, C]."""
    values = decode(q.codes)
    if q.scaling == "tensorwise":
        return values * q.scales
    rows, columns = q.codes.shape
    scales = q.scales if q.scaling != "block 128x128" else q.scales.repeat_interleave(TILE, dim=0)[:rows]
    return (_tiled(values) * scales.unsqueeze(-1)).flatten(1)[:, :columns].contiguous()


def decode(codes: Tensor) -> Tensor:
    """Codes as fp32. On the CPU a table of the 256 codes is twice as fast as the cast."""
    if codes.device.type != "cpu" or codes.element_size() > 1:
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype).float()
    return table.take(codes.view(torch.uint8).long())


def _encode(x: Tensor, amax: Tensor, scales: Tensor, element: Format, *, rows_per_scale: int) -> Tensor:
    rows, columns = x.shape
    if rows_per_scale > 1:
        amax = amax.repeat_interleave(rows_per_scale, dim=0)[:rows]
        scales = scales.repeat_interleave(rows_per_scale, dim=0)[:rows]
    y = (_tiled(x.float()) / scales.unsqueeze(-1)).clamp(-element.largest, element.largest)
    y = y * torch.where(torch.isfinite(amax), 1.0, torch.nan).unsqueeze(-1)  # a select over y: 30x slower
    return y.to(DTYPES[element.name]).flatten(1)[:, :columns].contiguous()


def _tiled(x: Tensor) -> Tensor:
    """x [R, C] as [R, ceil(C / 128), 128], short tiles filled with zeros."""
    if x.dim() != 2:
        raise Invalid("x.dim()", x.dim(), "must be 2; flatten leading dimensions first")
    return torch.nn.functional.pad(x, (0, -x.shape[1] % TILE)).view(*_tiles_shape(x), TILE)


def _tiles_shape(x: Tensor) -> tuple[int, int]:
    return x.shape[0], -(-x.shape[1] // TILE)
