"""The state_dict of a plain torch.optim.AdamW or Adam, as ours load it."""

from typing import Any

from torch import Tensor

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.rules import ADAM, ADAMW

OPTIONS = ("params", "param_names", "lr", "initial_lr", "betas", "eps", "weight_decay")
"""Options that both have."""


def from_torch(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` of a torch.optim.AdamW or Adam as one of ours with states="fp32".

    What to load it into has the same groups of parameters. Moments in 16 bits become fp32. `Invalid` for
    another optimizer, and for amsgrad and maximize, which ours have not.
    """
    groups = [_group(group) for group in state_dict["param_groups"]]
    states = {number: _state(state) for number, state in state_dict["state"].items()}
    return {"state": states, "param_groups": groups}


def _group(group: dict[str, Any]) -> dict[str, Any]:
    if "decoupled_weight_decay" not in group:
        raise Invalid("state_dict", sorted(group), "must be of an AdamW or Adam of torch 2.7 or later")
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise Invalid(option, True, "is not for our optimizers; accepted: False")
    rule = ADAMW if group["decoupled_weight_decay"] else ADAM
    kept = {key: value for key, value in group.items() if key in OPTIONS}
    return kept | {"rule": rule.name, "states": "fp32"}


def _state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.float() if isinstance(value, Tensor) else value for key, value in state.items()}
