"""What is measured of a forward of one of TransformerEngine's layers, once it is over."""

from typing import Any

from torch import Tensor

from fp8scope.home import matrix_of
from fp8scope.layer_probe import LayerProbe
from fp8scope.sharding import is_first_copy, unreadable
from fp8scope.transformer_engine import HIDDEN, by_gemm, group_rows, unread
from fp8scope.watch import matrix


def measure_engine(
    probe: LayerProbe, x: Tensor | None, output: Tensor | None, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[int, ...] | None:
    """The operands of a call with the input x and, of what it returned, the `output` of its last GEMM.

    Returns what `by_gemm` needs to tell the output's rows apart; None where the host does not know it.
    """
    layer, watch = probe.layer, probe.watch
    for reason in unread(layer.module):
        watch.unobserved(layer.name, reason)
    weights = [matrix_of(layer.module, one.key) for one in layer.weights]
    for gemm, weight in enumerate(weights):
        if weight is not None and not unreadable(weight):
            probe.add_casts(weight, gemm)
    if layer.engine in HIDDEN:
        second = layer.engine == "LayerNormMLP" and output is not None
        return (0, len(matrix(output))) if second else ()  # type: ignore[arg-type]
    rows = group_rows(args, kwargs) if layer.engine == "GroupedLinear" else ()
    if rows is None:
        watch.unobserved(layer.name, "activation and gradient not observed: m_splits lies on the device")
    elif x is not None and (kind := unreadable(x)):
        watch.unobserved(layer.name, f"an input cannot be read: {kind}")
    elif x is not None and is_first_copy(x):
        _measure_activation(probe, x, rows, weights)
    return rows


def _measure_activation(
    probe: LayerProbe, x: Tensor, rows: tuple[int, ...], weights: list[Tensor | None]
) -> None:
    for gemm, part in by_gemm(matrix(x), rows):
        probe.add_operand("activation", part, gemm)
    alone = weights[0] if len(weights) == 1 else None
    if probe.layer.engine == "Linear" and probe.watch.detailed:
        probe.add_errors(matrix(x), None if alone is None or unreadable(alone) else alone)
