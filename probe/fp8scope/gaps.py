"""What a reader would miss in a measured step, and why.

Layers that come into the model after the probe, or leave it, are told and not measured: names, ranks that
hold them, rows and the collector's map of precisions were agreed on when attaching, on all ranks alike, and
what is compiled would be compiled again. Whether any came or left is asked in every measured step. That takes
one comparison of a dict for each module (`Tree`); only where one differs is the model searched for layers.
"""

from collections.abc import Callable, Iterable

from torch import nn

from fp8scope.layers import Layer
from fp8scope.watch import Watch

AGAIN = "close the scope and attach again, with resume=True, to have it measured"

IN_PLACE = ("none came to an output: the loss does not depend on it, or the layer returned part of a tensor, "
            "which was changed in place (y += x, inplace=True); then write y = y + x, or return a copy")


class Tree:
    """The modules of a model as they were when last looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._children: list[tuple[dict[str, nn.Module | None], dict[str, nn.Module | None]]] = []
        self._keep()

    def changed(self) -> bool:
        """Whether a module was added, replaced or removed since the last call."""
        if all(now == then for now, then in self._children):  # modules are equal to themselves only
            return False
        self._keep()
        return True

    def _keep(self) -> None:
        """What torch.jit has compiled keeps its parts elsewhere, and never changes."""
        self._children = [(module._modules, dict(module._modules)) for module in self._model.modules()
                          if isinstance(module._modules, dict)]


class Gaps:
    """Looks for them at the end of measured steps. `layers` are watched; `find` lists those of the model."""

    def __init__(
        self, watch: Watch, layers: Iterable[Layer], model: nn.Module, find: Callable[[], Iterable[Layer]]
    ) -> None:
        self._watch = watch
        self._layers = tuple(layers)
        self._find = find
        self._tree = Tree(model)
        self._told = False

    def note(self, step: int) -> None:
        """Lists as not observed, each once: what came into the model or left it, and in the first measured
        step those layers that it did not show."""
        changed = self._tree.changed()
        present = {id(layer.module): layer.name for layer in self._find()} if changed else None
        if not self._told:
            self._told = True
            self._note_silent(step, present)
        if present is not None:
            self._note_changes(present)

    def _note_silent(self, step: int, present: dict[int, str] | None) -> None:
        """Layers of the model that showed nothing, unless they are in a CUDA graph."""
        watch = self._watch
        ran = watch.ran | {layer for layer, role in watch.recorded if role == "activation"}
        gradients = watch.gradients | {layer for layer, role in watch.recorded if role == "gradient"}
        for layer in self._layers:
            if present is not None and id(layer.module) not in present:
                continue
            if layer.name not in ran:
                watch.unobserved(layer.name, f"did not run in step {step}: unused, in evaluation mode, "
                                             "called past its hooks, in torch.func, or compiled before the "
                                             "probe was attached")
            elif not layer.in_situ and layer.name not in gradients:
                why = IN_PLACE if layer.name in watch.asked else "no output had one"
                watch.unobserved(layer.name, f"gradient not observed: {why}")

    def _note_changes(self, present: dict[int, str]) -> None:
        """`present`: id -> name of the layers that the model has now."""
        watched = {id(layer.module) for layer in self._layers}
        new = {name for id_, name in present.items() if id_ not in watched}
        gone = {layer.name for layer in self._layers if id(layer.module) not in present}
        for name in sorted(new - gone):
            self._watch.unobserved(name, f"came into the model after the probe, not measured: {AGAIN}")
        for name in sorted(new & gone):
            self._watch.unobserved(name, f"was replaced after the probe was attached, not measured: {AGAIN}")
        for name in sorted(gone - new):
            self._watch.unobserved(name, "is no longer in the model")
