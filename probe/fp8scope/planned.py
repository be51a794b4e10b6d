"""What a probe would measure of a model: its series and what each reads, before a single step.

The series are made where the hooks make theirs, so they are the ones a run will have. States are foretold
from those that the optimizer has, else from the options of its groups: `betas` mean exp_avg and exp_avg_sq,
of a Lion exp_avg alone, and a `momentum` that is not 0 means momentum_buffer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fp8scope.adam import adam_form
from fp8scope.home import matrix_of
from fp8scope.inert import can_report
from fp8scope.layer_probe import LayerProbe
from fp8scope.layers import (
    Layer,
    ParameterPlace,
    find_layers,
    find_unobserved,
    parameter_places,
    weight_of,
)
from fp8scope.observer import Announcing
from fp8scope.rows import Rows
from fp8scope.sharding import unreadable
from fp8scope.states import ROLES, is_high_precision, is_measurable, state_series
from fp8scope.stored import FORMAT_OF, StoredAs, codes_of, rounding_of, stored_as
from fp8scope.transformer_engine import HIDDEN, unread
from fp8scope.twins import twin_series
from fp8scope.updates import weight_series
from fp8scope.watch import Watch
from fp8scope.weights import Weights
from fp8scope_protocol.formats import E4M3, is_scaling, parse_format
from fp8scope_protocol.recipes import Recipe, what_ifs
from fp8scope_protocol.series import Series
from fp8scope_protocol.wire import Unobserved


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One series, and how many bytes are read for it in a measured step."""

    series: Series
    light_bytes: int
    detailed_bytes: int
    """In a step that is measured in detail."""


def plan_layers(model: nn.Module, recipes: tuple[Recipe, ...], *, tokens: int) -> Iterator[Plan]:
    """Operands of the linear layers, `tokens` rows each."""
    watch = Watch(Rows(torch.device("cpu")), recipes=recipes, rank=0, world=1)
    weights = Weights(watch)
    for layer in find_layers(model):
        if obstacle(layer):
            continue
        probe = LayerProbe(layer, watch, weights)
        for role, size in _operands(layer, tokens):
            for series in _series(probe, recipes, role, "rowwise"):
                yield Plan(series=series, light_bytes=size, detailed_bytes=size)
            for series in _series(probe, recipes, role, "columnwise"):
                yield Plan(series=series, light_bytes=0, detailed_bytes=size)
        for gemm, one in enumerate(layer.weights):
            weight = matrix_of(layer.module, one.key)
            if weight is not None and not unreadable(weight):
                for series in _series(probe, recipes, "weight", "rowwise", gemm):
                    yield Plan(series=series, light_bytes=weight.nbytes, detailed_bytes=weight.nbytes)


def _operands(layer: Layer, tokens: int) -> Iterator[tuple[str, int]]:
    """(role, bytes) of activation and gradient, as far as hooks see them."""
    matrices = [weight for one in layer.weights if (weight := matrix_of(layer.module, one.key)) is not None]
    if layer.engine not in HIDDEN:
        yield "activation", tokens * matrices[0].shape[-1] * matrices[0].element_size()
    yield "gradient", tokens * matrices[-1].shape[0] * matrices[-1].element_size()


def _series(
    probe: LayerProbe, recipes: tuple[Recipe, ...], role: str, orientation: str, gemm: int = 0
) -> Iterator[Series]:
    """What an operand is measured in: as it is cast, where that is known, and as what-ifs."""
    layer = probe.layer
    if layer.in_situ and isinstance(layer.module, Announcing):
        if (told := layer.module.operands().get((role, orientation))) is not None:
            yield probe.series(role, orientation, parse_format(told.format), told.scaling, told.policy)
        return
    if role == "gradient" and layer.engine == "LayerNormMLP":
        gemm = 1
    cast = layer.cast(role, orientation, gemm)
    if cast is not None:
        yield probe.series(role, orientation, cast.element, cast.scaling, cast.policy, live=True, gemm=gemm)
    for element, scaling in what_ifs((Recipe(element=E4M3),) if layer.in_situ else recipes, role):
        if cast is None or (element, scaling) != cast[:2]:
            yield probe.series(role, orientation, element, scaling, gemm=gemm)


def plan_states(
    model: nn.Module, optimizers: Iterable[Optimizer], recipes: tuple[Recipe, ...]
) -> Iterator[Plan]:
    """States of matrices, and what is read from a sample, so next to no bytes."""
    places = parameter_places(model)
    for optimizer, group, parameter in _parameters(optimizers):
        place = places.get(id(parameter))
        if place is None or is_lazy(parameter) or not parameter.numel():
            continue
        live = _coded(optimizer, parameter)
        if adam_form(optimizer, group) is not None:
            yield from (Plan(series=one, light_bytes=0, detailed_bytes=0)
                        for one in _sampled(place, optimizer, parameter))
        if parameter.dim() < 2:
            continue
        for role, format, scaling in live:
            if is_measurable(format, scaling):
                series = state_series(place, role, parse_format(format), scaling, live=True,
                                      rounding="stochastic")
                yield Plan(series=series, light_bytes=0, detailed_bytes=parameter.nbytes)
        for role, size in [] if live else _states(optimizer, group, parameter):
            for element, scaling in what_ifs(recipes, role):
                series = state_series(place, role, element, scaling)
                yield Plan(series=series, light_bytes=0, detailed_bytes=size)


