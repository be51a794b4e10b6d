"""Metrics from sums: the only place where sums become ratios.

Where nothing was measured the value is MISSING: an expert without tokens has no underflow, it does not have
an underflow of 0.
"""

import math
import statistics
from collections import deque

import numpy as np
import numpy.typing as npt

from fp8scope.sums import (
    COUNT_COLUMNS,
    MAX_COLUMNS,
    SENTINEL_MAX_COLUMNS,
    SENTINEL_SUM_COLUMNS,
    SUM_COLUMNS,
    SentinelSums,
    SumTables,
)
from fp8scope_protocol.series import Layout
from fp8scope_protocol.wire import MISSING

GRAD_NORM_WINDOW = 64
"""Steps whose median `grad_norm_ratio` compares with."""

LOST = 1e-3
"""|d| / |x| below which a round trip counts as having lost the tensor."""

Arrays = dict[str, npt.NDArray[np.generic]]


def derive(tables: SumTables, layout: Layout) -> Arrays:
    """Metrics of the catalogue, each [S]: uint64 counts and float32 values; HISTOGRAM apart.

    Also `exponent_histogram` uint64 [40, S], in detailed steps. Where a metric was not measured its value is
    MISSING.
    """
    if len(tables) != len(layout.series):
        raise ValueError(f"{len(tables)} rows for a layout of {len(layout.series)} series")
    counts = {key: tables.counts[:, i].numpy() for i, key in enumerate(COUNT_COLUMNS)}
    sums = {key: tables.sums[:, i].numpy() for i, key in enumerate(SUM_COLUMNS)}
    maxes = {key: tables.maxes[:, i].numpy() for i, key in enumerate(MAX_COLUMNS)}
    arrays: Arrays = {
        "elements": counts["elements"].astype("<u8"),
        "calls": counts["calls"].astype("<u8"),
        "nan_count": counts["nan"].astype("<u8"),
        "inf_count": counts["inf"].astype("<u8"),
        "zero_block_count": counts["zero_blocks"].astype("<u8"),
    }
    with np.errstate(all="ignore"):
        arrays |= _ratios(counts)
        arrays |= _errors(counts, sums)
        arrays |= _moments(counts, sums, maxes)
        arrays |= _scales(counts, sums, maxes)
        arrays |= _updates(layout, sums)
        arrays |= _fidelity(sums)
    for name, key in (("amax", "amax"), ("channel_outlier_ratio", "channel_outlier"),
                      ("gemm_error", "gemm_error"), ("wgrad_row_error_max", "wgrad_row_error")):
        arrays[name] = _value(maxes[key], maxes[key] > -np.inf)
    ranks = np.full(len(tables), -1.0) if tables.worst_rank is None else tables.worst_rank.numpy()
    arrays["worst_rank"] = _value(ranks, ranks >= 0)
    least = -maxes["neg_amin_nonzero"]
    arrays["amin_nonzero"] = _value(least, least < np.inf)
    histogram = tables.histogram.numpy()
    if histogram.any():
        arrays["exponent_histogram"] = np.ascontiguousarray(histogram.T.astype("<u8"))
    return arrays


def derive_sentinels(reduced: SentinelSums, grad_norms: deque[float]) -> dict[str, float]:
    """Sentinels of the catalogue that were measured. `grad_norms` holds the norms of earlier steps
    (GRAD_NORM_WINDOW at most); this step's finite norm is appended to it."""
    sums = dict(zip(SENTINEL_SUM_COLUMNS, reduced.sums.tolist(), strict=True))
    maxes = dict(zip(SENTINEL_MAX_COLUMNS, reduced.maxes.tolist(), strict=True))
    found = {key: value for key, value in maxes.items() if value > -math.inf and key != "skipped"}
    if (entropy := found.pop("neg_router_entropy", None)) is not None:
        found["router_entropy"] = -entropy if entropy < math.inf else math.nan
    if sums["loss_count"] or sums["grad_count"] or sums["norm_count"] or sums["nonfinite"]:
        found["nonfinite_count"] = sums["nonfinite"]
    if sums["loss_count"]:
        found["loss"] = sums["loss_sum"] / sums["loss_count"]
    if sums["v_total"]:
        found["v_zero_share"] = sums["v_zero"] / sums["v_total"]
    if sums["weight_square"]:
        found["update_weight_ratio"] = math.sqrt(sums["update_square"] / sums["weight_square"])
    if sums["grad_count"] or sums["norm_count"]:
        logged = sums["norm_count"]  # what the job says wins
        norm = found["grad_norm"] = math.sqrt(sums["norm_square"] / logged if logged else sums["grad_square"])
        if grad_norms and (typical := statistics.median(grad_norms)):
            found["grad_norm_ratio"] = norm / typical
        if math.isfinite(norm):
            grad_norms.append(norm)
    while len(grad_norms) > GRAD_NORM_WINDOW:
        grad_norms.popleft()
    return found


