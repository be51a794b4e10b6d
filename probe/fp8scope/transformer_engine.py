"""The live recipe of TransformerEngine's `Linear`, `LayerNormLinear`, `LayerNormMLP` and `GroupedLinear`.

Untested against a real TransformerEngine, which needs CUDA to be imported; read from the sources of 2.20. No
library is imported: a module is told by the name of its class and by its attributes.

    fp8            whether its last forward ran in FP8, as the autocast around it said
    quantizers     of forward (input, weight, output of each GEMM), of backward (grad_output, grad_input)
    fp8_meta       its recipe

A quantizer is what really casts, so it is asked, not the recipe. That of delayed scaling holds `scale`, one
element, which x is *multiplied* by and which is brought up to date behind the last forward and the last
backward of a pass: read in the layer's own forward hook, and in the hook of its output's gradient, it is the
one that is used. The others take current scales, so the same cast of the same tensor describes them. A
layer's first forward makes its quantizers, so before it nothing is known.

What no hook sees is not measured: the operand of a GEMM behind a normalisation or an activation inside the
layer. Its input is another tensor, and measuring that in its place would be wrong.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.casts import Cast
from fp8scope.sharding import unreadable
from fp8scope_protocol.formats import E4M3, E5M2, MXFP8

HIDDEN = {
    "LayerNormLinear": "activation not observed: the GEMM's operand is normalised inside the layer",
    "LayerNormMLP": "activations and the gradient between its GEMMs not observed: they stay inside the layer",
}
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
ELEMENTS = {"kFloat8E4M3": E4M3, "kFloat8E5M2": E5M2}
PLACES = {
    "activation": ("scaling_fwd", 3, 0),
    "weight": ("scaling_fwd", 3, 1),
    "gradient": ("scaling_bwd", 2, 0),
}
"""Role -> which quantizers, how many of them a GEMM has, place among these."""
STASHED = "global_fp8_buffer_pos_fwd_recompute"
"""In `fp8_meta` of a layer under TransformerEngine's own checkpointing."""


def engine_kind(module: nn.Module) -> str:
    """Which of KINDS a module is, subclasses included; empty for any other."""
    if not isinstance(vars(module).get("fp8_meta"), dict):
        return ""
    return next((one.__name__ for one in type(module).__mro__ if one.__name__ in KINDS), "")


def weight_keys(module: nn.Module) -> tuple[str, ...]:
    """Names of its matrices: one a GEMM, unless a `Linear` is split into several parameters."""
    return tuple(key for key, one in module._parameters.items() if one is not None and one.dim() == 2)


def engine_cast(module: Any, role: str, orientation: str, gemm: int = 0) -> Cast | None:
    """How an operand of the forward that just ran is cast; None where it is not, or in a way not read."""
    found = _cast(module, role, gemm)
    backward = role == "gradient" or (role, orientation) == ("activation", "columnwise")
    return None if isinstance(found, str) or (backward and _overridden(module)) else found


def unread(module: Any) -> Iterator[str]:
    """What of the forward that just ran cannot be told, and why."""
    kind, keys = engine_kind(module), weight_keys(module)
    if kind in HIDDEN:
        yield HIDDEN[kind]
    if not keys:
        yield "weights not observed: no parameter is a matrix"
    for key in keys:
        if kind := unreadable(module._parameters[key]):
            yield f"{key} cannot be read: {kind}"
    if _overridden(module):
        yield "live casts of the backward pass not observed: the recipe overrides it"
    for role in PLACES:
        if role != "activation" or kind not in HIDDEN:
            reason = _cast(module, role, len(keys) - 1 if kind == "LayerNormMLP" else 0)
            if isinstance(reason, str) and reason:
                yield f"live cast of its {role} not observed: {reason}"


def group_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """How many rows of its input a `GroupedLinear` takes for each GEMM; None where only the device knows."""
    given = kwargs.get("m_splits", args[1] if len(args) > 1 else ())
    if isinstance(given, Tensor):
        return tuple(given.tolist()) if given.device.type == "cpu" else None
    return tuple(int(one) for one in given)


def by_gemm(x: Tensor, rows: tuple[int, ...]) -> list[tuple[int, Tensor]]:
    """(GEMM, its part of x [R, C]), those without rows left out; no `rows`: all belong to the first."""
    if not rows:
        return [(0, x)]
    parts = x[:sum(rows)].split_with_sizes(list(rows))
    return [(gemm, part) for gemm, part in enumerate(parts) if len(part)]


def _cast(module: Any, role: str, gemm: int) -> Cast | str:
    """The cast, or why it is not read; empty where there is none."""
    if not getattr(module, "fp8", False):
        return ""
    key, stride, place = PLACES[role]
    made: Any = getattr(module, "quantizers", None)
    if not isinstance(made, dict):
        return "it has no quantizers (TransformerEngine before 2.0)"
    at = gemm * stride + place
    found = made.get(key, ())
    if at >= len(found):
        return "it has no quantizer"
    parts = len(weight_keys(module)) if engine_kind(module) in ("Linear", "LayerNormLinear") else 1
    if role == "weight" and parts > 1:
        return f"it is put together from {parts} parameters"
    if role != "gradient" and STASHED in module.fp8_meta and torch._C._current_graph_task_id() != -1:
        return "computed again by checkpointing, with a scale that is kept elsewhere"
    return _of_quantizer(found[at])


def _of_quantizer(quantizer: Any) -> Cast | str:
    name = type(quantizer).__name__
    if name == "IdentityQuantizer":
        return ""
    if name not in _READERS:
        return f"{name} is not read"
    element = ELEMENTS.get(getattr(getattr(quantizer, "dtype", None), "name", ""))
    if element is None:
        return f"its codes are {getattr(quantizer, 'dtype', None)}"
    if getattr(quantizer, "with_amax_reduction", False):
        return "its amax is that of several ranks"
    if getattr(quantizer, "amax_epsilon", 0.0):
        return f"its amax is at least {quantizer.amax_epsilon:g}"
    return _READERS[name](quantizer, element)


def _delayed(quantizer: Any, element: Any) -> Cast | str:
    return Cast(element, "tensorwise", multiplier=quantizer.scale)


def _current(quantizer: Any, element: Any) -> Cast | str:
    return Cast(element, "tensorwise", bool(quantizer.force_pow_2_scales))


def _blocks(quantizer: Any, element: Any) -> Cast | str:
    scaling = "tile 1x128" if quantizer.block_scaling_dim == 1 else "block 128x128"
    return Cast(element, scaling, bool(quantizer.force_pow_2_scales))


def _mx(quantizer: Any, element: Any) -> Cast | str:
    if element is not E4M3:
        return "MX groups of E5M2 have no format here"
    if getattr(quantizer, "with_2d_quantization", False):
        return "MX groups of 32x32 have no scaling here"
    return Cast(MXFP8, "mx 1x32 rceil")


_READERS = {"Float8Quantizer": _delayed, "Float8CurrentScalingQuantizer": _current,
            "Float8BlockQuantizer": _blocks, "MXFP8Quantizer": _mx}


def _overridden(module: Any) -> bool:
    """Whether the backward pass runs in another precision than the forward pass."""
    recipe = module.fp8_meta.get("recipe")
    return bool(getattr(module, "fp8", False)) and getattr(recipe, "backward_override", None) is not None
