"""Formats against torch's own tables, and floors against measurement."""

import pytest
import torch

from fp8scope_protocol.formats import E4M3, E5M2, Format
from fp8scope_protocol.metrics import METRICS, SENTINELS, floor_of
from fp8scope_protocol.series import Series


@pytest.mark.parametrize(("element", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_constants_are_torchs(element: Format, dtype: torch.dtype) -> None:
    """Largest code, smallest normal and smallest subnormal equal torch.finfo."""
    info = torch.finfo(dtype)
    assert element.largest == info.max
    assert element.smallest_normal == info.smallest_normal
    assert element.smallest_subnormal == info.smallest_normal * 2.0**-element.mantissa_bits


@pytest.mark.parametrize(("element", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_sqnr_floor_is_what_a_gaussian_reads(element: Format, dtype: torch.dtype) -> None:
    """A well-scaled Gaussian tensor reads the floor within 0.3 dB."""
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = float(x.abs().max()) / element.largest
    d = (x / s).float().to(dtype).double() * s
    sqnr = 10 * torch.log10(x.square().sum() / (x - d).square().sum())
    assert float(sqnr) == pytest.approx(element.sqnr_floor_db, abs=0.3)


def test_the_catalogue_is_complete() -> None:
    """Every metric of the design's round-trip table is there, with a definition and a unit."""
    wanted = {
        "underflow_ratio", "underflow_nonzero_ratio", "zero_ratio", "distortion", "gain", "sqnr_db",
        "saturation_ratio", "nan_count", "inf_count", "amax", "amin_nonzero", "rms", "mean_abs", "kurtosis",
        "channel_outlier_ratio", "scale_min", "scale_max", "scale_log2_mean", "scale_log2_std",
        "bad_block_ratio", "scale_staleness_bits", "gemm_error", "elements",
    }
    assert wanted <= set(METRICS)
    for metric in [*METRICS.values(), *SENTINELS.values()]:
        assert metric.definition
        assert metric.unit


def test_floor_of_distortion() -> None:
    """Cosine 0.99965 is the best E4M3 can do on a Gaussian tensor."""
    series = Series(name="a", role="activation", format="e4m3", scaling="tile 1x128")
    assert floor_of(METRICS["distortion"], series) == pytest.approx(1 - 0.99966, abs=3e-5)
    assert floor_of(METRICS["underflow_ratio"], series) == 0
