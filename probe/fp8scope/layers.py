"""The layers that are watched, the parameters, and what both are called.

Names are those of the bare model: wrapper prefixes are stripped, so a layer keeps its name under DDP, FSDP,
checkpointing and compilation. A module or parameter that is registered several times has its first name and
lists the others as aliases. Depth is the place in the order of registration.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp8scope.casts import Cast
from fp8scope.home import Home, find_homes, matrix_of
from fp8scope.inert import can_report
from fp8scope.observer import Withholding
from fp8scope.torchao_linear import LiveCasts, live_casts
from fp8scope.transformer_engine import engine_cast, engine_kind, weight_keys
from fp8scope_protocol.series import NAME_LIMIT, canonical_name
from fp8scope_protocol.wire import Unobserved

LONGEST_NAME = NAME_LIMIT - 16
"""Of a module; the name of its weight is longer."""
ROOT = "(model)"
"""Name of a model that is itself the layer."""
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
UNSEEN = "fused experts: only their weights are measured, in detailed steps (fused.py)"


class Weight(NamedTuple):
    """One matrix of a layer: its name there, and in the model."""

    key: str
    name: str
    aliases: tuple[str, ...]
    own: str = ""
    """Of a weight that is at home in another module: its name if it becomes this layer's own."""
    home: Home | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One watched module."""

    name: str
    module: nn.Module
    depth: int
    index: int
    """Place among the watched layers."""
    dealt: int
    """Which rank measures the weight if several hold it alike, modulo their number."""
    aliases: tuple[str, ...]
    weights: tuple[Weight, ...]
    """One; of TransformerEngine's layers one for each GEMM."""
    in_situ: bool
    """True when the layer quantizes by itself and reports what it did."""
    live: LiveCasts
    """What the layer casts by itself without reporting it, as its configuration says."""
    engine: str
    """Which of TransformerEngine's layers it is, whose casts are known after a forward; or empty."""

    def cast(self, role: str, orientation: str, gemm: int = 0) -> Cast | None:
        """How the layer casts an operand by itself without reporting it."""
        if self.engine:
            return engine_cast(self.module, role, orientation, gemm)
        return self.live.get((role, orientation))

    def weight(self, gemm: int = 0) -> Weight:
        """A weight, by the name that is right at present (see home.py)."""
        one = self.weights[gemm]
        if one.home is None or one.home.has(matrix_of(self.module, one.key)):
            return one
        return Weight(one.key, one.own, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPlace:
    """Where a parameter belongs: the first watched layer that has it ("" if none) and its depth. `index`
    decides which rank measures what several hold alike."""

    name: str
    aliases: tuple[str, ...]
    module: str
    depth: int
    index: int


def find_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Every `nn.Linear`, every module that can report by itself and those of TransformerEngine, in order of
    registration."""
    names = _module_names(model)
    places, homes = parameter_places(model), find_homes(model)
    layers: list[Layer] = []
    for depth, module in enumerate(model.modules()):
        if not _is_watched(module):
            continue
        name, *aliases = dict.fromkeys(names[id(module)])
        engine = engine_kind(module)
        keys = weight_keys(module) if engine else ("weight",)
        layers.append(Layer(
            name=name, module=module, depth=depth, index=len(layers), dealt=len(layers),
            aliases=tuple(aliases), weights=tuple(_weight(name, module, key, places, homes) for key in keys),
            in_situ=can_report(module), live=live_casts(module), engine=engine,
        ))
    return tuple(layers)


def _weight(
    name: str, module: nn.Module, key: str, places: dict[int, ParameterPlace], homes: dict[int, Home]
) -> Weight:
    id_, own = id(matrix_of(module, key)), f"{name}.{key}" if name != ROOT else key
    if id_ not in places:
        return Weight(key, own, ())
    place, home = places[id_], homes[id_]
    if home.module is module and home.key == key:
        return Weight(key, place.name, place.aliases)
    return Weight(key, place.name, place.aliases, own, home)


def weight_of(module: nn.Module) -> Tensor | None:
    """The weight of a linear layer; see `matrix_of`."""
    return matrix_of(module, "weight")


def parameter_places(model: nn.Module) -> dict[int, ParameterPlace]:
    """Every parameter of `model` by id. Ids change when FSDP shards: call again, do not keep."""
    names = _names(model.named_parameters(remove_duplicate=False))
    modules = _module_names(model)
    places: dict[int, ParameterPlace] = {}
    for depth, module in enumerate(model.modules()):
        for parameter in module.parameters(recurse=False):
            known = places.get(id(parameter))
            if known is None or (_is_watched(module) and not known.module):  # tied to an embedding before it
                name, *aliases = dict.fromkeys(names[id(parameter)])
                places[id(parameter)] = ParameterPlace(
                    name=name, aliases=tuple(aliases), depth=depth,
                    index=len(places) if known is None else known.index,
                    module=modules[id(module)][0] if _is_watched(module) else "",
                )
    return places


def find_unobserved(model: nn.Module) -> tuple[Unobserved, ...]:
    """Modules with matrices of their own that are no layer we can watch, and operands that one withholds."""
    layers = find_layers(model)
    watched = {id(layer.module) for layer in layers}
    withheld = (Unobserved(name=layer.name, reason=f"{role} not observed: {why}")
                for layer in layers if layer.in_situ and isinstance(layer.module, Withholding)
                for role, why in layer.module.withheld().items())
    return (*withheld, *(
        Unobserved(name=_listable(canonical_name(name)) or ROOT, reason=(
            UNSEEN if fused_weights(module) else f"{type(module).__name__} is not a linear layer"))
        for name, module in model.named_modules()
        if id(module) not in watched and any(_is_matrix(p) for p in module.parameters(recurse=False))
    ))


def expert_count(module: nn.Module) -> int:
    """How many experts a module says it has, itself or in its configuration; 0 if it does not."""
    for owner in (module, getattr(module, "config", None)):
        for name in EXPERT_COUNTS:
            count = getattr(owner, name, None)
            if isinstance(count, int) and not isinstance(count, bool):
                return count
    return 0


def fused_weights(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` that hold a matrix for each of its experts."""
    return [one for one in module.parameters(recurse=False)
            if not is_lazy(one) and one.dim() == 3 and one.shape[0] == expert_count(module)
            and one.is_floating_point() and one.element_size() > 1]


def _module_names(model: nn.Module) -> dict[int, list[str]]:
    return _names((name, module) for name, module in model.named_modules(remove_duplicate=False)
                  if _is_watched(module))


def _names(named: Iterable[tuple[str, object]]) -> dict[int, list[str]]:
    """Canonical names by id. Where two would share one (a part of the model is itself called `module`), one
    of them keeps its prefix."""
    pairs = [(name, canonical_name(name) or ROOT, id(one)) for name, one in named]
    owners = {short: owner for name, short, owner in pairs if name == short}
    found: dict[int, list[str]] = {}
    for name, short, owner in pairs:
        mine = owners.setdefault(short, owner) == owner
        found.setdefault(owner, []).append(_listable(short if mine else name))
    return found


def _listable(name: str) -> str:
    """`name` as a series may have it: what cannot be printed is escaped, a long one ends in a checksum."""
    if not name.isprintable():
        name = name.encode("unicode_escape").decode()
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME - 9]}~{zlib.crc32(name.encode()):08x}"
    return name


def _is_watched(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or can_report(module) or engine_kind(module) != ""


def _is_matrix(parameter: Tensor) -> bool:
    return is_lazy(parameter) or parameter.dim() >= 2
