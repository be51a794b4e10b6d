"""What every layer runs in, and switching it."""

from collections.abc import Iterable
from contextlib import suppress

from torch import nn

from fp8scope.layers import Layer, weight_of
from fp8scope.observer import Switchable
from fp8scope_protocol.commands import Precision, SetPrecision
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.wire import ModulePrecision

DTYPE_NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16",
               "torch.float64": "fp64"}


def precision_map(layers: tuple[Layer, ...]) -> tuple[ModulePrecision, ...]:
    """Every watched layer: what it runs in, whether that can be changed, and if not, why."""
    return tuple(_precision_of(layer) for layer in layers)


def set_precision(layers: tuple[Layer, ...], action: SetPrecision) -> str:
    """Switches the named layers, all of them or, raising `Invalid`, none.

    Returns what all of them run in now; empty where they differ.

    To be called at a step boundary, alike on all ranks. A wish for `bf16` becomes `shadow` in layers that can
    do it, so that a return to FP8 can be judged.
    """
    known = {layer.name: layer.module for layer in layers}
    chosen: list[Switchable] = []
    for name in action.modules:
        if name not in known:
            raise UnknownName("modules", name, known)
        module = known[name]
        if not isinstance(module, Switchable):
            raise Invalid("modules", name, f"cannot be switched: {_why_not(module)}")
        chosen.append(module)
    before = [layer.precision for layer in chosen]
    try:
        for layer in chosen:
            _switch(layer, action.precision)
    except Exception as error:
        for layer, precision in zip(chosen, before, strict=True):
            layer.set_precision(precision)
        raise Invalid("precision", action.precision, f"a layer refused it: {error}") from error
    return joint(layer.precision for layer in chosen)


def joint(precisions: Iterable[str]) -> str:
    """The precision that all are; empty where they differ."""
    found = set(precisions)
    return found.pop() if len(found) == 1 else ""


def _switch(layer: Switchable, precision: Precision) -> None:
    if precision == "bf16":
        with suppress(ValueError, NotImplementedError):  # a layer without a shadow mode
            layer.set_precision("shadow")
            return
    layer.set_precision(precision)


def _precision_of(layer: Layer) -> ModulePrecision:
    module = layer.module
    if isinstance(module, Switchable):
        return ModulePrecision(name=layer.name, precision=module.precision, switchable=True,
                               reason=getattr(module, "precision_reason", ""))
    if layer.engine:
        return ModulePrecision(name=layer.name, precision="autocast",
                               reason="the autocast around its forward decides whether it runs in FP8")
    dtype = str(getattr(weight_of(module), "dtype", "unknown"))
    precision = "fp8" if layer.live else DTYPE_NAMES.get(dtype, dtype)
    return ModulePrecision(name=layer.name, precision=precision, reason=_why_not(module))


def _why_not(module: nn.Module) -> str:
    left = getattr(module, "precision_reason", "")  # set by who converted the model and left this layer
    return left or f"{type(module).__name__} computes in one precision only"
