"""Hooks that measure the linear layers of a model, and the observer of layers that quantize by themselves.

    forward pre-hook    input (activation), weight, GEMM error
    forward hook        puts a tensor hook on each output that wants a gradient
    tensor hook         gradient of the output

What-if and in-situ. A plain `nn.Linear` is measured as if it quantized its operands with current scales:
activation and gradient in both orientations, in the formats and scalings of `Watch.recipes`. A module with an
attribute `observer` (see observer.py) hands over what it really did, and is measured by nothing else.

Full backward hooks were rejected: they cost 60 to 80 us each, break in-place operations and see nothing of
outputs inside a dict.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8scope.gemm import gemm_error
from fp8scope.inert import Inert, InertObserver
from fp8scope.layers import Layer, weight_of
from fp8scope.roundtrip import channel_outlier_ratio
from fp8scope.sharding import is_measured_here
from fp8scope.sums import MAX_COLUMNS
from fp8scope.watch import Watch, matrix
from fp8scope_protocol.formats import E4M3, Format
from fp8scope_protocol.recipes import what_ifs
from fp8scope_protocol.series import Series

CHANNEL_OUTLIER, GEMM_ERROR = MAX_COLUMNS.index("channel_outlier"), MAX_COLUMNS.index("gemm_error")
ORIENTATIONS = ("rowwise", "columnwise")


def install(layers: tuple[Layer, ...], watch: Watch) -> list[RemovableHandle]:
    """Hooks on every layer, and an observer in those that report by themselves; the handles undo it."""
    handles: list[RemovableHandle] = []
    for layer in layers:
        probe = LayerProbe(layer, watch)
        pre = layer.module.register_forward_pre_hook(ForwardPreHook(probe), with_kwargs=True)
        # Checkpointing leaves a recomputed forward by an exception; the hook must learn of it.
        post = layer.module.register_forward_hook(ForwardHook(probe), with_kwargs=True, always_call=True)
        handles += [pre, post]
        if layer.in_situ:
            layer.module.observer = InSituObserver(probe)  # type: ignore[assignment]
    return handles


class LayerProbe:
    """One watched layer: its series, and the forward under way."""

    def __init__(self, layer: Layer, watch: Watch) -> None:
        self.layer = layer
        self.watch = watch
        self.inside = False
        """True between the layer's pre-hook and its hook."""
        self.live = False
        """Whether the forward under way is measured."""
        self._series: dict[tuple[str, ...], Series] = {}

    def series(
        self, role: str, orientation: str, element: Format, scaling: str, policy: str = "current"
    ) -> Series:
        """The series of one of this layer's tensors."""
        key = (role, orientation, element.name, scaling)
        if key not in self._series:
            layer, weight = self.layer, role == "weight"
            self._series[key] = Series(
                name=layer.weight_name if weight else layer.name, role=role,  # type: ignore[arg-type]
                orientation=orientation, format=element.name, scaling=scaling,  # type: ignore[arg-type]
                policy=policy, live=layer.in_situ, module=layer.name, depth=layer.depth,
                aliases=layer.weight_aliases if weight else layer.aliases,
            )
        return self._series[key]

    def add_both(self, role: str, x: Tensor) -> None:
        """x [R, C] as a what-if, in both orientations and in all formats."""
        for element, scaling in what_ifs(self.watch.recipes, role):
            for orientation, view in zip(ORIENTATIONS, (x, x.t()), strict=True):
                self.watch.measure(self.series(role, orientation, element, scaling), view, element)

    def add_weight(
        self, series: Series, weight: Tensor, element: Format, scales: Tensor | None = None
    ) -> None:
        """Once a step. Under FSDP all ranks hold the whole weight here, and one of them measures it."""
        watch = self.watch
        watch.rows.row(series)  # all ranks have the same series
        mine = is_measured_here(weight, rank=watch.rank, world=watch.world, index=self.layer.index)
        if watch.once(*series.key) and mine:
            watch.measure(series, matrix(weight), element, scales=scales)


class ForwardPreHook(Inert):
    """Measures what goes into a layer, before the layer can change it in place."""

    def __init__(self, probe: LayerProbe) -> None:
        self.probe = probe

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # a compiled region runs unobserved, and is listed as such
            return
        probe = self.probe
        probe.inside, probe.live = True, probe.watch.counts(module)
        if probe.live:
            probe.watch.ran.add(probe.layer.name)
            if not probe.layer.in_situ:
                with probe.watch.guarded(probe.layer.name):
                    _measure_operands(probe, module, (args, kwargs))


