"""Weights of fused experts: one parameter [experts, N, K] in a module that multiplies it by itself.

Such a module says how many experts it has (`num_experts` and the like, see layers.py). Each one's matrix is a
series, `experts.w1[3]`, counted in the whole parameter where it is sharded by experts. They are measured in
detailed steps, and there one expert in eight at a time: a model may have ten thousand. What goes in and comes
out is not seen, which is listed.
"""

from collections.abc import Iterator

from torch import nn

from fp8scope.layers import ParameterPlace, fused_weights
from fp8scope.sharding import first_row, is_measured_here, local
from fp8scope.watch import Operand, Watch
from fp8scope_protocol.recipes import what_ifs
from fp8scope_protocol.series import Series


def measure_fused(model: nn.Module, places: dict[int, ParameterPlace], watch: Watch) -> None:
    """Adds the experts whose turn it is in this detailed step, each once; guarded in itself."""
    found: list[Operand] = []
    with watch.guarded("experts"):
        for module in model.modules():
            for parameter in fused_weights(module):
                place = places.get(id(parameter))
                if place is not None and is_measured_here(parameter, rank=watch.rank, world=watch.world,
                                                          index=place.index):
                    found += _operands(parameter, place, watch)
    if found:
        watch.measure_all(found, "experts")


def _operands(parameter: nn.Parameter, place: ParameterPlace, watch: Watch) -> Iterator[Operand]:
    for expert, weight in enumerate(local(parameter).unbind(0), start=first_row(parameter)):
        name = f"{place.name}[{expert}]"
        if watch.has_turn(expert) and weight.numel() and watch.once("fused", name):
            for element, scaling in what_ifs(watch.recipes, "weight"):
                series = Series(name=name, role="weight", format=element.name, scaling=scaling,
                                depth=place.depth)
                yield Operand(series, weight, element)
