"""The state of one parameter in another format: decoded to fp32 moments, encoded again, rounded by the hash.

The format that a state is in follows from its tensors: dtypes, and the number of scales, which one power of
two gives where there is more than one to a row. With one to a row all blocks that long are the same.
"""

from torch import Tensor

from fp8scope_trainer.moments import MASTER, Draw, State, decode, is_exact, new_state, slots, store
from fp8scope_trainer.place import columns_of, local
from fp8scope_trainer.rules import Rule
from fp8scope_trainer.state_block import BLOCKS
from fp8scope_trainer.state_format import DTYPES, StateFormat

FP32 = StateFormat.of("fp32")


def reformatted(
    state: State, parameter: Tensor, rule: Rule, before: StateFormat, after: StateFormat, draw: Draw, *,
    exact: bool = False,
) -> State:
    """`state`, which is in `before`, in `after`; exact: as in its warm-up. Steps and master stay."""
    moments = decode(slots(state, rule), before, columns_of(local(parameter).shape))
    new = new_state(parameter, rule, after, exact=exact, master=False)
    store(slots(new, rule), moments, rule, FP32 if exact else after, draw)
    return new | {key: state[key] for key in ("step", MASTER) if key in state}


def format_in(state: State, parameter: Tensor, rule: Rule) -> StateFormat | None:
    """What the moments of `rule` are stored in, fp32 in a warm-up; None if they are not there."""
    if is_exact(state, rule):
        return FP32
    if not rule.keys or any(key not in state for key in rule.keys):
        return None
    dtypes = tuple(state[key].dtype for key in rule.keys)
    name = next((name for name, known in DTYPES.items() if known[:len(dtypes)] == dtypes), None)
    if name is None:
        return None
    if name not in BLOCKS:
        return StateFormat.of(name)
    low, high, _ = BLOCKS[name]
    columns, block = columns_of(parameter.shape), low
    scales = state[f"{rule.keys[0]}_scale"].shape[-1]
    while block < high and -(-columns // block) > scales:
        block *= 2
    return StateFormat.of(name, block)


def is_as_asked(state: State, parameter: Tensor, rule: Rule, format: StateFormat, *, master: bool) -> bool:
    """Whether `state` is what a group of these options has; in a warm-up, will have."""
    if (MASTER in state) != master:
        return False
    if not rule.keys:
        return not state.keys() - {"step", MASTER}
    if is_exact(state, rule):
        return format.rounds
    found, columns = format_in(state, parameter, rule), columns_of(parameter.shape)
    return found is not None and found.name == format.name and (
        not format.block or found.blocks(columns) == format.blocks(columns))


def as_asked(
    state: State, parameter: Tensor, rule: Rule, format: StateFormat, draw: Draw, *, master: bool
) -> State:
    """`state` as a group of these options has it: in another format, with a momentum or a master that begins
    now, or without."""
    found = format_in(state, parameter, rule)
    if found is None:
        new = new_state(parameter, rule, format, exact=False, master=False)
        new["step"] = state["step"]
    else:
        new = reformatted(state, parameter, rule, found, format, draw)
    if master:
        new[MASTER] = state[MASTER] if MASTER in state else parameter.detach().float()
    else:
        new.pop(MASTER, None)
    return new