class ForwardHook(Inert):
    """Asks for the gradients of a layer's outputs."""

    def __init__(self, probe: LayerProbe) -> None:
        self.probe = probe

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        probe = self.probe
        wanted = probe.live and not probe.layer.in_situ
        probe.inside = probe.live = False
        if wanted:
            with probe.watch.guarded(probe.layer.name):
                for y in tensors_in(output):
                    if y.requires_grad:
                        y.register_hook(GradientHook(probe))  # type: ignore[no-untyped-call]


class GradientHook(Inert):
    """Measures the gradient of one output of one call."""

    def __init__(self, probe: LayerProbe) -> None:
        self.probe = probe

    def __call__(self, gradient: Tensor) -> None:
        watch, layer = self.probe.watch, self.probe.layer
        if watch.sampling:
            watch.gradients.add(layer.name)
            with watch.guarded(layer.name):
                self.probe.add_both("gradient", matrix(gradient))


class InSituObserver(InertObserver):
    """What a self-quantizing layer reports to: an `observer.LinearObserver`."""

    def __init__(self, probe: LayerProbe) -> None:
        self.probe = probe

    @property
    def active(self) -> bool:
        """In a forward: as its pre-hook decided. In a backward: whether the step is measured."""
        if self.probe.inside:
            return self.probe.live
        return self.probe.watch.sampling and torch._C._current_graph_task_id() != -1

    def tensor(
        self, role: str, orientation: str, x: Tensor, scales: Tensor, *, scaling: str, policy: str
    ) -> None:
        """One quantization with the scales that were used."""
        probe = self.probe
        with probe.watch.guarded(probe.layer.name):
            series = probe.series(role, orientation, E4M3, scaling, policy)
            if role == "weight":
                probe.add_weight(series, x, E4M3, scales)
                return
            x = matrix(x)
            probe.watch.measure(series, x, E4M3, scales=scales)
            if (role, orientation) == ("activation", "rowwise"):
                probe.watch.largest(series, CHANNEL_OUTLIER, channel_outlier_ratio(x))

    def gemm(self, x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor) -> None:
        """The operands of the first forward of a step."""
        probe = self.probe
        with probe.watch.guarded(probe.layer.name):
            if probe.watch.once("gemm", probe.layer.name):
                error = gemm_error(matrix(x), matrix(weight), E4M3, x_scales=x_scales,
                                   weight_scales=weight_scales)
                series = probe.series("activation", "rowwise", E4M3, "tile 1x128")
                probe.watch.largest(series, GEMM_ERROR, error)


def _measure_operands(probe: LayerProbe, module: nn.Module, inputs: Any) -> None:
    """Inputs of a plain linear; its weight and the error of the product in the first call of a step."""
    weight, watch, name = weight_of(module), probe.watch, probe.layer.name
    if weight is None:
        watch.unobserved(name, "no weight that can be read without computing it (parametrized)")
        return
    found = [x for x in tensors_in(inputs) if x.is_floating_point() and x.shape[-1:] == weight.shape[-1:]]
    if not found:
        watch.unobserved(name, f"no input of {weight.shape[-1]} features")
    for x in map(matrix, found):
        probe.add_both("activation", x)
        outliers = channel_outlier_ratio(x)
        for recipe in watch.recipes:
            scaling = recipe.scaling_of("activation")
            series = probe.series("activation", "rowwise", recipe.element, scaling)
            watch.largest(series, CHANNEL_OUTLIER, outliers)
            if watch.once("gemm", *series.key):
                watch.largest(series, GEMM_ERROR, gemm_error(
                    x, matrix(weight), recipe.element, x_scaling=scaling,
                    weight_scaling=recipe.scaling_of("weight")))
    for element, scaling in what_ifs(watch.recipes, "weight"):
        probe.add_weight(probe.series("weight", "rowwise", element, scaling), weight, element)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, each once."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        one = pending.pop(0)
        if id(one) in seen:  # also containers: some hold themselves
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, Mapping):
            pending += one.values()
        elif isinstance(one, list | tuple):
            pending += one
        elif is_dataclass(one) and not isinstance(one, type):
            pending += [getattr(one, f.name) for f in fields(one)]
