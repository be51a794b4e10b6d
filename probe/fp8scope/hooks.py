"""Hooks that measure the linear layers of a model, and the observer of layers that quantize by themselves.

    forward pre-hook    input (activation), weight (see weights.py), GEMM error
    forward hook        puts a tensor hook on each output that wants a gradient
    tensor hook         gradient of the output

Off cadence the pre-hook costs one look at a flag; in a measured step it adds the forward hook for the call
under way (`benchmarks/probe_overhead.py`). The forward hook that stays is for `torch.compile` only: traced,
it measures nothing itself and puts operations into the graph (compiled.py), whose bodies come back here.

What-if and in-situ. A plain `nn.Linear` is measured as if it quantized its operands with current scales:
activation and gradient in both orientations, in the formats and scalings of `Watch.recipes`. A module with an
attribute `observer` (see observer.py) hands over what it really did, and is measured by nothing else.

Full backward hooks were rejected: they cost 60 to 80 us each, break in-place operations and see nothing of
outputs inside a dict.
"""

import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from fp8scope.compiled import Key, trace_call
from fp8scope.engine_operands import measure_engine
from fp8scope.gemm import WgradSample, gemm_error, sample_columns, wgrad_row_error_max
from fp8scope.in_situ import CHANNEL_OUTLIER, GEMM_ERROR, WGRAD_ROW_ERROR, InSituObserver
from fp8scope.inert import Inert
from fp8scope.layers import Layer, weight_of
from fp8scope.nested import tensors_in
from fp8scope.roundtrip import channel_outlier_ratio
from fp8scope.sharding import is_first_copy, is_measured_here, unreadable
from fp8scope.transformer_engine import by_gemm
from fp8scope.watch import Watch, matrix
from fp8scope.weights import Weights
from fp8scope_protocol.formats import Format
from fp8scope_protocol.recipes import what_ifs
from fp8scope_protocol.series import Series


class Removable(Protocol):
    """What can be undone."""

    def remove(self) -> None:
        """Undoes it."""


def install(layers: tuple[Layer, ...], watch: Watch) -> list[Removable]:
    """Hooks on every layer, and an observer in those that report by themselves; the handles undo it."""
    handles: list[Removable] = []
    weights = Weights(watch)
    for layer in layers:
        probe = LayerProbe(layer, watch, weights)
        handles.append(probe)
        handles.append(layer.module.register_forward_pre_hook(ForwardPreHook(probe), with_kwargs=True))
        if layer.engine:
            continue  # its hooks are there in measured steps only
        if not layer.in_situ:
            handles.append(layer.module.register_forward_hook(TracedHook(probe), with_kwargs=True))
        else:
            layer.module.observer = InSituObserver(probe)  # type: ignore[assignment]
    return handles


class Call(threading.local):
    """The forward of a layer that is under way in this thread: jobs may run one model in several."""

    inside = False
    """True between the layer's pre-hook and its hook, in a measured step."""
    live = False
    """Whether it is measured."""
    sample: WgradSample | None = None
    """What it keeps of its input."""