def reserve_rows(watch: Watch, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """On a GPU, makes all rows at once: none can be made while a CUDA graph is captured."""
    if watch.rows.device.type == "cuda":
        with watch.guarded("rows"):
            plans = (*plan_layers(model, watch.recipes, tokens=1),
                     *plan_states(model, optimizers, watch.recipes))
            watch.rows.reserve(len({plan.series.key for plan in plans}))


def find_gaps(model: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[Unobserved, ...]:
    """What a reader would look for in vain, and why."""
    found = list(find_unobserved(model))
    for layer in find_layers(model):
        reasons = unread(layer.module) if layer.engine else [obstacle(layer)]
        found += [Unobserved(name=layer.name, reason=reason) for reason in reasons if reason]
    places = parameter_places(model)
    vectors = strangers = 0
    stateless: dict[str, int] = {}
    unmeasured: Counter[str] = Counter()
    for optimizer, group, parameter in _parameters(optimizers):
        if id(parameter) not in places:
            strangers += 1
        elif parameter.dim() < 2:
            vectors += 1
        elif coded := _coded(optimizer, parameter):
            unmeasured.update(f"{role} is stored as {format}, {scaling}: only update_error is measured"
                          for role, format, scaling in coded if not is_measurable(format, scaling))
        elif not _states(optimizer, group, parameter) and not _has_codes(optimizer, parameter):
            kind = type(optimizer).__name__
            stateless[kind] = stateless.get(kind, 0) + 1
    if vectors:
        found.append(Unobserved(name=f"states of {vectors} vectors", reason="only those of matrices are"))
    if strangers:
        found.append(Unobserved(name=f"states of {strangers} parameters", reason="they are not the model's"))
    found += [Unobserved(name=f"states of {count} matrices", reason=f"{kind} keeps no {', '.join(ROLES)}")
              for kind, count in stateless.items()]
    found += [Unobserved(name=f"states of {count} matrices", reason=reason)
              for reason, count in unmeasured.items()]
    return tuple(found)


def obstacle(layer: Layer) -> str:
    """Why a watched layer cannot be measured; empty if it can, or in part (see `unread`)."""
    if layer.engine:
        return "" if layer.weights else "no parameter is a matrix"
    weight = weight_of(layer.module)
    if weight is None:
        return "no weight that can be read without computing it (parametrized)"
    if is_lazy(weight):
        return "its weight has no shape before the first forward"
    if not weight.numel():
        return "its weight has no elements"
    return "" if weight.is_floating_point() or layer.in_situ else f"its weight is stored as {weight.dtype}"


def _parameters(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Optimizer, dict[str, Any], Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter


def _states(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> list[tuple[str, int]]:
    """(role, bytes) of the states that are there, or will be."""
    state = optimizer.state.get(parameter)
    if isinstance(state, Mapping) and state:
        return [(role, x.nbytes) for key, role in ROLES.items()
                if isinstance(x := state.get(key), Tensor) and is_high_precision(x, parameter)]
    if "betas" in group:
        roles = ("exp_avg",) if _is_lion(optimizer) else ("exp_avg", "exp_avg_sq")
        return [(role, parameter.nbytes) for role in roles]
    return [("momentum", parameter.nbytes)] if group.get("momentum") else []


def _is_lion(optimizer: Optimizer) -> bool:
    """Lion has two betas and one moment, in whichever library."""
    return any(one.__name__ == "Lion" for one in type(optimizer).__mro__)


def _coded(optimizer: Any, parameter: Tensor) -> Sequence[tuple[str, str, str]]:
    """(role, format, scaling) of the codes that a reporting optimizer stores of `parameter`."""
    if not can_report(optimizer) or not hasattr(optimizer, "coded_states"):
        return ()
    found: Sequence[tuple[str, str, str]] = optimizer.coded_states(parameter)
    return found


def _has_codes(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether torchao or bitsandbytes stores the moments: read from a sample, as they are."""
    state = optimizer.state.get(parameter)
    return isinstance(state, Mapping) and codes_of(state, "exp_avg") is not None


def _sampled(place: ParameterPlace, optimizer: Any, parameter: Tensor) -> Iterator[Series]:
    """Weights without a master copy, and second moments stored in few bits."""
    narrow = parameter.element_size() < 4 and parameter.dtype in FORMAT_OF
    if narrow:
        yield weight_series(place, parameter.dtype)
    state = optimizer.state.get(parameter)
    if can_report(optimizer) and hasattr(optimizer, "coded_states"):
        known = _announced(optimizer, parameter)
    elif isinstance(state, Mapping) and state:
        known = stored_as(parameter, state) if narrow else None
    else:  # moments of Adam's form are of the weight's type
        known = StoredAs(FORMAT_OF[parameter.dtype], "none", "nearest") if narrow else None
    if known is not None:
        yield twin_series(place, known)


def _announced(optimizer: Any, parameter: Tensor) -> StoredAs | None:
    """How a reporting optimizer stores second moments, or will after its warm-up; None if in 32 bits."""
    if optimizer.format_of(parameter) == "bf16":
        return StoredAs("bf16", "none", rounding_of(optimizer))
    for role, format, scaling in optimizer.coded_states(parameter):
        if role == "exp_avg_sq" and is_scaling(scaling):
            return StoredAs(format, scaling, "stochastic")
    return None
