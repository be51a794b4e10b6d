"""The round trip of one tensor against loops over its elements in float64, and shapes that break others."""

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from fp8scope.derive import derive
from fp8scope.quantize import DTYPES, dequantize, quantize, quantize_tiles
from fp8scope.roundtrip import channel_outlier_ratio, round_trip
from fp8scope.sums import RowSums, SumTables
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, E5M2, FORMATS
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.series import Layout, Series
from fp8scope_protocol.wire import is_missing

QUANTIZERS = {one: partial(quantize, scaling=one) for one in ("tile 1x128", "block 128x128", "tensorwise")}
EDGES = {"tile 1x128": (1, 128), "block 128x128": (128, 128), "tensorwise": (10**9, 10**9)}


def metrics_of(row: RowSums, scaling: str = "tile 1x128") -> dict[str, Any]:
    """Every metric of one row; None where it is missing."""
    tables = SumTables(counts=row.counts[None], sums=row.sums[None], maxes=row.maxes[None],
                       histogram=row.histogram[None])
    layout = Layout(series=(Series(name="x", role="activation", format="e4m3", scaling=scaling),))
    found: dict[str, Any] = {}
    for key, values in derive(tables, layout).items():
        found[key] = values[:, 0] if values.ndim == 2 else None if is_missing(values)[0] else values[0].item()
    return found


def looped(x: Tensor, scaling: str, *, scales: Tensor | None = None, format: str = "e4m3") -> dict[str, Any]:
    """The definitions of the catalogue, element by element in float64. Finite x only."""
    element = FORMATS[format]
    quantized = QUANTIZERS[scaling](x, element, scales=scales)
    d = dequantize(quantized).double().numpy()
    codes = quantized.codes.float().numpy()
    xs = x.double().numpy()
    height, width = EDGES[scaling]
    blocks: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    n = lost = zeros = over = nonzero = 0
    histogram = np.zeros(40, dtype=np.int64)
    x2 = e2 = xd = d2 = x1 = x4 = 0.0
    for i, j in itertools.product(range(x.shape[0]), range(x.shape[1])):
        place = (i // height, j // width)
        s = float(quantized.scales[place])
        value, back, code = float(xs[i, j]), float(d[i, j]), float(codes[i, j])
        n += 1
        nonzero += value != 0
        lost += value != 0 and code == 0
        zeros += code == 0
        over += abs(value) > element.largest * s * (1 + 2**-20)
        x2, x1, x4 = x2 + value**2, x1 + abs(value), x4 + value**4
        e2, xd, d2 = e2 + (value - back) ** 2, xd + value * back, d2 + back**2
        if value:
            y = np.float32(value) / np.float32(s)
            histogram[min(max(math.floor(math.log2(abs(y))) + 24, 0), 39)] += 1
        blocks.setdefault(place, []).append((value, (value - back) ** 2, s))
    used = [b[0][2] for b in blocks.values() if any(v for v, _, _ in b)]
    bits = np.log2(np.array(used))
    floor = 4 * 10 ** (-element.sqnr_floor_db / 10)
    bad = sum(sum(e for _, e, _ in b) > floor * sum(v * v for v, _, _ in b) for b in blocks.values())
    magnitudes = np.abs(xs)
    return {
        "elements": n, "calls": 1, "nan_count": 0, "inf_count": 0,
        "zero_block_count": len(blocks) - len(used),
        "underflow_ratio": lost / n, "underflow_nonzero_ratio": lost / nonzero, "zero_ratio": zeros / n,
        "saturation_ratio": over / n, "bad_block_ratio": bad / len(blocks),
        "distortion": 1 - xd / math.sqrt(x2 * d2) if d2 else 1.0,
        "gain": xd / x2, "sqnr_db": 10 * math.log10(x2 / e2),
        "amax": magnitudes.max(), "amin_nonzero": magnitudes[magnitudes > 0].min(),
        "rms": math.sqrt(x2 / n), "mean_abs": x1 / n, "kurtosis": n * x4 / x2**2,
        "scale_min": min(used), "scale_max": max(used),
        "scale_log2_mean": bits.mean(), "scale_log2_std": bits.std(),
        "exponent_histogram": histogram,
    }


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        if key == "exponent_histogram":
            np.testing.assert_array_equal(found[key], value, err_msg=key)
        else:
            assert found[key] == pytest.approx(value, rel=2e-6, abs=1e-7), key


def sample(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Values over many decades, with exact zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, columns), generator=generator)
    return torch.where(x > 1.5, 0.0, x * torch.exp(3 * torch.randn((rows, columns), generator=generator)))


