"""Reading moments as an optimizer has stored them: the elements of a sample, decoded to fp32.

    floating point    exp_avg, exp_avg_sq shaped like the parameter, in 16 or 32 bits
    torchao, bitsandbytes    codes, see `codes`
    ours              codes and scales of blocks along rows, of v its root, see `our_states`

A state that does not exist yet reads as zeros, which is what it will start as.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8scope.bitsandbytes_states import bitsandbytes_codes
from fp8scope.codes import Codes
from fp8scope.our_states import EXACT, is_warming_up, our_moments
from fp8scope.quantize import DTYPES
from fp8scope.sample import Part, Sample
from fp8scope.sharding import local
from fp8scope.torchao_states import torchao_codes

MOMENTS = ("exp_avg", "exp_avg_sq")
BITSANDBYTES = {"exp_avg": "state1", "exp_avg_sq": "state2"}
FORMAT_OF = {DTYPES[name]: name for name in ("e4m3", "e5m2", "int8", "bf16")}

State = Mapping[str, Any]


Rounding = Literal["nearest", "stochastic"]


class StoredAs(NamedTuple):
    """Format, scaling and rounding of a stored moment, as in its series."""

    format: str
    scaling: str
    rounding: Rounding


class Moments(NamedTuple):
    """First and second moments of a sample, fp32 [elements]."""

    m: Tensor
    v: Tensor


def is_readable(parameter: Tensor, state: State) -> bool:
    """Whether `read_moments` knows how `state` stores the moments of a parameter."""
    return (not state or is_plain(parameter, state) or our_moments(parameter, state) is not None
            or _is_coded(state))


def may_lose(parameter: Tensor, state: State) -> bool:
    """Whether moments are stored in fewer than 32 bits, or it is not known yet."""
    return not state or is_warming_up(state) or stored_as(parameter, state) is not None


def codes_of(state: State, key: str) -> Codes | None:
    """The moment `key` of a parameter, where another library stores it as codes."""
    return torchao_codes(state, key) or bitsandbytes_codes(state, key)


def rounding_of(optimizer: Optimizer) -> Rounding:
    """How it rounds moments of 16 bits: by chance where it says so (`state_rounding`), else to nearest."""
    return "stochastic" if getattr(optimizer, "state_rounding", None) == "stochastic" else "nearest"


def stored_as(parameter: Tensor, state: State, rounding: Rounding = "nearest") -> StoredAs | None:
    """How the second moment is stored; None if in 32 bits or more, so that nothing is lost, or not yet.

    rounding: of the optimizer, for moments in 16 bits.
    """
    if (ours := our_moments(parameter, state)) is not None:
        return None if ours.scaling is None else StoredAs(ours.root_format, ours.scaling, "stochastic")
    if _is_coded(state) and (codes := codes_of(state, "exp_avg_sq")) is not None:
        return StoredAs(codes.format, codes.scaling, "nearest")
    if is_plain(parameter, state) and (name := FORMAT_OF.get(moment(state, "exp_avg_sq").dtype)) is not None:
        return StoredAs(name, "none", rounding)
    return None


def read_moments(sample: Sample, states: Sequence[State]) -> Moments:
    """The moments of a sample, given the state of each of its parts, all of them readable."""
    pairs = list(zip(sample.parts, states, strict=True))
    if all(is_plain(part.parameter, state) for part, state in pairs):
        m, v = (sample.gather([local(moment(state, key)) for state in states]).float() for key in MOMENTS)
        return Moments(m, v)
    found = [_read(part, state, sample.device) for part, state in pairs]
    return Moments(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _read(part: Part, state: State, device: torch.device) -> Moments:
    if not state:
        return Moments(torch.zeros(part.elements, device=device), torch.zeros(part.elements, device=device))
    at = part.indices(device)
    if is_plain(part.parameter, state):
        m, v = (local(moment(state, key)).reshape(-1)[at].float() for key in MOMENTS)
        return Moments(m, v)
    if (ours := our_moments(part.parameter, state)) is not None:
        return Moments(*ours.decoded(at))
    m, v = (codes.decoded(at) for key in MOMENTS if (codes := codes_of(state, key)) is not None)
    return Moments(m, v)


def is_plain(parameter: Tensor, state: State) -> bool:
    """Whether the moments are ordinary floating tensors."""
    shape = local(parameter).shape
    return all(
        isinstance(x := moment(state, key), Tensor) and type(y := local(x)) in (Tensor, torch.nn.Parameter)
        and y.is_floating_point() and y.element_size() > 1 and y.shape == shape for key in MOMENTS
    )


def moment(state: State, key: str) -> Any:
    """The stored moment `key`, by the name that its library gives it, or that of a warm-up."""
    return state.get(key, state.get(EXACT[key], state.get(BITSANDBYTES[key])))


def _is_coded(state: State) -> bool:
    return all(codes_of(state, key) is not None for key in MOMENTS)
