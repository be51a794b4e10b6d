"""AdamW's two moments, as the optimizer stores them: fp32, or E4M3 in [1,128] tiles.

Of v its square root r is stored, never as zero where v is positive: v then spans 2 x 17 binades in a tile
instead of 17, and m / r cannot explode through a lost v. m decodes as 0 where r is 0. Tiles never cross a
row, so rows can move between ranks and keep their codes.

Both are rounded stochastically. Nearest would stall: of v, at beta2 = 0.999, a step moves r by 0.05 % where
half a code is 3 %; of m, at beta1 = 0.9, 0.9 times any of the four smallest codes rounds back to it, and a
weight whose gradient has ended drifts on for ever. Measured, lr 1e-3, 1,000 steps: Adam comes to rest at
-0.03, stochastic m at -0.033, nearest m is at -1.75 and moving.

State of an fp32 parameter: exp_avg, exp_avg_sq. Of an E4M3 one: exp_avg, exp_avg_sq (codes, shaped like the
parameter) and exp_avg_scale, exp_avg_sq_scale (fp32 [R, ceil(C / 128)]).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8scope.quantize import Quantized, dequantize, scale_of, tile_amax
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, TILE
from fp8scope_trainer.rounding import round_e4m3, uniform

CODES = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
SMALLEST_QUANTIZED = 4096
"""Parameters with fewer elements, in all, keep fp32 moments: nothing to gain, much to lose."""

State = dict[str, Tensor]


class Moments(NamedTuple):
    """First and second moment, fp32, shaped like the local parameter."""

    m: Tensor
    v: Tensor


class Encoded(NamedTuple):
    """One moment as it was stored. x [R, C] is what was encoded; for exp_avg_sq that is sqrt(v)."""

    role: str
    x: Tensor
    quantized: Quantized


class Draw(NamedTuple):
    """What names the random numbers of one parameter's rounding in one step."""

    seed: int
    step: int
    stream: int


def quantizable(shape: torch.Size) -> bool:
    """Whether a parameter of this *global* shape may have E4M3 moments; the same on every rank and mesh."""
    return len(shape) == 2 and shape.numel() >= SMALLEST_QUANTIZED


def new_state(parameter: Tensor, *, quantized: bool) -> State:
    """Zero moments with the placement of `parameter`."""
    if not quantized:
        return {key: torch.zeros_like(parameter, dtype=torch.float32) for key in CODES}
    rows, columns = parameter.shape
    tiles = (rows, -(-columns // TILE))
    local_rows = local(parameter).shape[0]
    state = {}
    for key in CODES:
        codes = torch.zeros_like(local(parameter), dtype=torch.float8_e4m3fn)
        state[key] = _placed(codes, parameter, (rows, columns))
    for key in SCALES:
        scales = torch.ones(local_rows, tiles[1], device=parameter.device)
        state[key] = _placed(scales, parameter, tiles)
    return state


def decode(state: State) -> Moments:
    """The local moments in fp32."""
    if SCALES[0] not in state:
        return Moments(local(state["exp_avg"]), local(state["exp_avg_sq"]))
    m, r = (
        dequantize(Quantized(local(state[code]), local(state[scale]), "tile 1x128"))
        for code, scale in zip(CODES, SCALES, strict=True)
    )
    return Moments(torch.where(r == 0, 0.0, m), r.square())


def store(state: State, moments: Moments, draw: Draw) -> tuple[Encoded, ...]:
    """Writes the moments into `state`, in place; says what was encoded, which is nothing for fp32 states."""
    if SCALES[0] not in state:
        for key, value in zip(CODES, moments, strict=True):
            local(state[key]).copy_(value)
        return ()
    row, root = first_row(state["exp_avg"]), moments.v.sqrt()
    encoded = (
        Encoded("exp_avg", moments.m, _round(moments.m, row, draw._replace(stream=2 * draw.stream))),
        Encoded("exp_avg_sq", root, _round(root, row, draw._replace(stream=2 * draw.stream + 1),
                                           keep_nonzero=True)),
    )
    for code, scale, one in zip(CODES, SCALES, encoded, strict=True):
        local(state[code]).copy_(one.quantized.codes)
        local(state[scale]).copy_(one.quantized.scales)
    return encoded


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Global index of the first local row. Rows are dealt out in chunks of ceil(rows / ranks)."""
    if not isinstance(tensor, DTensor):
        return 0
    offset, size = 0, tensor.shape[0]
    coordinates: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    for dimension, (placement, coordinate) in enumerate(zip(tensor.placements, coordinates, strict=True)):
        if type(placement) is Shard and placement.dim == 0:
            chunk = -(-size // tensor.device_mesh.size(dimension))
            start = min(chunk * coordinate, size)
            offset, size = offset + start, min(chunk, size - start)
        elif not isinstance(placement, Replicate):
            raise Invalid("placements", tensor.placements, "E4M3 needs whole rows: Shard(0) or Replicate")
    return offset


def _round(x: Tensor, row: int, draw: Draw, *, keep_nonzero: bool = False) -> Quantized:
    """Stochastically rounded tiles of x [R, C], whose first row is row `row` of the whole tensor."""
    rows, columns = x.shape
    scales = scale_of(tile_amax(x), E4M3)
    wide = scales.repeat_interleave(TILE, dim=1)[:, :columns]
    indices = torch.arange(row * columns, (row + rows) * columns, device=x.device).view(rows, columns)
    random = uniform(indices, seed=draw.seed, step=draw.step, stream=draw.stream)
    return Quantized(round_e4m3(x / wide, random, keep_nonzero=keep_nonzero), scales, "tile 1x128")


def _placed(tensor: Tensor, like: Tensor, shape: tuple[int, int]) -> Tensor:
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, like.placements, run_check=False,
                              shape=torch.Size(shape), stride=(shape[1], 1))