@pytest.mark.parametrize("scaling", list(QUANTIZERS))
@pytest.mark.parametrize("shape", [(3, 67), (1, 128), (130, 7), (131, 200)], ids=str)
def test_every_metric_follows_its_definition(scaling: str, shape: tuple[int, int]) -> None:
    """Sums over tiles in fp32 give what loops over elements in float64 give, ragged shapes included."""
    x = sample(*shape)
    assert_same(metrics_of(round_trip(x, E4M3, scaling), scaling), looped(x, scaling))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scaling", ["tile 1x128", "block 128x128"])
def test_every_dtype_is_read(dtype: torch.dtype, scaling: str) -> None:
    """What is measured is the tensor as it is, whatever its dtype."""
    x = sample(9, 140).clamp(-1e4, 1e4).to(dtype)
    assert_same(metrics_of(round_trip(x, E5M2, scaling), scaling), looped(x, scaling, format="e5m2") | {
        "bad_block_ratio": metrics_of(round_trip(x.float(), E5M2, scaling), scaling)["bad_block_ratio"]})


@pytest.mark.parametrize("factor", [2.0**-7, 2.0**-30, 2.0**30])
def test_given_scales_are_the_ones_measured(factor: float) -> None:
    """Stale scales: saturation, underflow and staleness follow the scale that was used, not the right one."""
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    scales = quantize_tiles(x, E4M3).scales * factor
    found = metrics_of(round_trip(x, E4M3, "tile 1x128", scales=scales))
    wanted = looped(x, "tile 1x128", scales=scales)
    if factor < 1e-3:
        wanted["distortion"] = 1.0  # d is x / 2^30: lost, whatever its angle
    assert found["distortion"] == pytest.approx(wanted.pop("distortion"), rel=1e-3)
    assert found["scale_staleness_bits"] == pytest.approx(-math.log2(factor), abs=1e-6)
    assert_same(found, wanted)


