"""Weights of a measured step, measured together where the step begins: two launches for all of a kind.

The first layer that runs in the step asks for those that were measured in the last measured step: weights do
not change until the optimizer steps. What layers ask for later and is not among them (the first step, a layer
that ran for the first time) is measured when they ask. A layer that no longer runs is measured once more.

Only plain parameters that lie in their module, on the device, where they lay then: a weight that FSDP gathers
for its own forward is read there, and so is whatever else is somewhere else at the beginning. Under given
scales, and in CUDA graphs, weights are read one by one.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8scope.layers import Layer
from fp8scope.sharding import is_measured_here
from fp8scope.watch import Operand, Watch, matrix
from fp8scope_protocol.formats import Format
from fp8scope_protocol.series import Series


class Wanted(NamedTuple):
    """What a layer asked to measure."""

    layer: Layer
    gemm: int
    """Which of its weights."""
    shape: torch.Size
    address: int
    series: Series
    element: Format
    power_of_two: bool
    precision: object
    """Of a layer that quantizes by itself: it asks in one of them only."""


class Weights:
    """The weights that were asked for, and are expected to be asked for again."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._known: dict[tuple[str, ...], Wanted] = {}
        """What the last measured step asked for."""
        self._asked: dict[tuple[str, ...], Wanted] = {}
        """What this one has so far."""

    def begin(self) -> None:
        """Measures what is expected, the first time in a measured step; guarded in itself."""
        watch = self.watch
        if watch.recording or not watch.once("weights of the step"):
            return
        self._known, self._asked = self._asked, {}
        operands: list[Operand] = []
        with watch.guarded("weights"):
            for wanted in self._known.values():
                weight = _found(wanted, watch)
                if weight is not None and watch.once(*wanted.series.key) and is_measured_here(
                        weight, rank=watch.rank, world=watch.world, index=wanted.layer.dealt):
                    operands.append(Operand(wanted.series, matrix(weight), wanted.element,
                                            wanted.power_of_two))
        if operands:
            watch.measure_all(operands, "weights")

    def expect(self, layer: Layer, gemm: int, series: Series, weight: Tensor, element: Format,
               *, power_of_two: bool) -> None:
        """The next measured step is to begin with this one too, measured with current scales."""
        if self.watch.recording or layer.engine or type(weight) not in (Tensor, nn.Parameter):
            return
        if series.key in self._asked:  # of several layers that share it, the first
            return
        wanted = self._known.get(series.key)
        address = weight.data_ptr()
        if wanted is None or wanted.layer is not layer or wanted.address != address:
            wanted = Wanted(layer, gemm, weight.shape, address, series, element, power_of_two,
                            _precision(layer.module))
        self._asked[series.key] = wanted


def _found(wanted: Wanted, watch: Watch) -> Tensor | None:
    """The weight, if it lies where it did and all its values do."""
    layer = wanted.layer
    weight = layer.module._parameters.get(layer.weights[wanted.gemm].key)
    if (
        type(weight) is not nn.Parameter or weight.layout is not torch.strided or weight.is_nested
        or weight.device != watch.rows.device or weight.shape != wanted.shape
        or weight.data_ptr() != wanted.address or not (weight.numel() and weight.is_floating_point())
        or hasattr(weight, "ds_status")  # DeepSpeed's, which may be on its way here
        or (wanted.series.module, "weight") in watch.recorded  # replays measure it
        or _precision(layer.module) != wanted.precision
        or (layer.in_situ and watch.detailed)  # there scales are given
        or layer.weight(wanted.gemm).name != wanted.series.name  # it is shared no more
    ):
        return None
    return weight


def _precision(module: nn.Module) -> object:
    return getattr(module, "precision", None)
