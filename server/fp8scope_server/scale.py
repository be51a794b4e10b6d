"""From a metric's values to palette indices.

A metric with a floor (distortion, gemm_error, sqnr_db) is drawn as its excess over the floor of each
series' format, so that formats can be compared in one picture. Ratios have a fixed logarithmic scale;
everything else has one that fits the data, rounded outwards so that a live picture seldom changes it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.metrics import Metric, floor_of
from fp8scope_protocol.series import Series
from fp8scope_server.palette import INF, MISSING, NAN, SCALE_COLOURS, SCALE_FIRST

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """`low` and `high` ends of the colours, in `unit`; values beyond them take the end's colour."""

    low: float
    high: float
    log: bool
    unit: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise Invalid("scale", (self.low, self.high), "needs finite low < high")
        if self.log and self.low <= 0:
            raise Invalid("low", self.low, "must be above 0 on a logarithmic scale")


_SHARES = ("underflow_ratio", "underflow_nonzero_ratio", "zero_ratio", "saturation_ratio", "bad_block_ratio")
_FIXED = {
    **{key: Scale(low=1e-6, high=1.0, log=True, unit="ratio") for key in _SHARES},
    "distortion": Scale(low=1.0, high=1000.0, log=True, unit="x floor"),
    "gemm_error": Scale(low=1.0, high=100.0, log=True, unit="x floor"),
    "sqnr_db": Scale(low=0.0, high=30.0, log=False, unit="dB under the floor"),
}
_LOG_UNITS = ("value", "elements", "calls", "blocks")
_LOG_KEYS = ("kurtosis", "channel_outlier_ratio")


def excess(metric: Metric, values: Floats, series: Sequence[Series]) -> Floats:
    """What the colours show of `values` [steps, series]: themselves, or how far they are over the floor.

    Grows with what is bad. NaN stays NaN.
    """
    if not metric.floor:
        return values
    floors = np.array([floor_of(metric, one) for one in series], dtype=np.float64)
    return floors - values if metric.worse == "low" else values / floors


def scale_of(metric: Metric, values: Floats) -> Scale:
    """The scale on which to draw `values` (already by `excess`)."""
    if metric.key in _FIXED:
        return _FIXED[metric.key]
    finite = values[np.isfinite(values)]
    if metric.unit in _LOG_UNITS or metric.key in _LOG_KEYS:
        return _fit_log(finite[finite > 0], metric.unit)
    return _fit_linear(finite, metric.unit)


def indices(
    metric: Metric, values: Floats, missing: npt.NDArray[np.bool_], scale: Scale
) -> npt.NDArray[np.uint8]:
    """Palette indices of `values` (already by `excess`) on `scale`; same shape.

    An infinity on the good side (an SQNR of +Inf is an exact copy) takes the low end's colour.
    """
    low, high, drawn = scale.low, scale.high, np.clip(values, scale.low, scale.high)
    if scale.log:
        low, high, drawn = math.log10(low), math.log10(high), np.log10(drawn)
    share = np.nan_to_num((drawn - low) / (high - low), nan=0.0)
    result = (np.rint(share * (SCALE_COLOURS - 1)) + SCALE_FIRST).astype(np.uint8)
    result[np.isposinf(values)] = INF
    if metric.worse == "neither":
        result[np.isneginf(values)] = INF
    result[np.isnan(values)] = NAN
    result[missing] = MISSING
    return result


def _fit_log(values: Floats, unit: str) -> Scale:
    if not values.size:
        return Scale(low=1.0, high=10.0, log=True, unit=unit)
    low = math.floor(math.log10(values.min()))
    high = max(math.ceil(math.log10(values.max())), low + 1)
    # Decades beyond float64 (a subnormal low, a high of 1e308) would become 0 or Inf.
    return Scale(low=10.0 ** max(low, -300), high=10.0 ** min(high, 300), log=True, unit=unit)


def _fit_linear(values: Floats, unit: str) -> Scale:
    if not values.size:
        return Scale(low=0.0, high=1.0, log=False, unit=unit)
    low, high = float(values.min()), float(values.max())
    spread = high - low
    if spread <= 1e-9 * max(abs(low), abs(high), 1e-300):
        margin = max(abs(low), 1.0) / 2
        return Scale(low=low - margin, high=high + margin, log=False, unit=unit)
    tick = 10.0 ** math.floor(math.log10(spread))
    return Scale(low=math.floor(low / tick) * tick, high=math.ceil(high / tick) * tick, log=False, unit=unit)
