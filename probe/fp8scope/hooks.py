"""Hooks on the linear layers of a model, and the observer of layers that quantize by themselves.

    forward hook        input (activation), weight (see weights.py), GEMM error; puts a tensor hook on each
                        output with a gradient
    forward pre-hook    the same of what goes in, of layers whose forward is not that of `nn.Linear` and may
                        change its input; of those that report or quantize, that a forward begins
    tensor hook         gradient of the output
    node pre-hook       the same, of an output that is a view and is changed in place later

Off cadence a hook costs one look at a flag, and an ordinary linear has one (`benchmarks/probe_overhead.py
--hooks`). It is the first of its layer's forward hooks, before those of `parallelize_module`, which hand out
plain tensors, and of FSDP, which take the weight apart again. A pre-hook adds a forward hook for the call
under way, in measured steps only.

Traced by `torch.compile`, the forward hook measures nothing itself and puts operations into the graph
(compiled.py), whose bodies come back here.

What is measured is in layer_probe.py. A module with an attribute `observer` (see observer.py) hands over what
it really did, and is measured by nothing else.

Full backward hooks were rejected: they cost 60 to 80 us each, break in-place operations and see nothing of
outputs inside a dict. So were hooks that come and go with measured steps: compiled code looks for those that
it has traced and is compiled again without them, and a part of the model that is captured in a CUDA graph
tells nobody.
"""

import threading
import weakref
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from fp8scope.compiled import trace_call
from fp8scope.engine_operands import measure_engine
from fp8scope.in_situ import InSituObserver
from fp8scope.inert import Inert
from fp8scope.layer_probe import LayerProbe
from fp8scope.layers import Layer, weight_of
from fp8scope.nested import tensors_in
from fp8scope.saved_input import Kept
from fp8scope.sharding import unreadable
from fp8scope.watch import Watch
from fp8scope.weights import Weights


class Removable(Protocol):
    """What can be undone."""

    def remove(self) -> None:
        """Undoes it."""


def install(layers: tuple[Layer, ...], watch: Watch) -> list[Removable]:
    """Hooks on every layer, and an observer in those that report by themselves; the handles undo it."""
    handles: list[Removable] = []
    weights = Weights(watch)
    for layer in layers:
        probe, module = LayerProbe(layer, watch, weights), layer.module
        handles.append(probe)
        alone = not (layer.engine or layer.in_situ) and _keeps_input(layer)
        if not alone:
            handles.append(module.register_forward_pre_hook(ForwardPreHook(probe), with_kwargs=True))
        if layer.in_situ:
            module.observer = InSituObserver(probe)  # type: ignore[assignment]
        elif not layer.engine:
            hook = LinearHook(probe, alone=alone)
            handles.append(module.register_forward_hook(hook, with_kwargs=True, prepend=alone))
    return handles


def _keeps_input(layer: Layer) -> bool:
    """Whether a linear's input is after its forward what it was before: torch's own, and torchao's."""
    plain = type(layer.module).forward is nn.Linear.forward and "forward" not in vars(layer.module)
    return plain or bool(layer.live)


class LinearHook(Inert):
    """Measures a call of a plain linear, unless a pre-hook does: `alone` says that there is none.

    What `torch.compile` sees of the probe is this hook, as inside of checkpointing nothing may be kept from a
    pre-hook to a hook. Traced, an input that the layer changes in place is seen changed.
    """

    def __init__(self, probe: LayerProbe, *, alone: bool) -> None:
        self.probe = probe
        self.watch = probe.watch
        self.alone = alone
        self.key, self.anchor = probe.key.tensor, probe.watch.anchor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if is_dynamo_compiling():
            if module.training and torch.is_grad_enabled():
                return trace_call(self.key, self.anchor, module._parameters.get("weight"), (args, kwargs),
                                  output)
            return None
        watch = self.watch
        if not self.alone or (watch.idle and not (
                watch.recording or (watch.side_stream() and watch.asks_capturing()))):
            return None  # as `attends` says, in one call less
        if not is_compiling() and watch.counts(module) and watch.measuring:
            call = self.probe.call
            call.output = output if isinstance(output, Tensor) else None
            _begin(self.probe, module, (args, kwargs))
            call.output = None
            _end(self.probe, module, output)
        return None


class ForwardPreHook(Inert):
    """Measures what goes into a layer, before the layer can change it in place."""

    def __init__(self, probe: LayerProbe) -> None:
        self.probe = probe
        self.watch = probe.watch

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_dynamo_compiling():  # see LinearHook
            return
        watch = self.watch
        if watch.idle and not (watch.recording or (watch.side_stream() and watch.asks_capturing())):
            return
        if is_compiling():
            return
        probe = self.probe
        counts = watch.counts(module)
        if not watch.measuring:
            return
        probe.call.inside, probe.call.live = True, counts
        after = ForwardHook(probe)
        # Checkpointing leaves a recomputed forward by an exception; the hook must learn of it.
        # Of a DTensor, or of a layer that is a unit of FSDP, it must be the first, as above.
        first = probe.layer.engine != "" or hasattr(module._parameters.get("weight"), "placements")
        if first and probe.left is not None:
            probe.left.remove()
        after.handle = module.register_forward_hook(after, with_kwargs=True, always_call=True, prepend=first)
        probe.left = after.handle if first else None
        if counts:
            _begin(probe, module, (args, kwargs))


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
            wanted = rows is not None
        if wanted:
            _end(probe, module, output, rows or ())
        else:
            probe.call.late = probe.call.sample = None


