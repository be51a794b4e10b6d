"""Formats against torch's own tables, and floors against measurement."""

import math

import pytest
import torch

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import (
    BF16,
    E4M3,
    E5M2,
    FORMATS,
    INT4,
    INT8,
    MXFP8,
    SCALINGS,
    Format,
    check_pair,
    parse_scaling,
    sqnr_floor_db,
)
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


@pytest.mark.parametrize("element", [INT8, INT4])
def test_integers_are_symmetric_and_one_apart(element: Format) -> None:
    """In the terms of floats every code is subnormal; two's complement has one more, left out."""
    bits = {"int8": 8, "int4": 4}[element.name]
    assert element.largest == 2 ** (bits - 1) - 1
    assert element.smallest_subnormal == element.smallest_normal * 2.0**-element.mantissa_bits == 1.0
    assert element.is_integer
    assert not E4M3.is_integer


@pytest.mark.parametrize(("element", "scaling", "size"), [
    (INT8, "tile 1x128", 128), (INT8, "flat 256", 256), (INT8, "flat 2048", 2048), (INT8, "rowwise", 4096),
    (INT8, "block 128x128", 128 * 128), (INT4, "flat 32", 32), (INT4, "tile 1x128", 128),
    (INT4, "rowwise", 4096),
])
def test_integer_floors_are_what_a_gaussian_reads(element: Format, scaling: str, size: int) -> None:
    """The formula agrees with 4 Mi samples within 0.05 dB; stochastic rounding costs 3 dB."""
    x = torch.randn(2**22 // size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x / x.abs().amax(dim=1, keepdim=True) * element.largest
    for rounding, codes in (("nearest", y.round()), ("stochastic", (y + torch.rand_like(y)).floor())):
        error = (y - codes) / y * x
        sqnr = 10 * torch.log10(x.square().sum() / error.square().sum()).item()
        assert sqnr == pytest.approx(sqnr_floor_db(element, parse_scaling(scaling), rounding), abs=0.05)
    if scaling == "tile 1x128":
        assert sqnr == pytest.approx(element.sqnr_floor_db - 10 * math.log10(2), abs=0.05)


def test_mx_floors_are_what_a_gaussian_reads() -> None:
    """RCEIL wastes up to a binade of the largest code, FLOOR clips the largest of a block."""
    x = torch.randn(2**17, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    amax = x.abs().amax(dim=1, keepdim=True)
    scales = {"floor": torch.exp2(amax.log2().floor() - 8), "rceil": torch.exp2((amax / 448).log2().ceil())}
    for name, s in scales.items():
        d = (x / s).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * s
        sqnr = 10 * torch.log10(x.square().sum() / (x - d).square().sum()).item()
        assert sqnr == pytest.approx(sqnr_floor_db(MXFP8, parse_scaling(f"mx 1x32 {name}")), abs=0.1)


@pytest.mark.parametrize("name", [*SCALINGS, "flat 32", "flat 100", "flat 4096"])
def test_scalings_have_their_names(name: str) -> None:
    """A name is what is stored and shown: it comes back as it was given."""
    assert parse_scaling(name).name == name


@pytest.mark.parametrize(("name", "near"), [
    ("tile 1x64", "tile 1x128"), ("mx 1x32", "mx 1x32 floor"), ("flat 31", "32 to 4096"),
    ("flat 8192", "32 to 4096"), ("flat 0256", "32 to 4096"), ("flat", "flat 256"), ("", "known")])
def test_unknown_scalings_name_near_misses(name: str, near: str) -> None:
    """Also `mx 1x32` alone: how an amax becomes a power of two is part of the name."""
    with pytest.raises(Invalid, match=near):
        parse_scaling(name)


def test_pairs_that_mean_nothing_are_refused() -> None:
    """E8M0 scales are MXFP8, BF16 has no scales, integers cannot do without."""
    for element in FORMATS.values():
        for scaling in map(parse_scaling, [*SCALINGS, "flat 64"]):
            mx, plain = bool(scaling.e8m0), scaling.name == "none"
            possible = {MXFP8: mx, BF16: plain}.get(element, not mx and not (plain and element.is_integer))
            if possible:
                check_pair(element, scaling)
            else:
                with pytest.raises(Invalid, match=f"{element.name}/{scaling.name}"):
                    check_pair(element, scaling)


def test_floors_and_limits_are_those_of_the_series() -> None:
    """A healthy INT4 tensor is over no line that was drawn for E4M3, and is compared with its own floor."""
    def series(format: str, scaling: str, **more: str) -> Series:
        return Series(name="a", role="activation", format=format, scaling=scaling, **more)  # type: ignore[arg-type]

    four, mx = series("int4", "tile 1x128"), series("mxfp8", "mx 1x32 rceil")
    assert floor_of(METRICS["sqnr_db"], four) == pytest.approx(18.6, abs=0.05)
    assert floor_of(METRICS["distortion"], four) == pytest.approx(0.0069, abs=1e-4)
    lucky = series("int4", "tile 1x128", rounding="stochastic")
    assert floor_of(METRICS["sqnr_db"], lucky) == pytest.approx(18.6 - 3.01, abs=0.05)
    for key in ("distortion", "underflow_ratio", "gemm_error"):
        assert METRICS[key].limit_of(four) is None
        assert METRICS[key].limit_of(mx) is not None
    for one in (four, mx, series("e5m2", "rowwise"), series("int8", "flat 256")):
        for metric in METRICS.values():
            limit = metric.limit_of(one)
            if metric.floor and limit is not None:
                assert limit.value > floor_of(metric, one), f"{metric.key}, {one.format}"
