"""`diagnose`: what a probe would measure of a model, what not and why, and what that should cost.

    print(fp8scope.diagnose(model, optimizer, tokens=16_384))

Nothing is attached and nothing is computed, so a model on the meta device will do. What only a run can show
(a layer that is never called, an output without a gradient) is in the run's own events `unobserved`.

Cost. A round trip is bound by reading its operand, so a measured step should take the bytes it reads over a
bandwidth: by default that of the round trip with its histogram on one H200, for tensors of 64 MiB
(docs/log.md). Small tensors take longer, since each costs its launches. Operands are taken to be of the type
of their layer's weight, which under autocast is twice too wide.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fp8scope.arguments import (
    bare_optimizers,
    check_arguments,
    check_unattached,
    format_names,
    is_whole,
)
from fp8scope.planned import Plan, find_gaps, plan_layers, plan_states
from fp8scope.reduction import table_bytes
from fp8scope.rows import FIRST_CAPACITY
from fp8scope.sums import SumTables
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.metrics import HISTOGRAM_BINS, METRICS
from fp8scope_protocol.recipes import parse_recipes
from fp8scope_protocol.series import Series
from fp8scope_protocol.wire import Unobserved

BANDWIDTH = 1.0e12
"""Bytes a second: 64 MiB in 65.8 us."""
SHOWN = 20
"""Gaps that the table lists; the rest are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The series of one role in one format."""

    role: str
    orientation: str
    format: str
    scaling: str
    live: bool
    """Whether it is what the job runs in, not a what-if."""
    series: int
    light_bytes: int
    """Read in a measured step."""
    detailed_bytes: int
    """Read in a step that is measured in detail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What a probe would do. `str` is a table for people, `document` is for JSON."""

    model: str
    parameters: int
    formats: tuple[str, ...]
    every: int
    detail_every: int
    tokens: int
    """Rows of each activation and gradient, on one rank in one step."""
    bandwidth: float
    """Bytes a second, assumed."""
    measured: tuple[Measured, ...]
    unobserved: tuple[Unobserved, ...]

    @property
    def series(self) -> int:
        """How many series there are: rows of a map."""
        return sum(one.series for one in self.measured)

    @property
    def row_bytes(self) -> int:
        """Memory of one series."""
        return table_bytes(SumTables.zeros(1))

    @property
    def device_bytes(self) -> int:
        """Memory of all sums with room to grow, and of one ordered copy at the end of a measured step."""
        capacity = FIRST_CAPACITY
        while capacity < self.series:
            capacity *= 2
        return (capacity + self.series) * self.row_bytes

    @property
    def wire_bytes(self) -> tuple[int, int]:
        """Of a measured step, and of one in detail, before compression, which leaves far less."""
        light = sum(8 if one.kind == "count" else 4 for one in METRICS.values()) * self.series
        return light, light + 8 * HISTOGRAM_BINS * self.series

    @property
    def read_bytes(self) -> tuple[int, int]:
        """Of a measured step, and of one in detail."""
        return (sum(one.light_bytes for one in self.measured),
                sum(one.detailed_bytes for one in self.measured))

    @property
    def step_seconds(self) -> tuple[float, float]:
        """What a measured step should cost, and one in detail."""
        light, detailed = self.read_bytes
        return light / self.bandwidth, detailed / self.bandwidth

    @property
    def mean_seconds(self) -> float:
        """The same, spread over all steps."""
        light, detailed = self.step_seconds
        return (light + (detailed - light) / self.detail_every) / self.every

    def document(self) -> dict[str, Any]:
        """Everything, with plain names and values."""
        names = ("series", "row_bytes", "device_bytes", "wire_bytes", "read_bytes", "step_seconds",
                 "mean_seconds")
        given = {name: getattr(self, name) for name in (
            "model", "parameters", "formats", "every", "detail_every", "tokens", "bandwidth")}
        return given | {name: getattr(self, name) for name in names} | {
            "measured": [asdict(one) for one in self.measured],
            "unobserved": [{"name": one.name, "reason": one.reason} for one in self.unobserved]}

    def __str__(self) -> str:
        return "\n".join((*self._head(), *self._table(), *self._gaps(), *self._costs()))

    def _head(self) -> list[str]:
        return [f"{self.model}, {self.parameters:,} parameters; measured every {self.every} steps, in detail "
                f"every {self.every * self.detail_every}; what-ifs: {', '.join(self.formats)}", ""]

    def _table(self) -> list[str]:
        if not self.measured:
            return ["Nothing would be measured.", ""]
        rows = [("role", "orientation", "format", "scaling", "", "series", "read", "read in detail")]
        rows += [(one.role, one.orientation, one.format, one.scaling, "live" if one.live else "what-if",
                  f"{one.series:,}", _size(one.light_bytes), _size(one.detailed_bytes))
                 for one in self.measured]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.rjust(width) if i > 4 else cell.ljust(width)
                          for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
                for row in rows] + [""]

    def _gaps(self) -> list[str]:
        if not self.unobserved:
            return ["Everything that is a matrix is measured.", ""]
        more = len(self.unobserved) - SHOWN
        return ["Not measured:",
                *(f"  {one.name}: {one.reason}" for one in self.unobserved[:SHOWN]),
                *([f"  and {more} more"] if more > 0 else []), ""]

    def _costs(self) -> list[str]:
        (wire, wire_detailed), (read, read_detailed) = self.wire_bytes, self.read_bytes
        light, detailed = self.step_seconds
        return [
            f"series             {self.series:,}",
            f"on the wire        {_size(wire)} a measured step, {_size(wire_detailed)} in detail, before "
            "compression",
            f"memory             {_size(self.device_bytes)}: {self.row_bytes} bytes a series, with room to "
            "grow, and a copy",
            f"reads              {_size(read)} a measured step, {_size(read_detailed)} in detail",
            f"should take        {light * 1e3:.3g} ms, {detailed * 1e3:.3g} ms in detail, "
            f"{self.mean_seconds * 1e3:.3g} ms a step on average",
            f"assumed            {self.tokens:,} tokens a step and rank, {self.bandwidth / 1e9:,.0f} GB/s "
            "(an H200, tensors of 64 MiB); small tensors cost their launches instead",
        ]


def diagnose(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer] = (), *, formats: Iterable[str] = ("e4m3",),
    every: int = 10, detail_every: int = 32, tokens: int = 8192, bandwidth: float = BANDWIDTH,
) -> Diagnosis:
    """What `attach` with the same arguments would measure on one rank that has all of `model`.

    tokens: rows of each activation, on one rank in one step. bandwidth: bytes a second, to tell the cost by.
    """
    if not isinstance(model, nn.Module):
        raise Invalid("model", type(model).__name__, "must be a torch.nn.Module")
    given = bare_optimizers(optimizers)
    names = format_names(formats)
    check_arguments("diagnosis", every, detail_every, None, names)
    if not is_whole(tokens, least=1):
        raise Invalid("tokens", tokens, "must be a number of rows, 1 to 2^53")
    if not 1 <= bandwidth < math.inf:
        raise Invalid("bandwidth", bandwidth, "must be bytes a second, 1 or more and finite")
    check_unattached(model)
    recipes = parse_recipes(names)
    plans = (*plan_layers(model, recipes, tokens=tokens), *plan_states(model, given, recipes))
    return Diagnosis(
        model=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters() if not is_lazy(p)),
        formats=names, every=every, detail_every=detail_every, tokens=tokens, bandwidth=bandwidth,
        measured=_grouped(plans), unobserved=find_gaps(model, given),
    )


def _grouped(plans: Iterable[Plan]) -> tuple[Measured, ...]:
    """Plans by role and format, in the order in which they first come; tied weights count once."""
    series: Counter[tuple[Any, ...]] = Counter()
    light: Counter[tuple[Any, ...]] = Counter()
    detailed: Counter[tuple[Any, ...]] = Counter()
    for plan in {plan.series.key: plan for plan in plans}.values():
        kind = _kind(plan.series)
        series[kind] += 1
        light[kind] += plan.light_bytes
        detailed[kind] += plan.detailed_bytes
    return tuple(
        Measured(role=kind[0], orientation=kind[1], format=kind[2], scaling=kind[3], live=kind[4],
                 series=count, light_bytes=light[kind], detailed_bytes=detailed[kind])
        for kind, count in series.items()
    )


def _kind(series: Series) -> tuple[Any, ...]:
    return (series.role, series.orientation, series.format, series.scaling, series.live)


def _size(count: int) -> str:
    """Bytes for people."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