def _begin(probe: LayerProbe, module: nn.Module, inputs: Any) -> None:
    """What went into a call that counts is measured."""
    probe.watch.ran.add(probe.layer.name)
    probe.weights.begin()
    if not probe.layer.in_situ and not probe.layer.engine:
        with probe.watch.guarded(probe.layer.name):
            _measure_inputs(probe, module, inputs)


def _end(probe: LayerProbe, module: nn.Module, output: Any, rows: tuple[int, ...] = ()) -> None:
    """The rest of it, and the gradients of its output are waited for; `rows` as in `by_gemm`."""
    late, probe.call.late = probe.call.late, None
    if late is not None:
        with probe.watch.guarded(probe.layer.name):
            if _is_readable(weight := weight_of(module), probe.watch, probe.layer.name):
                probe.add_late_weight(weight, late)
    kept, probe.call.sample = probe.call.sample, None
    with probe.watch.guarded(probe.layer.name):
        _ask_gradients(probe, output, kept, rows)


class GradientHook(Inert):
    """Measures the gradient of one output of one call; `rows` as in `by_gemm`.

    Pipeline schedules that split the backward (zero bubble) come through here twice, with one and the same
    tensor: for the gradients of inputs, later for those of weights.
    """

    def __init__(
        self, probe: LayerProbe, kept: Kept | None, rows: tuple[int, ...] = ()
    ) -> None:
        self.probe = probe
        self.kept = kept
        self.rows = rows
        self.seen: weakref.ref[Tensor] | None = None
        self.called = False
        """Whether a tensor still had this hook when its gradient came."""

    def __call__(self, gradient: Tensor | None) -> None:
        self.called = True
        if gradient is not None:  # of an output that is not used, whose node has another one that is
            self.measure(gradient)

    def measure(self, gradient: Tensor) -> None:
        """Adds `gradient`, once."""
        probe = self.probe
        if probe.watch.measuring and (self.seen is None or self.seen() is not gradient):
            self.seen = weakref.ref(gradient)
            kept, self.kept = self.kept, None  # this hook lives as long as the loss
            probe.add_gradient(gradient, kept, self.rows)


class NodeHook(Inert):
    """Measures the gradient of outputs that were changed in place, where it goes into the layer's own node.

    A linear with a bias makes a view of most outputs that have more dimensions than two, or one. A view that
    is changed in place, as by an in-place ReLU or in a residual stream, loses its tensor hook: torch gives it
    another node. The node of its base stays. There the gradient is the sum over all views, so it is taken
    only if no tensor hook of theirs was called.
    """

    def __init__(self, index: int, hook: GradientHook) -> None:
        self.index = index
        """Of the base among what its node has put out."""
        self.hook = hook

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[self.index] if self.index < len(gradients) else None
        if gradient is not None and not self.hook.called:
            self.hook.measure(gradient)


def _ask_gradients(
    probe: LayerProbe, output: Any, kept: Kept | None, rows: tuple[int, ...]
) -> None:
    """Hooks on every tensor of an output that wants a gradient."""
    bases: dict[int, GradientHook] = {}
    for y in tensors_in(output):
        if not y.requires_grad:
            continue
        probe.watch.asked.add(probe.layer.name)
        hook = GradientHook(probe, kept, rows)
        base = y._base if type(y) is Tensor else None
        if base is not None and base.grad_fn is not None and base.numel() == y.numel() and (
                base.shape[-1:] == y.shape[-1:]) and base.is_contiguous() and y.is_contiguous():
            if id(base) in bases:
                hook = bases[id(base)]
            else:
                bases[id(base)] = hook
                base.grad_fn.register_prehook(NodeHook(base.output_nr, hook))
        y.register_hook(hook)  # type: ignore[no-untyped-call]


def _measure_inputs(probe: LayerProbe, module: nn.Module, inputs: Any) -> None:
    """What goes into a plain linear."""
    watch, name = probe.watch, probe.layer.name
    weight = module._parameters.get("weight")
    known = weight if weight is not None else weight_of(module)
    readable = weight is not None and _is_readable(weight, watch, name)
    width = module.in_features if known is None or unreadable(known) else known.shape[-1]
    floating = [x for x in tensors_in(inputs) if x.is_floating_point()]
    kinds = [unreadable(x) for x in floating]
    for kind in filter(None, kinds):
        watch.unobserved(name, f"an input cannot be read: {kind}")
    found = [x for x, kind in zip(floating, kinds, strict=True) if not kind and x.shape[-1:] == (width,)]
    if not found and not any(kinds):
        watch.unobserved(name, f"no input of {width} features")
    probe.add_operands(weight if readable else None, found)
    if weight is None:
        probe.call.late = found


def _is_readable(weight: Tensor | None, watch: Watch, name: str) -> TypeGuard[Tensor]:
    """Whether a layer's weight can be read; if not, that is said."""
    if weight is None:
        why = "no weight that can be read without computing it (parametrized)"
    else:
        kind = unreadable(weight)
        why = f"its weight cannot be read: {kind}" if kind else ""
    if why:
        watch.unobserved(name, why)
    return not why
