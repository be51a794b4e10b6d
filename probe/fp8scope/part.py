"""This rank's part of the job's model: its names in the whole, and who measures what several hold alike."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from torch import nn
from torch.nn.parameter import is_lazy

from fp8scope.layers import Layer, ParameterPlace, find_layers, find_unobserved, parameter_places
from fp8scope.precision import precision_map
from fp8scope.producer import Holding
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.series import NAME_LIMIT
from fp8scope_protocol.wire import Unobserved

Rename = Callable[[str], str]
Holders = Callable[[str], tuple[int, ...]]


def alone(name: str) -> tuple[int, ...]:
    """The holders of anything, in a single process."""
    return (0,)


def _checked(rename: Rename) -> Rename:
    """`rename`, which raises `Invalid` where it fails, or returns what no series can be called."""
    def checked(name: str) -> str:
        try:
            given: object = rename(name)
        except Exception as error:
            rule = f"must return a name in the whole model; it raised {type(error).__name__}: {error}"
            raise Invalid("rename", name, rule) from error
        if not isinstance(given, str):
            raise Invalid("rename", given, "must return the name of a layer or parameter, a text")
        if not 0 < len(given) <= NAME_LIMIT or not given.isprintable():
            raise Invalid("rename", given, f"must return 1 to {NAME_LIMIT} printable characters")
        return given
    return checked


def _lenient(rename: Rename) -> Rename:
    def lenient(name: str) -> str:
        try:
            return rename(name)
        except Exception:
            return name
    return lenient


class Part:
    """`rename` maps a name in this model to the one in the whole; `holders` tells which ranks hold it."""

    def __init__(
        self, rename: Rename | None = None, holders: Holders = alone, *, first_depth: int = 0
    ) -> None:
        self.rename = str if rename is None else _lenient(rename)
        """For modules that need no name of their own: what `rename` was not made for keeps its name."""
        self._name = str if rename is None else _checked(rename)
        self._holders = holders
        self._first_depth = first_depth

    def layers(self, model: nn.Module) -> tuple[Layer, ...]:
        """`find_layers`, by their names in the whole model."""
        return tuple(
            replace(layer, name=self._name(layer.name), aliases=tuple(map(self._name, layer.aliases)),
                    weights=tuple(one._replace(name=self._name(one.name),
                                               aliases=tuple(map(self._name, one.aliases)),
                                               own=self._name(one.own) if one.own else "")
                                  for one in layer.weights),
                    dealt=self._deal(self._name(layer.weights[0].name if layer.weights else layer.name),
                                     layer.index),
                    depth=self._first_depth + layer.depth)
            for layer in find_layers(model))

    def places(self, model: nn.Module) -> dict[int, ParameterPlace]:
        """`parameter_places`, likewise."""
        return {
            id_: replace(place, name=(name := self._name(place.name)),
                         aliases=tuple(map(self._name, place.aliases)),
                         module=self._name(place.module) if place.module else "",
                         index=self._deal(name, place.index), depth=self._first_depth + place.depth)
            for id_, place in parameter_places(model).items()}

    def holding(self, model: nn.Module) -> Holding:
        """What `model` holds; `Invalid` if `rename` gives two layers one name, or none that can be used."""
        layers = self.layers(model)
        places = self.places(model)
        parameters = [place.name for place in places.values()]
        for kind, names in (("layer", [layer.name for layer in layers]), ("parameter", parameters)):
            for name, times in Counter(names).items():
                if times > 1:
                    raise Invalid("rename", name, f"must give each {kind} its own name; "
                                                    f"{times} have this one")
        return Holding(
            names=tuple(sorted({layer.name for layer in layers} | set(parameters))),
            shapes={places[id(one)].name: tuple(one.shape) for one in model.parameters()
                    if id(one) in places and not is_lazy(one) and one.dim() > 1},
            depth=sum(1 for _ in model.modules()),
            precision=precision_map(layers),
            unobserved=tuple(Unobserved(name=self.rename(one.name), reason=one.reason)
                             for one in find_unobserved(model)),
        )

    def copies(self, place: ParameterPlace) -> int:
        """How many ranks hold a part of a parameter."""
        return len(self._holders(place.name))

    def _deal(self, name: str, index: int) -> int:
        """Of those that hold it, the rank that measures what they hold alike."""
        holders = self._holders(name)
        return holders[index % len(holders)]
