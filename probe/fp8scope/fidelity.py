"""What the layers' precision does to gradients: one micro-batch twice, with the same random numbers.

    g      gradient of a parameter with every switchable layer in BF16
    d      the same in the precision the job runs in
    grad_fidelity        1 - cos(g, d)
    grad_norm_fidelity   ||d|| / ||g||
    grad_noise           1 - cos(g, g'), g' of another micro-batch in BF16: the size that does not matter

It costs two or three forward and backward passes and as many sets of gradients in memory, so it runs when
the job asks for it: every few hundred steps, between two optimizer steps. Gradients that lie in `grad`,
buffers (batch norm, amax histories) and random states are put back as they were. Sums are taken on g over
its largest element in fp32 and widened, as in `roundtrip`; under FSDP each rank adds its shard, so ratios
are of the whole.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8scope.layers import Layer, ParameterPlace
from fp8scope.observer import Switchable
from fp8scope.sharding import is_measured_here, local
from fp8scope.sums import COUNT_COLUMNS, SUM_COLUMNS
from fp8scope.watch import Watch
from fp8scope_protocol.series import Series

Loss = Callable[[], Tensor]


def measure_fidelity(
    model: nn.Module, layers: Iterable[Layer], places: dict[int, ParameterPlace], watch: Watch, loss: Loss,
    other: Loss | None,
) -> None:
    """Adds one comparison to the rows of every parameter. `loss` and `other` run the model's forward and
    return the loss of one micro-batch each; what they raise is raised once everything has been put back."""
    reduced: list[Switchable] = [one.module for one in layers if isinstance(one.module, Switchable)]
    reduced = [one for one in reduced if one.precision != "bf16"]
    if not reduced:
        watch.unobserved("grad_fidelity", "no layer that can be switched runs below BF16")
        return
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) in places]
    with _put_back(model, parameters, reduced):
        state = _random_states()
        found = _gradients(loss, parameters)
        for one in reduced:
            one.set_precision("bf16")
        _set_random_states(state)
        exact = _gradients(loss, parameters)
        noise = [None] * len(parameters) if other is None else _gradients(other, parameters)
    for parameter, g, d, another in zip(parameters, exact, found, noise, strict=True):
        place = places[id(parameter)]
        with watch.guarded(place.name):
            _add(watch, place, parameter, g, d, another)


def _add(
    watch: Watch, place: ParameterPlace, parameter: Tensor, g: Tensor | None, d: Tensor | None,
    another: Tensor | None,
) -> None:
    series = Series(name=place.name, role="wgrad", format="e4m3", scaling="none", live=True,
                    module=place.module, depth=place.depth, aliases=place.aliases)
    row = watch.rows.row(series)  # all ranks have the same series
    mine = is_measured_here(parameter, rank=watch.rank, world=watch.world, index=place.index)
    if g is None or d is None or not mine or g.numel() == 0:
        return
    row.counts[COUNT_COLUMNS.index("elements")] += g.numel()
    row.counts[COUNT_COLUMNS.index("calls")] += 1
    unit = g.abs().amax()
    unit = torch.where((unit > 0) & torch.isfinite(unit), unit, 1.0).float()
    x = g.flatten().float() / unit
    square = unit.double().square()
    sums = {"grad_x2": torch.dot(x, x)}
    for name, value in (("grad", d), ("noise", another)):
        if value is not None:
            e = x - value.flatten().float() / unit
            sums |= {f"{name}_e2": torch.dot(e, e), f"{name}_xe": torch.dot(x, e)}
    for name, value in sums.items():
        row.sums[SUM_COLUMNS.index(name)] += value.double() * square


def _gradients(loss: Loss, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """This rank's parts of the gradients of one micro-batch."""
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad():
        torch.autograd.backward(loss())
    return [None if p.grad is None else local(p.grad) for p in parameters]


@contextmanager
def _put_back(model: nn.Module, parameters: list[nn.Parameter], reduced: list[Switchable]) -> Iterator[None]:
    """Afterwards gradients, buffers, precisions and random states are what they were."""
    gradients = [parameter.grad for parameter in parameters]
    precisions = [one.precision for one in reduced]
    buffers = [(module._buffers, name, one, one.clone())
               for module in model.modules() for name, one in module._buffers.items() if one is not None]
    state = _random_states()
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for one, precision in zip(reduced, precisions, strict=True):
            one.set_precision(precision)
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer.copy_(value)
        _set_random_states(state)


def _random_states() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_random_states(state: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