class LayerProbe:
    """One watched layer: its series, and the forward under way."""

    def __init__(self, layer: Layer, watch: Watch, weights: Weights) -> None:
        self.layer = layer
        self.watch = watch
        self.weights = weights
        """Of all layers."""
        self.call = Call()
        self.left: RemovableHandle | None = None
        """Of a forward hook that is the first of its layer, and stays if the forward raises."""
        self.key = Key(self, watch.rows.device)
        self._series: dict[tuple[str, ...], Series] = {}

    def remove(self) -> None:
        """Takes away a hook that the last forward left behind."""
        if self.left is not None:
            self.left.remove()

    def series(
        self, role: str, orientation: str, element: Format, scaling: str, policy: str = "current", *,
        live: bool = False, gemm: int = 0,
    ) -> Series:
        """The series of one of this layer's tensors; `gemm` tells its weights apart."""
        layer = self.layer
        owner = layer.weights[gemm] if role == "weight" else layer
        key = (owner.name, role, orientation, element.name, scaling)
        if key not in self._series:
            self._series[key] = Series(
                name=owner.name, role=role, orientation=orientation,  # type: ignore[arg-type]
                format=element.name, scaling=scaling, policy=policy, live=live or layer.in_situ,
                module=layer.name, depth=layer.depth, aliases=owner.aliases,
            )
        return self._series[key]

    def add_operand(self, role: str, x: Tensor, gemm: int = 0) -> None:
        """x [R, C] as a what-if, in all formats: along its rows, in a detailed step also x.t(), for wgrad."""
        views = {"rowwise": x, "columnwise": x.t()} if self.watch.detailed else {"rowwise": x}
        for orientation, view in views.items():
            cast = self.layer.cast(role, orientation, gemm)
            if cast is not None:
                series = self.series(role, orientation, cast.element, cast.scaling, cast.policy, live=True)
                self.watch.measure(series, view, cast.element, scales=cast.scales(),
                                   power_of_two=cast.power_of_two)
            for element, scaling in what_ifs(self.watch.recipes, role):
                if cast is None or (element, scaling) != cast[:2]:
                    self.watch.measure(self.series(role, orientation, element, scaling), view, element)

    def add_sample(self, x: Tensor, scales: Tensor | None = None) -> WgradSample | None:
        """Columns of x [M, K], the first input of a step, for the error of the weight's gradient."""
        if self.watch.has_turn(self.layer.index) and self.watch.once("wgrad", self.layer.name):
            return sample_columns(x, scales)
        return None

    def add_errors(self, x: Tensor, weight: Tensor | None) -> None:
        """Of a detailed step: outlying channels of x [M, K], the error of its product with the weight [N, K]
        in the first call of a step, and what the call keeps for the error of the weight's gradient."""
        self.call.sample = self.add_sample(x) or self.call.sample
        outliers = channel_outlier_ratio(x)
        for recipe in self.watch.recipes:
            scaling = recipe.scaling_of("activation")
            series = self.series("activation", "rowwise", recipe.element, scaling)
            self.watch.largest(series, CHANNEL_OUTLIER, outliers)
            if weight is not None and self.watch.once("gemm", *series.key):
                self.watch.largest(series, GEMM_ERROR, gemm_error(
                    x, matrix(weight), recipe.element, x_scaling=scaling,
                    weight_scaling=recipe.scaling_of("weight")))

    def add_wgrad_error(self, dy: Tensor, sample: WgradSample) -> None:
        """The error of the product of dy [M, N] and the sampled input of the same call, as a what-if."""
        for recipe in self.watch.recipes:
            scaling = recipe.scaling_of("gradient")
            error = wgrad_row_error_max(dy, sample, recipe.element, dy_scaling=scaling,
                                        x_scaling=recipe.scaling_of("activation"))
            series = self.series("gradient", "columnwise", recipe.element, scaling)
            self.watch.largest(series, WGRAD_ROW_ERROR, error)

    def add_weight(
        self, series: Series, weight: Tensor, element: Format, scales: Tensor | None = None, *,
        power_of_two: bool = False, current: bool = False, gemm: int = 0,
    ) -> None:
        """Once a step. Under FSDP all ranks hold the whole weight here, and one of them measures it.

        current: in steps that are not detailed, the scales are always those of the weight itself."""
        watch = self.watch
        if not watch.announce(series):  # all ranks have the same series
            return
        if current:
            self.weights.expect(self, gemm, series, weight, element, power_of_two=power_of_two)
        mine = is_measured_here(weight, rank=watch.rank, world=watch.world, index=self.layer.dealt)
        if watch.once(*series.key) and mine:
            watch.measure(series, matrix(weight), element, scales=scales, power_of_two=power_of_two)

    def add_casts(self, weight: Tensor, gemm: int = 0) -> None:
        """A weight as the layer casts it, and as what-ifs."""
        cast = self.layer.cast("weight", "rowwise", gemm)
        if cast is not None:
            series = self.series("weight", "rowwise", cast.element, cast.scaling, cast.policy, live=True,
                                 gemm=gemm)
            self.add_weight(series, weight, cast.element, cast.scales(), power_of_two=cast.power_of_two)
        for element, scaling in what_ifs(self.watch.recipes, "weight"):
            self.add_weight(self.series("weight", "rowwise", element, scaling, gemm=gemm), weight, element,
                            current=True, gemm=gemm)

    def operands(self, x: Tensor, weight: Tensor, call: int) -> None:
        """One call in a compiled region; see `compiled.Traced`."""
        watch, name = self.watch, self.layer.name
        if watch.rehearsing or not watch.attends():
            return
        if watch.is_first_pass(self.layer.module) and watch.measuring:
            watch.ran.add(name)
            self.weights.begin()
            with watch.guarded(name):
                _measure_operands(self, weight, [x])
                watch.calls.setdefault(name, {})[call] = self.call.sample
            self.call.sample = None

    def gradient(self, dy: Tensor, call: int) -> None:
        """The gradient of the output of that call."""
        if self.watch.measuring and not self.watch.rehearsing:
            GradientHook(self, self.watch.sample_of(self.layer.name, call))(dy)


class ForwardPreHook(Inert):
    """Measures what goes into a layer, before the layer can change it in place."""

    def __init__(self, probe: LayerProbe) -> None:
        self.probe = probe
        self.watch = probe.watch

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():  # see TracedHook
            return
        watch = self.watch
        if watch.idle and not (watch.recording or watch.asks_capturing()):  # as `attends`, in one call less
            return
        probe = self.probe
        counts = probe.watch.counts(module)
        if not probe.watch.measuring:
            return
        probe.call.inside, probe.call.live = True, counts
        after = ForwardHook(probe)
        # Checkpointing leaves a recomputed forward by an exception; the hook must learn of it.
        # Of a DTensor it must come before the hook of `parallelize_module` that hands out plain tensors.
        # Of a layer that is a unit of FSDP, before the hook that takes its weight apart again.
        first = probe.layer.engine != "" or hasattr(module._parameters.get("weight"), "placements")
        if first and probe.left is not None:
            probe.left.remove()
        after.handle = module.register_forward_hook(after, with_kwargs=True, always_call=True, prepend=first)
        probe.left = after.handle if first else None
        if counts:
            probe.watch.ran.add(probe.layer.name)
            probe.weights.begin()
            if not probe.layer.in_situ and not probe.layer.engine:
                with probe.watch.guarded(probe.layer.name):
                    _measure_inputs(probe, module, (args, kwargs))


