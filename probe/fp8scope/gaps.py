"""What a reader would miss in a measured step, and why."""

from collections.abc import Iterable

from fp8scope.layers import Layer
from fp8scope.watch import Watch


def note_gaps(watch: Watch, layers: Iterable[Layer], present: Iterable[Layer], step: int) -> None:
    """Lists as not observed: of the `layers` that are watched those that `step`, which was measured, did not
    show, unless they are in a CUDA graph; and what is `present` in the model now and is not watched."""
    ran = watch.ran | {layer for layer, role in watch.recorded if role == "activation"}
    gradients = watch.gradients | {layer for layer, role in watch.recorded if role == "gradient"}
    known = set()
    for layer in layers:
        known.add(id(layer.module))
        if layer.name not in ran:
            watch.unobserved(layer.name, f"did not run in step {step}: unused, in evaluation mode, called "
                                         "past its hooks, in torch.func, or compiled before the probe was "
                                         "attached")
        elif not layer.in_situ and layer.name not in gradients:
            watch.unobserved(layer.name, "gradient not observed: no output had one")
    for layer in present:
        if id(layer.module) not in known:
            watch.unobserved(layer.name, "came into the model after the probe; attach it last")
