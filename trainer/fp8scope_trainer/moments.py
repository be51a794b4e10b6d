"""The states of one parameter: their keys, shapes and placements, and the matrix they are seen as.

A parameter is seen as a matrix [R, C], see `place`. Keys of a rule's moments, for exp_avg (exp_avg_sq and
momentum_buffer alike):

    exp_avg          codes, or values of fp32 and bf16; shaped like the parameter, of int4 [.., ceil(C / 2)]
    exp_avg_scale    fp32 [.., ceil(C / block)], of formats with blocks
    exp_avg_exact    fp32 like the parameter, instead of both, during the fp32 warm-up

`step` is a 0-dim fp32 tensor on the CPU, so reading it never waits for the device; `master` the fp32 weight
of a 16-bit parameter, where asked for. All but `step` are DTensors with the parameter's placement.

Two phases, two sets of keys. The warm-up takes 8 bytes a parameter that must be given back, so one schema for
both would have to keep them for ever. With other names a checkpoint of one phase never fits an optimizer in
the other unnoticed: torch.distributed.checkpoint finds a key missing, where under one name it would cast
codes to fp32 in silence. `make_states(steps)` brings a fresh optimizer into the phase of a checkpoint.

Only matrices of at least 4,096 elements, in all, leave fp32, and where columns are cut only those whose parts
are whole blocks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope_trainer.place import Place, as_matrix, columns_of, cut_of, filled, local
from fp8scope_trainer.rounding import hashed, key_of, lower, upper
from fp8scope_trainer.rules import Moments, Rule, root_of
from fp8scope_trainer.state_block import SMALLEST_QUANTIZED
from fp8scope_trainer.state_format import Encoded, StateFormat

MASTER = "master"

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What names the random numbers of one parameter's rounding in one step."""

    seed: int
    step: int
    stream: int
    """The parameter's number in the optimizer."""
    place: Place

    def bits(self, like: Tensor, *, weight: bool = False) -> Tensor:
        """Hashes for the elements of `like` [R, C], int64: of moments, or of the weight."""
        key = key_of(seed=self.seed, step=self.step, stream=self.stream, weight=weight)
        return hashed(self.place.indices(like), key)


class Slots(NamedTuple):
    """Where moments are stored: matrix views of codes and scales (see `state_format.Encoded`)."""

    signed: Encoded | None
    root: Encoded | None


class Stored(NamedTuple):
    """One moment as it was stored. x [R, C] is what was encoded; where it is quantized, sqrt(v) of v."""

    key: str
    x: Tensor
    encoded: Encoded


def exception(parameter: Tensor, format: StateFormat) -> str:
    """Why `parameter` keeps fp32 moments where its group asks for `format`; empty if it does not.

    Decided from the *global* shape and the placement, and so alike on every rank.
    """
    shape = parameter.shape
    if not format.rounds:
        return ""
    if len(shape) < 2:
        return "is no matrix"
    if shape.numel() < SMALLEST_QUANTIZED:
        return f"has fewer than {SMALLEST_QUANTIZED} elements"
    return cut_of(parameter, format.block)


def new_state(parameter: Tensor, rule: Rule, format: StateFormat, *, exact: bool, master: bool) -> State:
    """Zero moments with the placement of `parameter`; `exact`: those of the warm-up."""
    state = {"step": torch.zeros((), device="cpu")}
    for key in rule.keys:
        state |= _zeros(parameter, key, format, root=key == rule.root, exact=exact)
    if master:
        state[MASTER] = parameter.detach().float()
    return state


def slots(state: State, rule: Rule) -> Slots:
    """Views of the moments in `state`: of the exact ones while they are there."""
    return Slots(*(None if key is None else _slot(state, key) for key in (rule.signed, rule.root)))


def decode(stored: Slots, format: StateFormat, columns: int) -> Moments:
    """The moments in fp32. m is 0 where r is."""
    signed = None if stored.signed is None else format.decode(stored.signed, columns, root=False)
    if signed is None or stored.root is None:
        return Moments(signed, None)
    root = format.decode(stored.root, columns, root=True)
    if not format.quantized:
        return Moments(signed, root)
    return Moments(torch.where(root == 0, 0.0, signed), root * root)


def store(into: Slots, moments: Moments, rule: Rule, format: StateFormat, draw: Draw) -> tuple[Stored, ...]:
    """Writes the moments where they belong; says what was encoded."""
    if rule.signed is None or moments.signed is None:
        return ()
    bits = draw.bits(moments.signed) if format.rounds else torch.zeros((), dtype=torch.int64)
    done = [Stored(rule.signed, moments.signed, format.encode(moments.signed, upper(bits), root=False))]
    if rule.root is not None and moments.square is not None:
        x = root_of(moments.square) if format.quantized else moments.square
        done.append(Stored(rule.root, x, format.encode(x, lower(bits), root=True)))
    for place, one in zip(into, done, strict=False):
        assert place is not None
        place.codes.copy_(one.encoded.codes)
        if place.scales is not None and one.encoded.scales is not None:
            place.scales.copy_(one.encoded.scales)
    return tuple(done)


def end_warm_up(state: State, parameter: Tensor, rule: Rule, format: StateFormat, draw: Draw) -> None:
    """Encodes the exact moments of `state` and lets them go."""
    exact = decode(slots(state, rule), StateFormat.of("fp32"), columns_of(local(parameter).shape))
    for key in rule.keys:
        del state[f"{key}_exact"]
        state |= _zeros(parameter, key, format, root=key == rule.root, exact=False)
    store(slots(state, rule), exact, rule, format, draw)


def is_exact(state: State, rule: Rule) -> bool:
    """Whether `state` is in its fp32 warm-up."""
    return f"{rule.signed}_exact" in state


def _slot(state: State, key: str) -> Encoded:
    codes, scales = state.get(f"{key}_exact", state.get(key)), state.get(f"{key}_scale")
    assert codes is not None
    return Encoded(as_matrix(codes), None if scales is None else as_matrix(scales))


def _zeros(parameter: Tensor, key: str, format: StateFormat, *, root: bool, exact: bool) -> State:
    """The keys of one moment."""
    if exact:
        return {f"{key}_exact": filled(parameter, parameter.shape, torch.float32, 0)}
    dtype = format.dtype(root=root)
    if not format.quantized:
        return {key: filled(parameter, parameter.shape, dtype, 0)}
    columns = columns_of(parameter.shape)
    packed = format.stored_columns(columns)
    codes = parameter.shape if packed == columns else _with_columns(parameter.shape, packed)
    scales = _with_columns(parameter.shape, format.blocks(columns))
    return {key: filled(parameter, codes, dtype, 0),
            f"{key}_scale": filled(parameter, scales, torch.float32, 1)}


def _with_columns(shape: torch.Size, columns: int) -> torch.Size:
    """Of what has `columns` numbers for each row of a matrix of this shape; rows are dealt out alike."""
    return torch.Size((*(shape[:-1] if len(shape) < 4 else shape[:1]), columns))