@pytest.mark.parametrize("rows_at_once", [1, 128, 256])
@pytest.mark.parametrize("scaling", list(QUANTIZERS))
def test_slices_merge_exactly(scaling: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Working through rows in slices changes no count and no extreme, and sums by rounding only."""
    x = sample(300, 130)
    whole = round_trip(x, E4M3, scaling)
    monkeypatch.setattr("fp8scope.roundtrip.CPU_SLICE", rows_at_once * 130)
    sliced = round_trip(x, E4M3, scaling)
    assert torch.equal(sliced.counts, whole.counts)
    assert torch.equal(sliced.maxes, whole.maxes)
    assert torch.equal(sliced.histogram, whole.histogram)
    torch.testing.assert_close(sliced.sums, whole.sums, rtol=1e-12, atol=0)


def test_q2_zero_blocks_are_counted_and_finite() -> None:
    """Q2: zero blocks quantize to zero, underflow is 0, and the cosine of zero with zero is defined."""
    x = torch.zeros(256, 256)
    x[0, 0] = 1.0
    one = metrics_of(round_trip(x, E4M3, "block 128x128"), "block 128x128")
    assert one["zero_block_count"] == 3
    assert (one["underflow_ratio"], one["distortion"], one["bad_block_ratio"]) == (0.0, 0.0, 0.0)
    none = metrics_of(round_trip(torch.zeros(4, 256), E4M3, "tile 1x128"))
    assert none["zero_block_count"] == 8
    assert (none["underflow_ratio"], none["distortion"], none["rms"]) == (0.0, 0.0, 0.0)
    assert none["scale_min"] is None
    assert none["sqnr_db"] is None
    finite = {k: v for k, v in (one | none).items() if isinstance(v, float) and not math.isfinite(v)}
    assert finite in ({}, {"sqnr_db": math.inf})  # the single one is exact
    assert torch.equal(dequantize(quantize(x, E4M3, "block 128x128")), x)


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "int8"])
def test_q2_one_row_of_zeros_costs_no_other_row(format: str) -> None:
    """Q2: by rows, one of them zero: it reads back as zeros, counts as a zero block; nothing underflows."""
    x = torch.linspace(1.0, 2.0, 3 * 64).reshape(3, 64)
    x[1] = 0.0
    back = dequantize(quantize(x, FORMATS[format], "rowwise"))
    assert not back[1].any()
    assert torch.isfinite(back).all()
    found = metrics_of(round_trip(x, FORMATS[format], "rowwise"), "rowwise")
    assert (found["zero_block_count"], found["underflow_ratio"]) == (1, 0.0)
    assert found["zero_ratio"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("scaling", list(QUANTIZERS))
def test_q4_the_scale_follows_the_negative_side(scaling: str) -> None:
    """Q4: amax is the largest magnitude, also where only negative values are large."""
    x = torch.tensor([[-5.0, -1.0, -3.0]])
    found = metrics_of(round_trip(x, E4M3, scaling), scaling)
    assert found["amax"] == 5.0
    assert found["scale_max"] == pytest.approx(5 / 448)
    assert found["saturation_ratio"] == 0.0
    mixed = torch.full((1, 256), 0.25)
    mixed[0, 200] = -300.0  # in the second tile only the negative side is large
    found = metrics_of(round_trip(mixed, E4M3, scaling), scaling)
    assert (found["amax"], found["saturation_ratio"]) == (300.0, 0.0)
    assert found["scale_max"] == pytest.approx(300 / 448)


@pytest.mark.parametrize("shape", [(3, 130), (3, 67), (67, 130), (448, 576), (128, 130)], ids=str)
def test_q8_every_scale_is_that_of_a_slicing_loop(shape: tuple[int, int]) -> None:
    """Q8: tiles of x and of x.t(), and blocks: 130 columns are 128 + 2, 448 rows 128 + 128 + 128 + 64."""
    x = sample(*shape)
    for view, scaling, high in ((x, "tile 1x128", 1), (x.t(), "tile 1x128", 1), (x, "block 128x128", 128)):
        rows, columns = view.shape
        wanted = [[view[i:i + high, j:j + 128].abs().max().item() for j in range(0, columns, 128)]
                  for i in range(0, rows, high)]
        scales = quantize(view, E4M3, scaling).scales
        assert scales.shape == (len(wanted), len(wanted[0]))
        for used, amaxes in zip(scales.tolist(), wanted, strict=True):
            for scale, amax in zip(used, amaxes, strict=True):
                assert scale == (float(np.float32(amax) / np.float32(448)) if amax else 1.0)
        assert metrics_of(round_trip(view, E4M3, scaling), scaling)["elements"] == rows * columns


def test_q8_ragged_tiles_do_not_cross_rows() -> None:
    """Q8: 130 columns are two tiles a row, 448 rows four block rows; padding is in no denominator."""
    x = torch.ones(128, 130)
    x[:, 128:] = 1e-3  # a tile of its own: any other tiling would mix it with the ones
    tiles = metrics_of(round_trip(x, E4M3, "tile 1x128"))
    assert tiles["elements"] == 128 * 130
    assert tiles["underflow_ratio"] == 0.0
    assert tiles["scale_min"] == pytest.approx(1e-3 / 448)
    row = round_trip(torch.randn(448, 576), E4M3, "block 128x128")
    named = dict(zip(("blocks", "elements"), (row.counts[9].item(), row.counts[0].item()), strict=True))
    assert named == {"blocks": 4 * 5, "elements": 448 * 576}


@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("scaling", list(QUANTIZERS))
def test_q9_an_empty_tensor_has_no_ratios(scaling: str, shape: tuple[int, int]) -> None:
    """Q9: no elements means no value: not 0.0 and not NaN."""
    found = metrics_of(round_trip(torch.zeros(shape), E4M3, scaling), scaling)
    assert (found["elements"], found["calls"]) == (0, 1)
    assert all(found[m.key] is None for m in METRICS.values() if m.kind == "value")


@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_q10_distortion_of_x_against_x_is_zero(magnitude: float, dtype: torch.dtype) -> None:
    """Q10: values that the format holds exactly have distortion 0 at any magnitude, where cosines fail."""
    codes = torch.arange(84).float().clamp(max=1).view(1, 84)  # 0 and 1: exact in every format
    found = metrics_of(round_trip((codes * magnitude).to(dtype), E4M3, "tile 1x128"))
    assert found["distortion"] == pytest.approx(0.0, abs=1e-12)
    stored = torch.tensor(magnitude).to(dtype).item()
    assert found["rms"] == pytest.approx(stored * math.sqrt(83 / 84), rel=1e-6)


SELF = {
    "fp32 of 1e-9": torch.full((1, 64), 1e-9), "bf16 of 1e-12": torch.full((1, 4096), 1e-12).bfloat16(),
    "fp16": torch.linspace(-6e4, 6e4, 513).half().view(1, -1), "fp64": torch.randn(1, 64).double() * 1e-30,
    "0 to 83": torch.arange(84.0).view(1, -1), "1e30": torch.randn(2, 64) * 1e30, "zeros": torch.zeros(1, 84),
}


@pytest.mark.parametrize("name", list(SELF))
def test_q10_x_against_itself(name: str) -> None:
    """Q10: codes that are x itself (a cast to a wider type): nothing is lost, whatever a cosine in that type
    says (0.64 for 64 times 1e-9, 0 in fp16, over 1 for 0 to 83)."""
    x = SELF[name]
    found = metrics_of(round_trip(x, E4M3, "tensorwise", codes=x.float(), scales=torch.ones(1, 1)))
    assert found["distortion"] == pytest.approx(0.0, abs=1e-6)
    assert 0.0 <= found["distortion"] <= 2.0
    assert found["gain"] == (None if name == "zeros" else pytest.approx(1.0, abs=1e-6))


def test_q10_a_cosine_of_huge_values_is_one() -> None:
    """Q10: [2e38, 3e38] against [1, 1] times a scale, where fp32 products overflow; turned round it is 2."""
    x, ones = torch.tensor([[2e38, 3e38]]), torch.ones(1, 2)
    scales = torch.full((1, 1), 2.5e38)
    for codes, wanted in ((ones, 1 - 5 / math.sqrt(26)), (-ones, 1 + 5 / math.sqrt(26))):
        found = metrics_of(round_trip(x, E4M3, "tensorwise", codes=codes, scales=scales))
        assert found["distortion"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("magnitude", [1e-33, 1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("scaling", list(QUANTIZERS))
def test_q10_metrics_do_not_depend_on_magnitude(scaling: str, magnitude: float) -> None:
    """Q10: relative numbers at 1e-33 and 1e30 are those at 1, because no fp32 sum over- or underflows."""
    power = 2.0 ** round(math.log2(magnitude))
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).clamp(-3, 3)
    here, there = (metrics_of(round_trip(x * f, E4M3, scaling), scaling) for f in (1.0, power))
    for key in ("distortion", "sqnr_db", "gain", "kurtosis"):
        assert there[key] == pytest.approx(here[key], rel=1e-6), key
    assert there["rms"] == pytest.approx(here["rms"] * power, rel=1e-6)


def test_q10_a_lost_tensor_has_distortion_one() -> None:
    """Q10: d = 0 where x is not is the worst case, not 0 / 0; a zero tensor is not distorted."""
    x = torch.full((2, 128), 1e-9)
    found = metrics_of(round_trip(x, E4M3, "tensorwise", scales=torch.ones(1, 1)), "tensorwise")
    assert (found["distortion"], found["underflow_ratio"], found["sqnr_db"]) == (1.0, 1.0, 0.0)


def test_q11_moments_and_counts_are_exact() -> None:
    """Q11: bf16 ones have mean 1, large fp16 values a finite rms, and 2^24 + 1 elements all count."""
    ones = metrics_of(round_trip(torch.ones(768, 768, dtype=torch.bfloat16), E4M3, "tile 1x128"))
    assert (ones["mean_abs"], ones["rms"], ones["kurtosis"]) == pytest.approx((1.0, 1.0, 1.0), abs=3e-7)
    assert ones["rms"]**2 - ones["mean_abs"]**2 == pytest.approx(0.0, abs=1e-6)  # no spread
    wide = metrics_of(round_trip(torch.full((1, 70000), 300.0, dtype=torch.float16), E4M3, "tile 1x128"))
    assert wide["rms"] == pytest.approx(300.0)
    row = RowSums.zeros("cpu")
    for _ in range(2):
        round_trip(torch.ones(1, 2**23, dtype=torch.bfloat16), E4M3, "tensorwise", out=row)
    round_trip(torch.ones(1, 1, dtype=torch.bfloat16), E4M3, "tensorwise", out=row)
    assert metrics_of(row, "tensorwise")["elements"] == 2**24 + 1
    assert row.sums[0].item() == pytest.approx(2**24 + 1, rel=1e-7)


@pytest.mark.parametrize("scaling", list(QUANTIZERS))
@pytest.mark.parametrize("view", ["strided", "transposed", "sliced"])
def test_q12_views_measure_as_their_copies(view: str, scaling: str) -> None:
    """Q12: a view gives the numbers of its contiguous copy; tiles of x.t() run along the transposed rows."""
    base = sample(260, 150)
    x = {"strided": base[::2], "transposed": base.t(), "sliced": base[:, 10:145]}[view]
    here, there = round_trip(x, E4M3, scaling), round_trip(x.contiguous(), E4M3, scaling)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scaling", list(QUANTIZERS))
def test_nonfinite_elements_are_counted_and_kept_out_of_sums(scaling: str, poison: float) -> None:
    """One NaN or Inf: it is counted, its block is bad, everything else is as if its block were not there."""
    x = sample(200, 300)
    clean = x.clone()
    x[3, 5] = poison
    found = metrics_of(round_trip(x, E4M3, scaling), scaling)
    assert found["nan_count"] == int(math.isnan(poison))
    assert found["inf_count"] == int(math.isinf(poison))
    assert found["bad_block_ratio"] > 0
    clean[3, 5] = 0
    for key in ("rms", "mean_abs", "amax", "kurtosis"):
        moments = metrics_of(round_trip(clean, E4M3, scaling), scaling)[key]
        share = 1.0 if key == "amax" else {"rms": math.sqrt(60000 / 59999)}.get(key, 60000 / 59999)
        share = 59999 / 60000 if key == "kurtosis" else share
        assert found[key] == pytest.approx(moments * share, rel=1e-6), key
    if scaling == "tensorwise":
        assert found["distortion"] is None
        assert found["underflow_ratio"] is None
    else:
        assert 0 < found["distortion"] < 2e-3


def test_a_tensor_of_nans_has_counts_only() -> None:
    """Nothing finite: counts say so and every value is missing or states the damage."""
    found = metrics_of(round_trip(torch.full((3, 130), math.nan), E4M3, "tile 1x128"))
    assert (found["nan_count"], found["elements"], found["bad_block_ratio"]) == (390, 390, 1.0)
    for key in ("rms", "amax", "distortion", "sqnr_db", "underflow_ratio", "amin_nonzero", "scale_max"):
        assert found[key] is None, key


def test_stochastic_codes_count_underflow_by_magnitude() -> None:
    """Under stochastic rounding a code of 0 is luck: below half the smallest subnormal is what counts."""
    x = torch.tensor([[448.0, 2.0**-11, 2.0**-10, 2.0**-9, 0.0]])
    codes = torch.tensor([[448.0, 2.0**-9, 0.0, 2.0**-9, 2.0**-9]]).to(DTYPES["e4m3"])
    found = metrics_of(round_trip(x, E4M3, "tile 1x128", codes=codes, rounding="stochastic",
                                  scales=torch.ones(1, 1)))
    assert found["underflow_ratio"] == pytest.approx(1 / 5)
    assert found["zero_ratio"] == pytest.approx(1 / 5)


def test_healthy_e4m3_reads_its_floor() -> None:
    """A well-scaled Gaussian reads 31.8 dB; the catalogue's floor is what the code measures."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(3))
    found = metrics_of(round_trip(x, E4M3, "tile 1x128"))
    assert found["sqnr_db"] == pytest.approx(E4M3.sqnr_floor_db, abs=0.1)
    assert found["distortion"] == pytest.approx(E4M3.distortion_floor, rel=0.05)
    assert found["bad_block_ratio"] == 0.0


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_channel_outliers(magnitude: float) -> None:
    """Largest column rms over the median one, at any magnitude; a NaN does not hide it."""
    x = torch.ones(50, 11)
    x[:, 3] = 40.0
    x = x * magnitude
    x[0, 0] = math.nan  # costs its column, no more
    assert channel_outlier_ratio(x).item() == pytest.approx(40.0, rel=1e-5)
    assert channel_outlier_ratio(torch.zeros(0, 4)).item() == -math.inf


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32)], ids=["1-D", "integers"])
def test_what_is_no_matrix_is_refused(x: Tensor) -> None:
    """A clear error names what was given and what is accepted."""
    with pytest.raises(Invalid, match="2-D and floating"):
        round_trip(x, E4M3, "tile 1x128")


def test_histogram_shape_is_the_catalogues() -> None:
    """40 bins, both ends open, zeros in none of them."""
    x = torch.tensor([[2.0**-60, 2.0**-24, 2.0**14.5, 2.0**40, 0.0]])
    row = round_trip(x, E4M3, "tensorwise", scales=torch.ones(1, 1))
    bins: npt.NDArray[np.int64] = row.histogram.numpy()
    assert (bins[0], bins[38], bins[39], bins.sum()) == (2, 1, 1, 4)
