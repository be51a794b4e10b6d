"""From values to palette indices: fixed and fitted scales, floors, what is not finite."""

import math

import numpy as np
import pytest

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.metrics import METRICS, floor_of
from fp8scope_protocol.series import Series
from fp8scope_server.palette import INF, MISSING, NAN, SCALE_FIRST, SCALE_LAST
from fp8scope_server.scale import Floats, Scale, excess, indices, scale_of


def series(format: str = "e4m3") -> Series:
    return Series(name="layers.0.w", role="weight", format=format, scaling="tile 1x128")


def row(*values: float) -> Floats:
    return np.array([values], dtype=np.float64)


def index_of(key: str, *values: float) -> list[int]:
    shown = row(*values)
    nothing = np.zeros(shown.shape, dtype=np.bool_)
    return [int(i) for i in indices(METRICS[key], shown, nothing, scale_of(METRICS[key], shown))[0]]


def test_ratio_scale_is_logarithmic_from_one_in_a_million_to_one() -> None:
    """0 and 1e-6 take the low colour, 1 the high one, 1e-3 the middle."""
    middle = round((SCALE_LAST - SCALE_FIRST) / 2) + SCALE_FIRST
    drawn = index_of("underflow_ratio", 0.0, 1e-6, 1.0, 2.0)
    assert drawn == [SCALE_FIRST, SCALE_FIRST, SCALE_LAST, SCALE_LAST]
    assert abs(index_of("underflow_ratio", 1e-3)[0] - middle) <= 1


def test_nan_inf_and_missing_have_colours_of_their_own() -> None:
    values = row(math.nan, math.inf, 0.5, 0.5)
    missing = np.array([[False, False, True, False]])
    metric = METRICS["amax"]
    drawn = indices(metric, values, missing, scale_of(metric, values))[0]
    assert list(drawn[:3]) == [NAN, INF, MISSING]
    assert SCALE_FIRST <= drawn[3] <= SCALE_LAST


def test_an_exact_copy_is_not_shown_as_infinite_trouble() -> None:
    """SQNR = +Inf means no error at all: the good end; -Inf is the bad side."""
    metric = METRICS["sqnr_db"]
    over = excess(metric, row(math.inf, -math.inf, 31.8, 1.8), [series()] * 4)
    drawn = indices(metric, over, np.zeros(over.shape, dtype=np.bool_), scale_of(metric, over))[0]
    assert list(drawn) == [SCALE_FIRST, INF, SCALE_FIRST, SCALE_LAST]


def test_colours_show_the_excess_over_the_floor_of_each_format() -> None:
    """E4M3 and E5M2 at their own floors look alike; ten times the floor looks worse."""
    metric = METRICS["distortion"]
    two = [series("e4m3"), series("e5m2")]
    floors = row(*(floor_of(metric, one) for one in two))
    over = excess(metric, np.concatenate([floors, 10 * floors]), two)
    drawn = indices(metric, over, np.zeros((2, 2), dtype=np.bool_), scale_of(metric, over))
    assert drawn[0, 0] == drawn[0, 1] == SCALE_FIRST
    assert drawn[1, 0] == drawn[1, 1] > SCALE_FIRST
    assert scale_of(metric, over).unit == "x floor"


def test_fitted_scales_are_rounded_outwards() -> None:
    """Small changes of the data leave the scale, and so all old colours, as they are."""
    amax = METRICS["amax"]
    assert scale_of(amax, row(0.0, 0.2, 30.0)) == Scale(low=0.1, high=100.0, log=True, unit="value")
    assert scale_of(amax, row(0.2, 31.0)) == scale_of(amax, row(0.3, 90.0))
    mean = scale_of(METRICS["scale_log2_mean"], row(-12.3, -7.1))
    assert (mean.low, mean.high, mean.log) == (-13.0, -7.0, False)


@pytest.mark.parametrize("key", METRICS)
@pytest.mark.parametrize("values", [(), (0.0,), (math.nan,), (math.inf, -math.inf), (5.0, 5.0), (-3.0, 0.0),
                                    (1e-308, 1e308), (5e-324, 3e38)])
def test_d5_every_metric_draws_whatever_is_there(key: str, values: tuple[float, ...]) -> None:
    """Nothing, only NaN, only one value: an index for each cell and no error."""
    shown = row(*values)
    drawn = indices(METRICS[key], shown, np.zeros(shown.shape, dtype=np.bool_), scale_of(METRICS[key], shown))
    assert drawn.shape == shown.shape
    assert ((drawn >= SCALE_FIRST) & (drawn <= NAN)).all()


def test_a_scale_without_extent_is_refused() -> None:
    with pytest.raises(Invalid, match="finite low < high"):
        Scale(low=1.0, high=1.0, log=False, unit="ratio")
    with pytest.raises(Invalid, match="above 0"):
        Scale(low=0.0, high=1.0, log=True, unit="ratio")