class ForwardHook(Inert):
    """Asks for the gradients of a layer's outputs; there for one call."""

    handle: RemovableHandle | None = None

    def __init__(self, probe: LayerProbe) -> None:
        self.probe = probe
        self.thread = threading.get_ident()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        # Of a call that another thread makes at this time, which may remove the hook just before torch looks
        # whether it takes keywords, and calls it without.
        if self.thread != threading.get_ident():
            return
        probe, (kwargs, output) = self.probe, rest
        # After an exception torch goes through the hooks themselves: only the last one may remove itself.
        if self.handle is not None and (output is not None or probe.left is None):
            self.handle.remove()
        wanted = probe.call.live and not probe.layer.in_situ and output is not None
        probe.call.inside = probe.call.live = False
        rows: tuple[int, ...] | None = ()
        if wanted and probe.layer.engine:
            output = next(tensors_in(output), None)  # what follows is a bias, or its own normalised input
            with probe.watch.guarded(probe.layer.name):
                x = next((one for one in tensors_in((args, kwargs)) if one.is_floating_point()), None)
                rows = measure_engine(probe, x, output, args, kwargs)
        sample, probe.call.sample = probe.call.sample, None
        if wanted and rows is not None:
            with probe.watch.guarded(probe.layer.name):
                for y in tensors_in(output):
                    if y.requires_grad:
                        y.register_hook(GradientHook(probe, sample, rows))  # type: ignore[no-untyped-call]


class TracedHook(Inert):
    """What `torch.compile` sees of the probe: both hooks in one, as inside of checkpointing nothing may be
    kept from one to the other. An input that the layer changes in place is seen changed."""

    def __init__(self, probe: LayerProbe) -> None:
        self.key, self.anchor = probe.key.tensor, probe.watch.anchor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if is_dynamo_compiling() and module.training and torch.is_grad_enabled():
            return trace_call(self.key, self.anchor, module._parameters.get("weight"), (args, kwargs), output)
        return None


class GradientHook(Inert):
    """Measures the gradient of one output of one call; `rows` as in `by_gemm`.

    Pipeline schedules that split the backward (zero bubble) come through here twice, with one and the same
    tensor: for the gradients of inputs, later for those of weights.
    """

    def __init__(
        self, probe: LayerProbe, sample: WgradSample | None, rows: tuple[int, ...] = ()
    ) -> None:
        self.probe = probe
        self.sample = sample
        self.rows = rows
        self.seen: weakref.ref[Tensor] | None = None

    def __call__(self, gradient: Tensor) -> None:
        probe = self.probe
        if probe.watch.measuring and (self.seen is None or self.seen() is not gradient):
            self.seen = weakref.ref(gradient)
            probe.watch.gradients.add(probe.layer.name)
            with probe.watch.guarded(probe.layer.name):
                if kind := unreadable(gradient):
                    probe.watch.unobserved(probe.layer.name, f"its gradient cannot be read: {kind}")
                    return
                dy = matrix(gradient)
                if is_first_copy(gradient):
                    for gemm, part in by_gemm(dy, self.rows):
                        probe.add_operand("gradient", part, gemm)
                if self.sample is not None:
                    probe.add_wgrad_error(dy, self.sample)


def _measure_inputs(probe: LayerProbe, module: nn.Module, inputs: Any) -> None:
    """What goes into a plain linear."""
    weight, watch, name = weight_of(module), probe.watch, probe.layer.name
    why = "no weight that can be read without computing it (parametrized)" if weight is None else ""
    if weight is not None and (kind := unreadable(weight)):
        why = f"its weight cannot be read: {kind}"
    if why:
        watch.unobserved(name, why)
    width = module.in_features if weight is None or why else weight.shape[-1]
    floating = [x for x in tensors_in(inputs) if x.is_floating_point()]
    kinds = [unreadable(x) for x in floating]
    for kind in filter(None, kinds):
        watch.unobserved(name, f"an input cannot be read: {kind}")
    found = [x for x, kind in zip(floating, kinds, strict=True) if not kind and x.shape[-1:] == (width,)]
    if not found and not any(kinds):
        watch.unobserved(name, f"no input of {width} features")
    _measure_operands(probe, None if why else weight, found)


def _measure_operands(probe: LayerProbe, weight: Tensor | None, inputs: list[Tensor]) -> None:
    """Inputs [..., K]; the weight [N, K] and the errors of products in the first call of a step."""
    watch = probe.watch
    for operand in inputs:
        x = matrix(operand)
        if is_first_copy(operand):
            probe.add_operand("activation", x)
        if watch.detailed:
            probe.add_errors(x, weight)
    if weight is not None:
        probe.add_casts(weight)
