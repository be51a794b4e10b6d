"""Parameter groups: which parameters get which states, and what a group may ask for.

Embedding and head keep fp32 moments, and so do vectors, which are not decayed either. An override names
parameters by pattern (`layers.0.*`, `**.qkv.weight`) and wins over the rule.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.series import canonical_name, matching_names
from fp8scope_trainer.convert import is_head
from fp8scope_trainer.moments import MASTER, exception
from fp8scope_trainer.rules import SGD, Rule
from fp8scope_trainer.state_block import BLOCKS
from fp8scope_trainer.state_format import StateFormat

Group = dict[str, Any]


def parameter_groups(
    model: nn.Module, *, states: str = "fp8", block: int | None = None, weight_decay: float = 0.1,
    overrides: Mapping[str, str] | None = None,
) -> list[Group]:
    """Groups for our optimizers. `overrides`: pattern of parameter names -> states; the last match wins.

    `UnknownName` for a pattern that matches nothing, `Invalid` for states that a parameter cannot have.
    """
    StateFormat.of(states, block)
    embedded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    chosen = _chosen(named, overrides or {})
    groups: dict[tuple[str, float], list[Tensor]] = {(states, weight_decay): []}
    for name, parameter in named.items():
        is_kept = parameter in embedded or is_head(name.rpartition(".")[0])
        format = chosen.get(name, "fp32" if parameter.dim() < 2 or is_kept else states)
        decay = weight_decay if parameter.dim() >= 2 else 0.0
        groups.setdefault((format, decay), []).append(parameter)
    return [_group(params, format, block if format == states else None, decay)
            for (format, decay), params in groups.items() if params]


def format_of_group(group: Mapping[str, Any]) -> StateFormat:
    """The states that a group asks for."""
    return StateFormat.of(group["states"], group.get("block"))


def check_group(rule: Rule, group: Mapping[str, Any]) -> None:
    """`Invalid` where an option of a group would be ignored or cannot work."""
    format_of_group(group)
    if group["rule"] != rule.name:
        raise Invalid("rule", group["rule"], f"of this optimizer is {rule.name}")
    if not 0 <= _number("lr", group["lr"]) < math.inf:
        raise Invalid("lr", group["lr"], "must be 0 or more, and finite")
    if rule is SGD:
        if not 0 <= group["momentum"] < 1:
            raise Invalid("momentum", group["momentum"], "must be in [0, 1)")
        if group["nesterov"] and not group["momentum"]:
            raise Invalid("nesterov", True, "needs a momentum above 0")
    elif len(group["betas"]) != 2 or not all(0 <= _number("betas", beta) < 1 for beta in group["betas"]):
        raise Invalid("betas", group["betas"], "must be two numbers in [0, 1)")
    if not group.get("eps", 1.0) > 0:
        raise Invalid("eps", group["eps"], "must be above 0")
    if not 0 <= _number("weight_decay", group["weight_decay"]) < math.inf:
        raise Invalid("weight_decay", group["weight_decay"], "must be 0 or more, and finite")
    clip = group.get("clip")
    if clip is not None and not clip > 0:
        raise Invalid("clip", clip, "must be above 0, or None for no clipping")
    for name in ("warmup_steps", "seed"):
        if not isinstance(group[name], int) or group[name] < 0:
            raise Invalid(name, group[name], "must be a whole number, 0 or more")


def _number(name: str, value: Any) -> float:
    """`value` as a float; a tensor of one element is a number, too."""
    if isinstance(value, str):
        raise Invalid(name, value, "must be a number")
    return float(value)


def check_weights(group: Mapping[str, Any]) -> None:
    """`Invalid` where a weight of a group cannot be stepped as asked."""
    for parameter in group["params"]:
        if group["master"] and parameter.dtype not in (torch.bfloat16, torch.float16):
            raise Invalid("master", True, f"is for bf16 and fp16 parameters; one here is {parameter.dtype}")
        if not group["master"] and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise Invalid("params", str(parameter.dtype), "must be fp32 or bf16; fp16 needs master=True")


def check_rule(rule: Rule, states: Mapping[Any, Mapping[str, Any]]) -> None:
    """`Invalid` where saved states are not those of the rule. Adam's and AdamW's have the same keys: groups
    say which it was."""
    wanted = set(rule.keys)
    for state in states.values():
        kept = {key.removesuffix("_exact") for key in state} - {"step", MASTER}
        kept = {key for key in kept if not key.endswith("_scale")}
        if state and kept != wanted and (kept or rule is not SGD):  # without a momentum it keeps nothing
            raise Invalid("state_dict", sorted(kept),
                          f"must hold the states of {rule.name}: {sorted(wanted)}")


def check_loaded(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """`Invalid` where saved groups store their states in another way than this optimizer's."""
    if not all("states" in group for group in saved):
        raise Invalid("state_dict", sorted(saved[0]) if saved else None,
                      "must be of an optimizer of fp8scope_trainer; of torch's AdamW or Adam load "
                      "torch_states.from_torch(state_dict)")
    for field, default in (("rule", None), ("states", None), ("block", None), ("master", False)):
        mine = [_asked(group, field, default) for group in own]
        theirs = [_asked(group, field, default) for group in saved]
        if mine != theirs:
            raise Invalid(field, theirs, f"must be what this optimizer's groups have: {mine}")


def _asked(group: Mapping[str, Any], field: str, default: Any) -> Any:
    value = group.get(field, default)
    if field == "block" and value is None and group.get("states") in BLOCKS:
        return BLOCKS[group["states"]][2]
    return value


def _chosen(named: Mapping[str, Tensor], overrides: Mapping[str, str]) -> dict[str, str]:
    """Name -> states, of the parameters that an override names."""
    chosen: dict[str, str] = {}
    for pattern, states in overrides.items():
        format = StateFormat.of(states)
        matched = matching_names(pattern, list(named))
        if not matched:
            raise UnknownName("overrides", pattern, named)
        for name in matched:
            if reason := exception(named[name], format):
                raise Invalid("overrides", {pattern: states}, f"{name} {reason}; it can only have fp32")
            chosen[name] = states
    return chosen


def _group(params: list[Tensor], states: str, block: int | None, weight_decay: float) -> Group:
    group: Group = {"params": params, "states": states, "weight_decay": weight_decay}
    return group if block is None else group | {"block": block}