Columns = dict[str, npt.NDArray[np.int64]]
Real = npt.NDArray[np.float64]
Reals = dict[str, Real]


def _value(values: npt.NDArray[np.float64], measured: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    return np.where(measured, values.astype("<f4"), MISSING)


def _share(part: npt.NDArray[np.int64], whole: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    return _value(part / whole.astype(np.float64), whole > 0)


def _ratios(counts: Columns) -> Arrays:
    coded = np.where(counts["coded"] > 0, counts["elements"], 0)  # nothing was coded: nothing is known
    known = np.where(counts["coded"] > 0, counts["elements"], counts["stored"])
    return {
        "underflow_ratio": _share(counts["underflow"], coded),
        "underflow_nonzero_ratio": _share(counts["underflow"], np.minimum(counts["nonzero"], coded)),
        "zero_ratio": _share(counts["zero_codes"], known),
        "saturation_ratio": _share(counts["saturated"], coded),
        "bad_block_ratio": _share(counts["bad_blocks"], counts["blocks"]),
    }


def _errors(counts: Columns, sums: Reals) -> Arrays:
    """1 - cos(x, d) without cancellation; see `distortion` in the catalogue.

    c = |d| / |x| comes from a difference of sums that are good to seven digits, so below LOST it says no
    more than that d is nearly nothing: distortion 1.
    """
    signal = sums["coded_x2"]
    n, b, c, distortion = _angle(signal, sums["e2"], sums["xe"])
    lost = (counts["zero_codes"] == counts["coded"]) | (c < LOST)  # d = 0 and x is not
    distortion = np.where(signal == 0.0, 0.0, np.where(lost, 1.0, distortion))
    some = signal > 0.0
    return {
        "distortion": _value(distortion, counts["coded"] > 0),
        "gain": _value(1.0 - b, some),
        "sqnr_db": _value(-10.0 * np.log10(n), some),
    }


def _angle(x2: Real, e2: Real, xe: Real) -> tuple[Real, Real, Real, Real]:
    """n = e2 / x2, b = xe / x2, |x - e| / |x| and 1 - cos(x, x - e)."""
    n, b = e2 / x2, xe / x2
    c = np.sqrt(np.maximum(1.0 - 2.0 * b + n, 0.0))
    return n, b, c, np.clip((n - b * b) / (c * (c + 1.0 - b)), 0.0, 2.0)


def _fidelity(sums: Reals) -> Arrays:
    """Of a gradient in the job's precision, and of another micro-batch's, against the one in BF16."""
    size = sums["grad_x2"]
    _, _, norm, distance = _angle(size, sums["grad_e2"], sums["grad_xe"])
    noise = _angle(size, sums["noise_e2"], sums["noise_xe"])[3]
    return {
        "grad_fidelity": _value(distance, size > 0.0),
        "grad_fidelity_norm_ratio": _value(norm, size > 0.0),
        "grad_noise": _value(noise, (size > 0.0) & (sums["noise_e2"] > 0.0)),
    }


def _updates(layout: Layout, sums: Reals) -> Arrays:
    """Of weights what arrived of the intended change; of states what their rounding did to the update.

    applied x intended follows from the three squares: no cancellation, as the gain is near 1.
    """
    wanted, got, missed = sums["wanted2"], sums["got2"], sums["missed2"]
    some = wanted > 0.0
    weights = np.array([one.role == "weight" for one in layout.series], dtype=np.bool_)
    return {
        "update_error": _value(np.sqrt(missed / wanted), some & ~weights),
        "update_norm_ratio": _value(np.sqrt(got / wanted), some & ~weights),
        "update_gain": _value((wanted + got - missed) / (2.0 * wanted), some & weights),
    }


def _moments(counts: Columns, sums: Reals, maxes: Reals) -> Arrays:
    """Of tensors that were read; of compared gradients, and of updates, only elements are counted."""
    finite = counts["elements"] - counts["nan"] - counts["inf"]
    x2 = sums["x2"]
    read = (finite > 0) & ((x2 > 0.0) | (maxes["amax"] > -np.inf))
    return {
        "rms": _value(np.sqrt(x2 / finite), read),
        "mean_abs": _value(sums["abs"] / finite, read),
        "kurtosis": _value(finite * sums["x4"] / (x2 * x2), x2 > 0.0),
    }


def _scales(counts: Columns, sums: Reals, maxes: Reals) -> Arrays:
    blocks = counts["scaled_blocks"]
    mean = sums["scale_log2"] / blocks
    variance = np.maximum(sums["scale_log2_sq"] / blocks - mean * mean, 0.0)
    return {
        "scale_min": _value(-maxes["neg_scale_min"], blocks > 0),
        "scale_max": _value(maxes["scale_max"], blocks > 0),
        "scale_log2_mean": _value(mean, blocks > 0),
        "scale_log2_std": _value(np.sqrt(variance), blocks > 0),
        "scale_staleness_bits": _value(maxes["staleness_bits"], maxes["staleness_bits"] > -np.inf),
    }
