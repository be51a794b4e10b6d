"""Turns the linears of a model into FP8 linears and says, layer by layer, what became of each."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import MethodType

import torch
from torch import Tensor, nn

from fp8scope.layers import fused_weights
from fp8scope.routers import find_routers
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.series import canonical_name, matching_names
from fp8scope_protocol.wire import ModulePrecision
from fp8scope_trainer.linear import Fp8Linear, unsuitable
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.shared import SharedCodes

HEAD_NAMES = frozenset({"head", "lm_head", "output", "output_layer", "embed_out"})
"""Last part of the names under which models keep their output head."""

ROUTER = "router: near ties of its softmax decide where a token goes; kept in high precision"
SOFTMAX = "attention's softmax: three bits of mantissa would round its probabilities; kept in high precision"
REQUESTED = "requested fp8, not converted: "
"""How the reason of a layer begins that would have been converted if it could."""

_OWN = frozenset(nn.Module().__dict__)
"""What every module has: its children, hooks and parameters."""

Filter = Callable[[str, nn.Linear], bool]

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What `convert` is asked for."""

    recipe: Recipe = field(default_factory=Recipe)
    precision: Precision = "fp8"
    """In which the layers start. `bf16` layers are switchable too."""
    delayed: tuple[str, ...] = ()
    """Patterns of layers under delayed scaling; `layers.2.mlp.gate_up`, `layers.*.attention.*`, `**`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport:
    """The precision map: every module with weights of its own, in the model's order."""

    layers: tuple[ModulePrecision, ...]
    operations: tuple[ModulePrecision, ...] = ()
    """What has no weights and stays in high precision: the softmax of each attention."""

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the layers that can run in FP8."""
        return tuple(layer.name for layer in self.layers if layer.switchable)

    @property
    def left(self) -> dict[str, str]:
        """Layers that stay in high precision for a reason: name -> reason."""
        return {layer.name: layer.reason for layer in self.layers if layer.reason and not layer.switchable}

    def __str__(self) -> str:
        rows = self.layers + self.operations
        width = max((len(one.name) for one in rows), default=0)
        lines = (f"{one.name:<{width}}  {one.precision:<6} {one.reason}".rstrip() for one in rows)
        return "\n".join(lines)


def convert(
    model: nn.Module, conversion: Conversion | None = None, filter: Filter | None = None
) -> ConversionReport:
    """Replaces suitable `nn.Linear`s of `model` in place; parameters and `state_dict` keys stay the same.

    Embedding, head (by name, or tied to an embedding), routers, norms, and linears whose sizes are not
    multiples of 128 stay as they are; `filter(name, linear)` keeps further ones by returning False. Call it
    before `fully_shard` and before the optimizer. Delayed layers need `advance_histories` after each step.
    """
    wanted = conversion or Conversion()
    if type(model) is nn.Linear:
        raise Invalid("model", "Linear", "has nothing to replace it in; convert nn.Sequential(model)")
    linears = {name: m for name, m in model.named_modules()
               if isinstance(m, nn.Linear) and not isinstance(m, Fp8Linear)}
    before = {name: m for name, m in model.named_modules()
              if isinstance(m, Fp8Linear) and (filter is None or filter(name, m))}
    embedded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    routers = {id(router) for _, router, _ in find_routers(model)}
    elsewhere = _held_elsewhere(model)
    reasons = {name: ROUTER if id(linear) in routers else _reason(name, linear, embedded, elsewhere, filter)
               for name, linear in linears.items()}
    chosen = [name for name, reason in reasons.items() if not reason]
    delayed = _delayed(wanted.delayed, [*before, *chosen])
    late = replace(wanted.recipe, policy="delayed")
    for name, layer in before.items():
        _check_again(name, layer, late if name in delayed else wanted.recipe, wanted.precision)
    for name, reason in reasons.items():
        linears[name].precision_reason = reason  # type: ignore[assignment]  # a probe shows it
    shared, places = defaultdict[str, SharedCodes](SharedCodes), defaultdict[int, list[str]](list)
    for name, module in model.named_modules(remove_duplicate=False):
        places[id(module)].append(name)  # a layer that is used twice has two names
    for name in chosen:
        recipe = late if name in delayed else wanted.recipe
        layer = Fp8Linear.from_linear(linears[name], recipe=recipe, precision=wanted.precision)
        layer.shared = shared[name.rpartition(".")[0]]
        for place in places[id(linears[name])]:
            model.set_submodule(place, layer)
    return ConversionReport(layers=_precision_map(model, reasons, routers), operations=_softmaxes(model))


def is_head(name: str) -> bool:
    """Whether `name` is what models call their output head."""
    return canonical_name(name).rpartition(".")[2] in HEAD_NAMES


def _check_again(name: str, layer: Fp8Linear, recipe: Recipe, precision: Precision) -> None:
    """Raises unless the layer is what this conversion would make of it."""
    if layer.recipe != recipe or layer.precision != precision:
        raise Invalid("model", name, "is an Fp8Linear already, of another recipe or precision than asked "
                      "for; set_precision switches it, and a filter can leave it out")


def _held_elsewhere(model: nn.Module) -> dict[int, str]:
    """id of a linear -> where a module holds it, or a method of it, that is no place of a module: in an
    attribute, or in lists, tuples and dicts there. What is called from there would not be replaced."""
    found: dict[int, str] = {}
    for owner, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN:
                for linear in _linears_in(value):
                    found[id(linear)] = f"{owner}.{key}".lstrip(".")
    return found


def _linears_in(value: object) -> Iterator[nn.Linear]:
    """In nested lists, tuples, sets and dicts, which may hold themselves."""
    seen, pending = set[int](), [value]
    while pending:
        one = pending.pop()
        if isinstance(one, MethodType):
            one = one.__self__
        if isinstance(one, nn.Linear):
            yield one
        elif isinstance(one, list | tuple | set | dict) and id(one) not in seen:
            seen.add(id(one))
            pending += one.values() if isinstance(one, dict) else one


def _reason(
    name: str, linear: nn.Linear, embedded: set[Tensor], elsewhere: dict[int, str], filter: Filter | None
) -> str:
    """Why `linear` stays as it is; empty if it becomes FP8."""
    if linear.weight in embedded:
        return "shares its weight with an embedding"
    if is_head(name):
        return "output head"
    if place := elsewhere.get(id(linear)):
        return f"{REQUESTED}it is also held in {place}, from where it would be called unconverted"
    if reason := _unlike(linear) or unsuitable(linear.in_features, linear.out_features) or _changed(linear):
        return f"{REQUESTED}{reason}"
    return "" if filter is None or filter(name, linear) else "left out by the filter"


def _unlike(linear: nn.Linear) -> str:
    """How a linear is of another kind than those that are replaced; empty if it is not."""
    if isinstance(linear, nn.modules.lazy.LazyModuleMixin):
        return "its sizes are not known before its first forward"
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, and only Linear itself is replaced"
    return "it is in fp64, and FP8 is made from fp32 at most" if linear.weight.dtype == torch.float64 else ""


def _changed(linear: nn.Linear) -> str:
    """What a linear has that an FP8 layer in its place would lose; empty if nothing."""
    if not isinstance(linear._parameters.get("weight"), nn.Parameter):
        return "its weight is computed from others"
    if linear.weight.is_complex():
        return "its weight is complex"
    if "forward" in linear.__dict__:
        return "its forward was replaced"
    own = {*linear._parameters, *linear._buffers, *linear._modules} - {"weight", "bias"}
    return f"it holds {', '.join(sorted(own))}" if own else ""


def _delayed(patterns: tuple[str, ...], names: list[str]) -> set[str]:
    chosen: set[str] = set()
    for pattern in patterns:
        matched = matching_names(pattern, names)
        if not matched:
            raise UnknownName("delayed", pattern, names)
        chosen.update(matched)
    return chosen


def _precision_map(
    model: nn.Module, reasons: dict[str, str], routers: set[int]
) -> tuple[ModulePrecision, ...]:
    layers = []
    for name, module in model.named_modules():
        own: list[Tensor] = list(module.parameters(recurse=False))
        if isinstance(module, Fp8Linear):
            layers.append(ModulePrecision(name=name, precision=module.precision, switchable=True,
                                          reason=module.precision_reason))
        elif own:
            reason = ROUTER if id(module) in routers else reasons.get(name, "")
            if not reason and fused_weights(module):
                reason = f"{REQUESTED}experts that lie in one tensor have no FP8 product"
            layers.append(ModulePrecision(name=name, precision=_dtype_of(own[0]), reason=reason))
    if not layers:
        raise Invalid("model", type(model).__name__, "has no parameters")
    return tuple(layers)


def _softmaxes(model: nn.Module) -> tuple[ModulePrecision, ...]:
    """Of every attention: a module of that name that holds no other one."""
    found = []
    for name, module in model.named_modules():
        parts = [one for _, one in module.named_modules() if "attention" in type(one).__name__.lower()]
        if parts == [module] and (weight := next(module.parameters(), None)) is not None:
            found.append(ModulePrecision(name=f"{name}: softmax", precision=_dtype_of(weight),
                                         reason=SOFTMAX))
    return tuple(found)


def _dtype_of(tensor: Tensor) -> str:
    return _DTYPES.get(tensor.dtype, str(tensor.dtype))
