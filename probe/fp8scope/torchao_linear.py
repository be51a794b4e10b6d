"""The live recipe of torchao's `Float8Linear`: which operand it casts to what, as its configuration says.

Its scales are current ones, of the whole tensor or of a row, so that a measurement of the same tensor with
the same recipe describes what the layer did; nothing has to be handed over. One difference stays: torchao
multiplies by the reciprocal of the scale, which gives another code to about one element in a million.

The configuration has one `CastConfig` for each operand, and another one for its use in wgrad, if that
differs. Operands that it leaves in high precision have no live series. Read from torchao 0.18.
"""

from typing import Any

import torch
from torch import nn

from fp8scope.casts import Cast
from fp8scope_protocol.formats import E4M3, E5M2

ELEMENTS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
SCALINGS = {"tensorwise": "tensorwise", "axiswise": "rowwise"}
CASTS = {
    ("activation", "rowwise"): "cast_config_input",
    ("activation", "columnwise"): "cast_config_input_for_grad_weight",
    ("weight", "rowwise"): "cast_config_weight",
    ("gradient", "rowwise"): "cast_config_grad_output",
    ("gradient", "columnwise"): "cast_config_grad_output_for_grad_weight",
}


LiveCasts = dict[tuple[str, str], Cast]
"""(role, orientation) -> cast."""


def live_casts(module: nn.Module) -> LiveCasts:
    """What `module` casts by itself; empty for any module that is no `Float8Linear`."""
    config = getattr(module, "config", None)
    if type(module).__name__ != "Float8Linear" or not isinstance(module, nn.Linear):
        return {}
    found = {}
    for key, name in CASTS.items():
        cast: Any = getattr(config, name, None)
        element = ELEMENTS.get(getattr(cast, "target_dtype", None))  # type: ignore[arg-type]
        scaling = SCALINGS.get(getattr(getattr(cast, "scaling_granularity", None), "value", ""))
        kind = getattr(getattr(cast, "scaling_type", None), "value", "")
        if element is not None and scaling is not None and kind == "dynamic":
            found[key] = Cast(element, scaling, bool(getattr(config, "round_scales_to_power_of_2", False)))
    return found
