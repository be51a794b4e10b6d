"""Reference quantizers: one scale policy for every format and scaling, in plain torch.

The maths. y = x / s is rounded to the nearest code and d = q s. `scale_of` decides s, in fp32, for each group
of elements that shares one (grouping.py):

    s = max(amax / largest, 2^-126)              amax: the largest |x| of the group
    s = 2^(floor(log2 amax) - 8), from 2^-127    mx, floor: by the exponent of amax as fp32
    s = amax / 448 rounded up, from 2^-127       mx, rceil: to a power of two
    s = 1                                        where every element is zero (0 / 0 would be NaN)
    s = 1 and every code NaN                     where an element is NaN or Inf
    s = NaN and every code 0                     the same, in an integer format, which has no NaN

The last two are a choice. Clamping, as most quantizers do, turns Inf into 448 and, through 448 / Inf = 0,
zeroes its 127 neighbours, and the output looks finite; d = NaN keeps gradient scalers and NaN checks
downstream working. Finite values are clamped before the cast, because fp32 -> E4M3 above 464 gives NaN up
to torch 2.12 and 448 from 2.13 on. Integers are rounded half to even, as the floats are.

Layout. x is [R, C]. Tiles lie along a row: scales are [R, ceil(C / 128)]; the last tile of a row may be
short, and never crosses into the next row. Blocks are 128 x 128: scales [ceil(R / 128), ceil(C / 128)].
The columnwise orientation of x is the tile quantization of x.t(). INT4 codes take a byte each.

Rejected: multiplying by 1 / s (other codes for 7e-7 of elements); a floor on amax of 1e-4 (gradients near
1e-8 lose their range); scales as reciprocals (two senses of one word); the exponent of an amax in bf16, which
is one too high for 1.9999.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope.grouping import Grouping, as_rows
from fp8scope_protocol.formats import (
    SCALINGS,
    SMALLEST_E8M0,
    SMALLEST_SCALE,
    Format,
    Scaling,
    check_pair,
    parse_scaling,
)

DTYPES: dict[str, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.int8,
    "mxfp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
}


class Quantized(NamedTuple):
    """Codes [R, C] and the fp32 scales [GR, GT] (see grouping.py) that turn them back: d = codes * scales."""

    codes: Tensor
    scales: Tensor
    scaling: str


def scale_of(amax: Tensor, element: Format, *, power_of_two: bool = False) -> Tensor:
    """Dequantization scale (fp32) for each `amax`; 1 where amax is zero, NaN or Inf.

    With `power_of_two` the scale is rounded up to one on its bits: exact on every device.
    """
    scale = _over(amax, element.largest).clamp_min(SMALLEST_SCALE)
    return _usable(_rounded_up(scale) if power_of_two else scale, amax)


def e8m0_scale_of(amax: Tensor, element: Format, scaling: Scaling) -> Tensor:
    """`scale_of` in E8M0: a power of two from 2^-127, by the rule of `scaling`."""
    if scaling.e8m0 == "rceil":
        scale = _over(amax, element.largest)
        scale = torch.where(scale > SMALLEST_E8M0, _rounded_up(scale), SMALLEST_E8M0)
    else:  # bits of an fp32: 8 of exponent above 23; those of 2^-127, a subnormal, have the exponent 0
        exponent = (amax.float().view(torch.int32) >> 23) - 8
        scale = torch.where(exponent > 0, exponent << 23, 1 << 22).view(torch.float32)
    return _usable(scale, amax)


def quantize(
    x: Tensor, element: Format, scaling: str, *, scales: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """x [R, C] in any format and scaling. `scales` (broadcastable to their shape) replaces the current ones;
    those of `flat n` may have any shape, in order. `power_of_two` is for scales in fp32."""
    groups = parse_scaling(scaling)
    check_pair(element, groups)
    parts = [
        _quantize_rows(rows, element, groups, given, power_of_two)
        for rows, given in zip(as_rows(x, groups), split_scales(x, groups, scales), strict=True)
    ]
    if len(parts) == 1:
        return Quantized(parts[0].codes.view(x.shape), parts[0].scales, scaling)
    codes = [part.codes.flatten() for part in parts] or [x.new_empty(0, dtype=DTYPES[element.name])]
    used = [part.scales for part in parts] or [x.new_empty((0, 1), dtype=torch.float32)]
    return Quantized(torch.cat(codes).view(x.shape), torch.cat(used), scaling)


def split_scales(x: Tensor, scaling: Scaling, scales: Tensor | None) -> list[Tensor | None]:
    """What of `scales`, [GR, GT] or [GR], belongs to each of `as_rows(x, scaling)`."""
    rows = [len(part) for part in as_rows(x, scaling)]
    if scales is None:
        return [None] * len(rows)
    table = scales.reshape(-1, 1) if scaling.flat or scales.dim() < 2 else scales
    return list(table.expand(sum(rows), 1).split_with_sizes(rows)) if scaling.flat else [table]


def tile_amax(x: Tensor) -> Tensor:
    """Largest |x| of each [1,128] tile of x [R, C] -> fp32 [R, ceil(C / 128)]. NaN and Inf stay visible."""
    return _group_amax(x, SCALINGS["tile 1x128"])


def block_amax(x: Tensor) -> Tensor:
    """Largest |x| of each [128,128] block of x [R, C] -> fp32 [ceil(R / 128), ceil(C / 128)]."""
    return _group_amax(x, SCALINGS["block 128x128"])


def quantize_tiles(
    x: Tensor, element: Format, *, scales: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """[1,128] tiles of x [R, C]. `scales` [R, ceil(C / 128)] (or broadcastable) replaces the current ones."""
    return quantize(x, element, "tile 1x128", scales=scales, power_of_two=power_of_two)


def quantize_blocks(
    x: Tensor, element: Format, *, scales: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """[128,128] blocks of x [R, C]. `scales` [ceil(R/128), ceil(C/128)] replaces the current ones."""
    return quantize(x, element, "block 128x128", scales=scales, power_of_two=power_of_two)


def dequantize(q: Quantized) -> Tensor:
    """d = q s in fp32, shape [R, C]."""
    scaling = parse_scaling(q.scaling)
    values = decode(q.codes)
    parts = []
    for rows, scales in zip(as_rows(values, scaling), split_scales(values, scaling, q.scales), strict=True):
        groups = Grouping(scaling, rows.shape)
        assert scales is not None
        spread = groups.spread(scales).unsqueeze(-1)
        parts.append(groups.join(groups.split(rows) * spread, rows.shape[1]))
    if len(parts) == 1:
        return parts[0].view(values.shape)
    return torch.cat([part.flatten() for part in parts] or [values.flatten()]).view(values.shape)


def decode(codes: Tensor) -> Tensor:
    """Codes as fp32. On the CPU a table of the 256 codes is twice as fast as the cast."""
    if codes.device.type != "cpu" or codes.element_size() > 1:
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype).float()
    return table.take(codes.view(torch.uint8).long())


def _quantize_rows(
    x: Tensor, element: Format, scaling: Scaling, scales: Tensor | None, power_of_two: bool
) -> Quantized:
    """One of `as_rows`."""
    groups, amax = Grouping(scaling, x.shape), _group_amax(x, scaling)
    if scales is not None:
        used = scales.expand(groups.shape)
    elif scaling.name == "none":
        used = torch.ones_like(amax)
    elif scaling.e8m0:
        used = e8m0_scale_of(amax, element, scaling)
    else:
        used = scale_of(amax, element, power_of_two=power_of_two)
    finite = torch.isfinite(amax)
    y = groups.split(x.float()) / groups.spread(used).unsqueeze(-1)
    y = y.clamp(-element.largest, element.largest)
    if element.is_integer:
        codes, used = y.round().nan_to_num(0.0), torch.where(finite, used, torch.nan)
        y = codes * groups.spread(finite.float()).unsqueeze(-1)
    else:  # a select over y: 30x slower
        y = y * groups.spread(torch.where(finite, 1.0, torch.nan)).unsqueeze(-1)
    return Quantized(groups.join(y.to(DTYPES[element.name]), x.shape[1]), used, scaling.name)


def _group_amax(x: Tensor, scaling: Scaling) -> Tensor:
    groups = Grouping(scaling, x.shape)
    return groups.amax(groups.split(x.float().abs()).amax(dim=-1))


def _over(amax: Tensor, largest: float) -> Tensor:
    """amax / largest. Dividing by a Python number would, on CUDA, multiply by its reciprocal: another scale
    in the last bit."""
    return amax.float() / amax.new_full((), largest, dtype=torch.float32)


def _rounded_up(scale: Tensor) -> Tensor:
    """To a power of two: carry any mantissa bit into the exponent, then drop the mantissa."""
    return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _usable(scale: Tensor, amax: Tensor) -> Tensor:
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, torch.ones_like(scale))
