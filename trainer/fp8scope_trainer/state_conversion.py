"""Any format of optimizer states to any other: decoded to fp32 moments, encoded again, rounded by the hash.

What changes format: matrices of at least 4,096 elements. What stays fp32: the others, and embeddings and
output heads that are fp32 in the source. States that have the format already keep their codes. The same
source gives the same codes each time: seed, step and the parameter's number name the random numbers, as in
training.

A warm-up is kept: where the optimizer would still have exact moments at this step, they stay exact.

Rejected: conversion in `load`. It would make a mistake in the optimizer's options look like a wish, and round
again at each restart.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.convert import is_head
from fp8scope_trainer.job import parsed, shown, stored_dtypes
from fp8scope_trainer.manifest import Job, Optimized
from fp8scope_trainer.moments import MASTER, Draw, State, exception, is_exact
from fp8scope_trainer.place import Place
from fp8scope_trainer.reformat import FP32, reformatted
from fp8scope_trainer.rules import RULES, Rule, rule_of
from fp8scope_trainer.state_format import StateFormat
from fp8scope_trainer.whole_checkpoint import (
    COMMON,
    TORCH_ADAMW,
    Whole,
    read_whole,
    write_dcp,
    write_ours,
    write_torch,
)

OURS_ADAMW = "fp8scope_trainer.AdamW"
KINDS = ("fp8scope", "dcp", "torch")
EMBEDDING_NAMES = frozenset({"embed", "embedding", "embeddings", "embed_tokens", "tok_embeddings", "wte",
                             "wpe"})
"""Last part of the names of embeddings, for checkpoints that do not say which those are."""


def convert_states(
    source: str | Path, target: str | Path, *, states: str = "fp32", block: int | None = None,
    kind: str = "fp8scope",
) -> Path:
    """Writes the checkpoint of `source` to `target` with its states in another format; returns where it is.

    source: a folder of checkpoints (its newest is taken), one of them, a DCP folder or a torch.save file of a
    plain torch.optim.AdamW. states, block: as an optimizer's group takes them. kind: `fp8scope`, a folder
    that `checkpoint.load` reads; `dcp` or `torch`, for a plain torch.optim.AdamW, states="fp32" only.
    One process holds the whole checkpoint in memory. Raises `Invalid` for what cannot be, `NotSaved`.
    """
    if kind not in KINDS:
        raise Invalid("kind", kind, f"must be one of {', '.join(KINDS)}")
    wanted = StateFormat.of(states, block)
    whole = read_whole(Path(source))
    if not whole.job.optimizer:
        raise Invalid("checkpoint", str(source), "holds no optimizer, so no states")
    if kind == "fp8scope":
        if Path(target).resolve() in (found := Path(source).resolve(), *found.parents):
            raise Invalid("to", str(target), "holds the checkpoint that is converted; name another folder")
        return write_ours(_converted(_as_ours(whole), wanted), Path(target))
    if wanted != FP32 or whole.job.optimizer not in (OURS_ADAMW, TORCH_ADAMW):
        raise Invalid("kind", kind, f"is for states='fp32' of an AdamW; asked: {states} of "
                                    f"{whole.job.optimizer}")
    plainly = _as_torch(_converted(_as_ours(whole), FP32))
    return (write_dcp if kind == "dcp" else write_torch)(plainly, Path(target))


def _as_ours(whole: Whole) -> Whole:
    """A plain AdamW under our name; the options are the same ones."""
    if whole.job.optimizer != TORCH_ADAMW:
        return whole
    job = replace(whole.job, optimizer=OURS_ADAMW, rule="adamw")
    return Whole(record=replace(whole.record, job=job), content=whole.content, states=whole.states)


def _as_torch(whole: Whole) -> Whole:
    """Only what torch's AdamW has, if nothing that a step needs is lost."""
    for name, state in whole.states.items():
        if MASTER in state or any(key.endswith("_exact") for key in state):
            raise Invalid("checkpoint", f"{name} has {', '.join(state)}",
                          "torch's AdamW has neither masters nor a warm-up")
    groups = [{key: value for key, value in group.items() if key in COMMON} for group in whole.job.groups]
    job = replace(whole.job, optimizer=TORCH_ADAMW, groups=groups)
    return Whole(record=replace(whole.record, job=job), content=whole.content, states=whole.states)


def _converted(whole: Whole, wanted: StateFormat) -> Whole:
    job = whole.job
    if job.rule not in RULES:
        raise Invalid("rule", job.rule or job.optimizer, f"must be one of {', '.join(RULES)}")
    rule, states, optimized = RULES[job.rule], {}, {}
    for number, (name, known) in enumerate(job.optimized.items()):
        weight = whole.content["model"][name]
        format = FP32 if _stays(job, name, known, weight, wanted) else wanted
        group = job.groups[known.group]
        if state := whole.states.get(name):
            seed = int(group.get("seed", 0))
            draw = Draw(seed=seed, step=int(state["step"]), stream=number, place=Place(0))
            states[name] = _state(state, weight, rule_of(rule, group), (parsed(known.states), format), group,
                                  draw)
        optimized[name] = Optimized(number=None, group=known.group, states=shown(format),
                                    stored=stored_dtypes(states.get(name, {})))
    groups = [options | _group_format(number, optimized, wanted) for number, options in enumerate(job.groups)]
    job = replace(job, groups=groups, optimized=optimized)
    return Whole(record=replace(whole.record, job=job, files={}), content=whole.content, states=states)


def _state(
    state: State, weight: Tensor, rule: Rule, formats: tuple[StateFormat, StateFormat],
    group: dict[str, Any], draw: Draw,
) -> State:
    """The state of one parameter in the second format."""
    before, after = formats
    exact = after.rounds and draw.step < int(group.get("warmup_steps", 0))
    if is_exact(state, rule):
        before = FP32
    elif before == after:
        return state
    return reformatted(state, weight, rule, before, after, draw, exact=exact)


def _stays(job: Job, name: str, known: Optimized, weight: Tensor, wanted: StateFormat) -> bool:
    if exception(weight, wanted):
        return True
    layer = name.rpartition(".")[0]
    is_kept = name in job.embeddings or is_head(layer) or (
        not job.embeddings and layer.rpartition(".")[2] in EMBEDDING_NAMES)
    return is_kept and known.states == "fp32"


def _group_format(number: int, optimized: dict[str, Optimized], wanted: StateFormat) -> dict[str, Any]:
    """What the options of a group say of its states."""
    has = any(one.group == number and one.states == shown(wanted) for one in optimized.values())
    format = wanted if has else FP32
    return {"states": format.name, "block": format.block or None}
