"""Reading moments as an optimizer has stored them: the elements of a sample, decoded to fp32.

    floating point    exp_avg, exp_avg_sq shaped like the parameter, in 16 or 32 bits
    ours              E4M3 codes, scales of [1,128] tiles in exp_avg_scale, exp_avg_sq_scale; of v its root

A state that does not exist yet reads as zeros, which is what it will start as.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8scope.quantize import decode
from fp8scope.sample import Part, Sample
from fp8scope.sharding import local
from fp8scope_protocol.formats import TILE

MOMENTS = ("exp_avg", "exp_avg_sq")

State = Mapping[str, Any]


class Moments(NamedTuple):
    """First and second moments of a sample, fp32 [elements]."""

    m: Tensor
    v: Tensor


def is_readable(part: Part, state: State) -> bool:
    """Whether `read_moments` knows how `state` stores the moments of a parameter."""
    return not state or _is_floating(part, state) or _is_ours(part, state)


def is_exact(part: Part, state: State) -> bool:
    """Whether `state` holds the moments in 32 bits or more, so that nothing is lost in it."""
    return _is_floating(part, state) and all(state[key].element_size() >= 4 for key in MOMENTS)


def read_moments(sample: Sample, states: list[State]) -> Moments:
    """The moments of a sample, given the state of each of its parts, all of them readable."""
    pairs = list(zip(sample.parts, states, strict=True))
    if all(_is_floating(part, state) for part, state in pairs):
        m, v = (sample.gather([local(state[key]) for state in states]).float() for key in MOMENTS)
        return Moments(m, v)
    found = [_read(part, state, sample.device) for part, state in pairs]
    return Moments(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _read(part: Part, state: State, device: torch.device) -> Moments:
    if not state:
        return Moments(torch.zeros(part.elements, device=device), torch.zeros(part.elements, device=device))
    at = part.indices(device)
    if _is_floating(part, state):
        m, v = (local(state[key]).reshape(-1)[at].float() for key in MOMENTS)
        return Moments(m, v)
    return _read_ours(state, at)


def _read_ours(state: State, at: Tensor) -> Moments:
    m, root = (_tiled(local(state[key]), local(state[f"{key}_scale"]), at) for key in MOMENTS)
    return Moments(torch.where(root == 0, 0.0, m), root.square())  # as our optimizer decodes them


def _tiled(codes: Tensor, scales: Tensor, at: Tensor) -> Tensor:
    """codes [R, C] times the scales [R, ceil(C / 128)] of their tiles, at flat indices."""
    columns = codes.shape[1]
    values = decode(codes.reshape(-1).view(torch.uint8)[at].view(codes.dtype))
    return values * scales[at // columns, at % columns // TILE]


def _is_floating(part: Part, state: State) -> bool:
    shape = local(part.parameter).shape
    return all(
        isinstance(x := state.get(key), Tensor) and type(y := local(x)) in (Tensor, torch.nn.Parameter)
        and y.is_floating_point() and y.element_size() > 1 and y.shape == shape for key in MOMENTS
    )


def _is_ours(part: Part, state: State) -> bool:
    return part.parameter.dim() == 2 and all(
        isinstance(x := state.get(key), Tensor) and local(x).dtype == torch.float8_e4m3fn
        and isinstance(state.get(f"{key}_scale"), Tensor) for key in MOMENTS
    )
