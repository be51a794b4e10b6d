"""Every format in every scaling against loops over elements in float64, and the faults that others report.

Nothing here uses the quantizers under test: codes come from tables, groups from slicing, scales from
arithmetic on single numbers.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8scope.derive import derive
from fp8scope.quantize import dequantize, quantize
from fp8scope.roundtrip import round_trip
from fp8scope.sums import COUNT_COLUMNS, SUM_COLUMNS, RowSums, SumTables
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import FORMATS, INT4, INT8, MXFP8, parse_scaling, sqnr_floor_db
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.series import Layout, Series
from fp8scope_protocol.wire import is_missing

BLOCKS, CODED, UNDERFLOW, SATURATED = map(COUNT_COLUMNS.index, ("blocks", "coded", "underflow", "saturated"))
E2 = SUM_COLUMNS.index("e2")

Place = tuple[int, int]

SCALINGS = ("tensorwise", "rowwise", "tile 1x128", "block 128x128", "flat 32", "flat 100", "flat 256")
PAIRS = [
    *itertools.product(("e4m3", "int8", "int4"), SCALINGS),
    ("e5m2", "rowwise"), ("mxfp8", "mx 1x32 floor"), ("mxfp8", "mx 1x32 rceil"),
]
"""Formats and scalings, (format, scaling)."""


@dataclass(frozen=True)
class Exact:
    """Codes and their scales, by element and by group."""

    scales: list[float]
    groups: list[list[Place]]
    codes: dict[Place, float]


def magnitudes(format: str) -> list[float]:
    """Every code that is not negative, ascending: even places hold codes whose last bit is 0."""
    if format in ("int8", "int4"):
        return [float(code) for code in range(int(FORMATS[format].largest) + 1)]
    mantissa, bias = (2, 15) if format == "e5m2" else (3, 7)
    found = []
    for bits in range(0x7F):
        exponent, fraction = bits >> mantissa, (bits & ((1 << mantissa) - 1)) / (1 << mantissa)
        found.append(2.0 ** (max(exponent, 1) - bias) * (fraction + (exponent > 0)))
    return [code for code in found if code <= FORMATS[format].largest]


def nearest(y: float, table: list[float]) -> float:
    """The code nearest to y; of two, the one whose last bit is 0."""
    size = min(abs(y), table[-1])
    above = next(i for i, code in enumerate(table) if code >= size)
    below = above if table[above] == size else above - 1
    up, down = table[above] - size, size - table[below]
    pick = above if up < down or (up == down and above % 2 == 0) else below
    return math.copysign(table[pick], y)


def groups_of(shape: tuple[int, int], scaling: str) -> list[list[Place]]:
    """Places of the elements that share a scale, in the order of the scales."""
    rows, columns = shape
    places = list(itertools.product(range(rows), range(columns)))
    if scaling.startswith("flat "):
        n = int(scaling.removeprefix("flat "))
        return [places[i:i + n] for i in range(0, len(places), n)]
    high, wide = {"tensorwise": (rows, columns), "rowwise": (1, columns), "tile 1x128": (1, 128),
                  "block 128x128": (128, 128)}.get(scaling, (1, 32))
    found: dict[Place, list[Place]] = {}
    for i, j in places:
        found.setdefault((i // high, j // wide), []).append((i, j))
    return [found[place] for place in sorted(found)]


def scale_for(amax: float, format: str, scaling: str) -> float:
    """The current scale of a group."""
    if amax == 0:
        return 1.0
    if scaling == "mx 1x32 floor":
        return float(2.0 ** max(math.frexp(amax)[1] - 1 - 8, -127))
    quotient = float(np.float32(amax) / np.float32(FORMATS[format].largest))
    if scaling == "mx 1x32 rceil":
        mantissa, exponent = math.frexp(max(quotient, 2.0**-127))
        return float(2.0 ** (exponent - (mantissa == 0.5)))
    return max(quotient, 2.0**-126)


def exact(x: Tensor, format: str, scaling: str, scales: list[float] | None = None) -> Exact:
    """x [R, C], finite, encoded."""
    values, table = x.double().numpy(), magnitudes(format)
    groups = groups_of((x.shape[0], x.shape[1]), scaling)
    used, codes = [], {}
    for k, group in enumerate(groups):
        s = scales[k] if scales else scale_for(max(abs(float(values[p])) for p in group), format, scaling)
        used.append(s)
        for p in group:
            codes[p] = nearest(float(np.float32(values[p]) / np.float32(s)), table)
    return Exact(used, groups, codes)


def metrics_by_definition(
    x: Tensor, format: str, scaling: str, scales: list[float] | None = None
) -> dict[str, Any]:
    """The definitions of the catalogue. Finite x with something that is not 0."""
    element, values, found = FORMATS[format], x.double().numpy(), exact(x, format, scaling, scales)
    n = lost = zeros = over = nonzero = bad = 0
    histogram = np.zeros(40, dtype=np.int64)
    x2 = x1 = x4 = e2 = xd = d2 = 0.0
    worst = 4 * 10 ** (-sqnr_floor_db(element, parse_scaling(scaling)) / 10)
    used = []
    for s, group in zip(found.scales, found.groups, strict=True):
        group_x2 = group_e2 = 0.0
        for p in group:
            value, code = float(values[p]), found.codes[p]
            n, nonzero = n + 1, nonzero + (value != 0)
            lost, zeros = lost + (value != 0 and code == 0), zeros + (code == 0)
            over += abs(value) > element.largest * s * (1 + 2**-20)
            x1, x4 = x1 + abs(value), x4 + value**4
            group_x2, group_e2 = group_x2 + value**2, group_e2 + (value - code * s) ** 2
            xd, d2 = xd + value * code * s, d2 + (code * s) ** 2
            if value:
                y = float(np.float32(value) / np.float32(s))
                histogram[min(max(math.frexp(y)[1] - 1 + 24, 0), 39)] += 1
        x2, e2, bad = x2 + group_x2, e2 + group_e2, bad + (group_e2 > worst * group_x2)
        if group_x2:
            used.append(s)
    bits, sizes = np.log2(np.array(used)), np.abs(values)
    return {
        "elements": n, "calls": 1, "nan_count": 0, "inf_count": 0,
        "zero_block_count": len(found.scales) - len(used),
        "underflow_ratio": lost / n, "underflow_nonzero_ratio": lost / nonzero, "zero_ratio": zeros / n,
        "saturation_ratio": over / n, "bad_block_ratio": bad / len(found.scales),
        "distortion": 1 - xd / math.sqrt(x2 * d2), "gain": xd / x2, "sqnr_db": 10 * math.log10(x2 / e2),
        "amax": sizes.max(), "amin_nonzero": sizes[sizes > 0].min(),
        "rms": math.sqrt(x2 / n), "mean_abs": x1 / n, "kurtosis": n * x4 / x2**2,
        "scale_min": min(used), "scale_max": max(used),
        "scale_log2_mean": bits.mean(), "scale_log2_std": bits.std(),
        "exponent_histogram": histogram,
    }


def metrics_of(row: RowSums, format: str, scaling: str) -> dict[str, Any]:
    """Every metric of one row; None where it is missing."""
    tables = SumTables(counts=row.counts[None], sums=row.sums[None], maxes=row.maxes[None],
                       histogram=row.histogram[None])
    layout = Layout(series=(Series(name="x", role="activation", format=format, scaling=scaling),))
    return {key: values[:, 0] if values.ndim == 2 else None if is_missing(values)[0] else values[0].item()
            for key, values in derive(tables, layout).items()}


def measured(x: Tensor, format: str, scaling: str, **options: Any) -> dict[str, Any]:
    return metrics_of(round_trip(x, FORMATS[format], scaling, **options), format, scaling)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        if key == "exponent_histogram":
            np.testing.assert_array_equal(found[key], value, err_msg=key)
        else:
            assert found[key] == pytest.approx(value, rel=2e-6, abs=1e-7), key


def sample(rows: int, columns: int, decades: float = 3.0) -> Tensor:
    """Values over many decades, with exact zeros and a row of them."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn((rows, columns), generator=generator)
    x = torch.where(x > 1.5, 0.0, x * torch.exp(decades * torch.randn((rows, columns), generator=generator)))
    x[1:2] = 0.0
    return x


@pytest.mark.parametrize(("format", "scaling"), PAIRS)
@pytest.mark.parametrize("shape", [(3, 67), (131, 33), (2, 300)], ids=str)
def test_every_metric_follows_its_definition(format: str, scaling: str, shape: tuple[int, int]) -> None:
    """Ragged rows, groups that cross rows, a last group that is short, a row of zeros."""
    x = sample(*shape)
    assert_same(measured(x, format, scaling), metrics_by_definition(x, format, scaling))


@pytest.mark.parametrize(("format", "scaling"), PAIRS)
def test_codes_and_scales_are_the_definitions(format: str, scaling: str) -> None:
    """To the bit: codes by table, scales by arithmetic, and d = q s."""
    x = sample(5, 130)
    q, wanted = quantize(x, FORMATS[format], scaling), exact(x, format, scaling)
    codes = torch.tensor([[wanted.codes[i, j] for j in range(130)] for i in range(5)])
    assert torch.equal(q.codes.float(), codes)
    assert q.scales.flatten().tolist() == wanted.scales
    d = {p: code * s for s, group in zip(wanted.scales, wanted.groups, strict=True)
         for p in group for code in [wanted.codes[p]]}
    assert dequantize(q).tolist() == [[float(np.float32(d[i, j])) for j in range(130)] for i in range(5)]


@pytest.mark.parametrize("factor", [2.0**-5, 0.7, 3.0])
@pytest.mark.parametrize(("format", "scaling"), PAIRS)
def test_given_scales_and_codes_are_the_ones_measured(format: str, scaling: str, factor: float) -> None:
    """Too small they saturate, too large they underflow; codes may come as q = d / s in fp32."""
    x = sample(3, 140, decades=1.0)
    q = quantize(x, FORMATS[format], scaling)
    used = q.scales * (factor if format != "mxfp8" else 2.0 ** round(math.log2(factor)))
    wanted = metrics_by_definition(x, format, scaling, used.flatten().tolist())
    angle = wanted.pop("distortion")  # one minus nearly one, where most of x is clipped
    amaxes = [max(abs(x[p].item()) for p in group) for group in groups_of((3, 140), scaling)]
    wanted["scale_staleness_bits"] = max(math.log2(amax / (s * FORMATS[format].largest)) for amax, s
                                         in zip(amaxes, used.flatten().tolist(), strict=True) if amax)
    codes = quantize(x, FORMATS[format], scaling, scales=used).codes
    for given in (None, codes, codes.float()):
        found = measured(x, format, scaling, scales=used, codes=given)
        assert found["distortion"] == pytest.approx(angle, rel=1e-3)
        assert_same(found, wanted)


def test_scales_of_rows_and_flat_groups_may_come_in_a_line() -> None:
    """Optimizers keep them as [GR]; so they may be given."""
    x = sample(5, 70)
    for scaling in ("rowwise", "flat 100"):
        scales = quantize(x, INT8, scaling).scales
        column, line = (round_trip(x, INT8, scaling, scales=one) for one in (scales, scales.flatten()))
        assert all(torch.equal(a, b) for a, b in zip(column, line, strict=True))


@pytest.mark.parametrize(("format", "scaling"), PAIRS)
def test_q2_zero_groups_are_counted_and_finite(format: str, scaling: str) -> None:
    """Q2: zeros quantize to zero, underflow is 0, and the cosine of zero with zero is defined."""
    found = measured(torch.zeros(4, 256), format, scaling)
    assert found["zero_block_count"] == len(groups_of((4, 256), scaling))
    assert (found["underflow_ratio"], found["distortion"], found["rms"]) == (0.0, 0.0, 0.0)
    assert (found["scale_min"], found["sqnr_db"]) == (None, None)
    assert not dequantize(quantize(torch.zeros(4, 256), FORMATS[format], scaling)).any()


def test_q2_a_stored_scale_of_zero_is_a_group_of_zeros() -> None:
    """Q2: some store 0 as the scale of zeros; x over it is no NaN. Elsewhere it makes d = 0: all is lost."""
    x = torch.zeros(2, 64)
    x[1] = 0.5
    row = round_trip(x, INT8, "rowwise", scales=torch.tensor([0.0, 0.0]))
    found = metrics_of(row, "int8", "rowwise")
    assert (found["zero_block_count"], found["underflow_ratio"], found["distortion"]) == (1, 0.5, 1.0)
    assert found["bad_block_ratio"] == 0.5
    assert torch.isfinite(row.sums).all()


@pytest.mark.parametrize(("format", "scaling"), PAIRS)
def test_q4_the_scale_follows_the_negative_side(format: str, scaling: str) -> None:
    """Q4: amax is the largest magnitude, also where only negative values are large."""
    found = measured(torch.tensor([[-5.0, -1.0, -3.0]]), format, scaling)
    assert found["amax"] == 5.0
    assert found["scale_max"] == pytest.approx(scale_for(5.0, format, scaling))
    assert found["saturation_ratio"] == 0.0


def test_q6_mx_rounding_is_stated_and_saturation_is_counted() -> None:
    """Q6: 957 becomes 896 under FLOOR, which counts as saturated, and 960 under RCEIL."""
    x = torch.ones(1, 32)
    x[0, 7] = 957.0
    cases = (("mx 1x32 floor", 2.0, 896.0, 1), ("mx 1x32 rceil", 4.0, 960.0, 0))
    for scaling, scale, back, saturated in cases:
        q = quantize(x, MXFP8, scaling)
        assert (q.scales.item(), dequantize(q)[0, 7].item()) == (scale, back)
        assert measured(x, "mxfp8", scaling)["saturation_ratio"] == saturated / 32


def test_q6_the_exponent_comes_from_fp32() -> None:
    """Q6: 1.9999 has the exponent 0; rounded to bf16 first it would be 2 and have 1."""
    x = torch.full((1, 32), 1.9999)
    assert quantize(x, MXFP8, "mx 1x32 floor").scales.item() == 2.0**-8
    assert quantize(x.bfloat16(), MXFP8, "mx 1x32 floor").scales.item() == 2.0**-7
    assert quantize(x, MXFP8, "mx 1x32 rceil").scales.item() == 2.0**-7  # 1.9999 / 448 lies over 2^-8
    largest = torch.full((1, 32), 1.75)  # 448 x 2^-8: the last that both take alike
    for scaling in ("mx 1x32 floor", "mx 1x32 rceil"):
        assert quantize(largest, MXFP8, scaling).scales.item() == 2.0**-8
        assert measured(largest, "mxfp8", scaling)["saturation_ratio"] == 0.0
    assert measured(x, "mxfp8", "mx 1x32 floor")["saturation_ratio"] == 1.0
    assert measured(x, "mxfp8", "mx 1x32 rceil")["saturation_ratio"] == 0.0


@pytest.mark.parametrize("scaling", ["mx 1x32 floor", "mx 1x32 rceil"])
@pytest.mark.parametrize("amax", [1e-45, 2.0**-126, 2.0**-119, 448 * 2.0**-127, 449 * 2.0**-127, 3.4e38])
def test_q6_ends_of_e8m0(amax: float, scaling: str) -> None:
    """Scales are powers of two from 2^-127, never 0 and never Inf, for subnormals and the largest floats."""
    value = float(np.float32(amax))
    scale = quantize(torch.tensor([[value]]), MXFP8, scaling).scales.item()
    assert scale == scale_for(value, "mxfp8", scaling)
    assert math.frexp(scale)[0] == 0.5
    assert 2.0**-127 <= scale <= 2.0**120


def test_mx_floor_saturates_a_sixth_of_the_blocks_by_design() -> None:
    """The largest of a block saturates where its significand is above 1.75: 17 to 20 %; under RCEIL never."""
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    scales = quantize(x, MXFP8, "mx 1x32 floor").scales
    share = (x.view(-1, 32).abs().amax(dim=1) > 448 * scales.flatten()).float().mean().item()
    assert 0.16 < share < 0.20
    assert measured(x, "mxfp8", "mx 1x32 floor")["saturation_ratio"] >= share / 32
    assert measured(x, "mxfp8", "mx 1x32 rceil")["saturation_ratio"] == 0.0


def test_q8_groups_follow_the_shape() -> None:
    """Q8: 130 columns are two tiles or five groups of 32 a row; a flat group runs on into the next row."""
    x = torch.ones(4, 130)
    x[:, 128:] = 1e-3
    assert measured(x, "mxfp8", "mx 1x32 rceil")["underflow_ratio"] == 0.0
    assert measured(x, "int8", "tile 1x128")["underflow_ratio"] == 0.0
    assert measured(x, "int8", "rowwise")["underflow_ratio"] == pytest.approx(8 / 520)
    assert round_trip(x, INT8, "flat 100").counts[BLOCKS].item() == 6
    assert round_trip(x, MXFP8, "mx 1x32 floor").counts[BLOCKS].item() == 20


@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(("format", "scaling"), PAIRS)
def test_q9_an_empty_tensor_has_no_ratios(format: str, scaling: str, shape: tuple[int, int]) -> None:
    """Q9: no elements means no value: not 0.0 and not NaN."""
    found = measured(torch.zeros(shape), format, scaling)
    assert (found["elements"], found["calls"]) == (0, 1)
    assert all(found[m.key] is None for m in METRICS.values() if m.kind == "value")
    assert dequantize(quantize(torch.zeros(shape), FORMATS[format], scaling)).shape == shape


@pytest.mark.parametrize("power", [-110, -100, 0, 100])
@pytest.mark.parametrize(("format", "scaling"), PAIRS)
def test_q10_metrics_do_not_depend_on_magnitude(format: str, scaling: str, power: int) -> None:
    """Q10: relative numbers at 1e-33 and 1e30 are those at 1; what a format holds has distortion 0."""
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(2)).clamp(-3, 3)
    here, there = (measured(x * f, format, scaling) for f in (1.0, 2.0**power))
    for key in ("distortion", "sqnr_db", "gain", "kurtosis", "underflow_ratio", "saturation_ratio"):
        assert there[key] == pytest.approx(here[key], rel=1e-6), key
    ones = torch.arange(84).float().clamp(max=1).view(1, 84) * 2.0**power
    assert measured(ones, format, scaling)["distortion"] == pytest.approx(0.0, abs=1e-12)


def test_q11_counts_and_moments_are_exact() -> None:
    """Q11: bf16 ones have mean 1, large fp16 values a finite rms, in groups of any size."""
    for format, scaling in (("int8", "rowwise"), ("int8", "flat 4096"), ("mxfp8", "mx 1x32 rceil")):
        ones = measured(torch.ones(768, 768, dtype=torch.bfloat16), format, scaling)
        assert (ones["mean_abs"], ones["rms"], ones["kurtosis"]) == pytest.approx((1.0, 1.0, 1.0), abs=3e-7)
        assert ones["elements"] == 768**2
        wide = measured(torch.full((1, 70000), 300.0, dtype=torch.float16), format, scaling)
        assert wide["rms"] == pytest.approx(300.0)


@pytest.mark.parametrize(("format", "scaling"), PAIRS)
@pytest.mark.parametrize("view", ["strided", "transposed", "sliced"])
def test_q12_views_measure_as_their_copies(view: str, format: str, scaling: str) -> None:
    """Q12: a view gives the numbers of its contiguous copy, in flat groups too."""
    base = sample(140, 150)
    x = {"strided": base[::2], "transposed": base.t(), "sliced": base[:, 10:145]}[view]
    here, there = (round_trip(one, FORMATS[format], scaling) for one in (x, x.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_q13_int8_has_no_minus_128() -> None:
    """Q13: codes are -127 .. 127, so -x has the codes of x negated; a foreign -128 has magnitude 128."""
    x = torch.tensor([[-128.0, 127.0, 3.0]])
    codes = quantize(x, INT8, "rowwise", scales=torch.ones(1, 1)).codes
    assert codes.tolist() == [[-127, 127, 3]]
    y = sample(3, 70)
    assert torch.equal(quantize(-y, INT8, "rowwise").codes, -quantize(y, INT8, "rowwise").codes)
    foreign = torch.tensor([[-128, 127, 3]], dtype=torch.int8)
    found = measured(x, "int8", "rowwise", scales=torch.ones(1, 1), codes=foreign)
    assert (found["amax"], found["distortion"]) == (128.0, 0.0)
    for one in (x, -x):
        assert round_trip(one, INT8, "rowwise", scales=torch.ones(1, 1)).counts[SATURATED].item() == 1
    nines = torch.tensor([[-9.0, 9.0]])
    assert quantize(nines, INT4, "rowwise", scales=torch.ones(1, 1)).codes.tolist() == [[-7, 7]]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("format", "scaling"), PAIRS)
def test_a_group_with_nan_or_inf_is_broken_as_a_whole(format: str, scaling: str, poison: float) -> None:
    """It is counted, its group is bad and reads back as NaN; the other groups are as if it were not there."""
    x = sample(9, 150)
    x[3, 5] = poison
    place = next(group for group in groups_of((9, 150), scaling) if (3, 5) in group)
    clean = x.clone()
    for p in place:
        clean[p] = 0.0
    found, without = measured(x, format, scaling), measured(clean, format, scaling)
    assert (found["nan_count"], found["inf_count"]) == (int(math.isnan(poison)), int(math.isinf(poison)))
    groups = len(groups_of((9, 150), scaling))
    assert found["bad_block_ratio"] * groups == pytest.approx(without["bad_block_ratio"] * groups + 1)
    d = dequantize(quantize(x, FORMATS[format], scaling))
    assert sorted(map(tuple, d.isnan().nonzero().tolist())) == sorted(place)
    row, other = (round_trip(one, FORMATS[format], scaling) for one in (x, clean))
    assert row.counts[CODED].item() == 9 * 150 - len(place)
    assert row.counts[UNDERFLOW].item() == other.counts[UNDERFLOW].item()
    assert torch.isfinite(row.sums).all()
    assert row.sums[E2].item() == pytest.approx(other.sums[E2].item())
    if len(place) < 9 * 150:
        assert found["sqnr_db"] == pytest.approx(without["sqnr_db"], rel=1e-6)


def test_huge_neighbours_of_a_nan_keep_their_moments() -> None:
    """Finite elements beside a NaN count in the rms at 1e30, where an fp32 sum of squares is Inf."""
    x = torch.full((1, 64), 1e30)
    x[0, 0] = math.nan
    assert measured(x, "int8", "rowwise")["rms"] == pytest.approx(1e30)


def test_a_given_scale_that_is_no_scale_breaks_its_group() -> None:
    """NaN, Inf and negative scales decode to nothing that can be measured: bad blocks, no NaN in any sum."""
    x = torch.ones(4, 40)
    row = round_trip(x, INT8, "rowwise", scales=torch.tensor([math.nan, math.inf, -1.0, 1.0]))
    assert metrics_of(row, "int8", "rowwise")["bad_block_ratio"] == 0.75
    assert torch.isfinite(row.sums).all()


@pytest.mark.parametrize(("format", "scaling"), [
    ("int8", "mx 1x32 floor"), ("mxfp8", "tile 1x128"), ("e4m3", "mx 1x32 rceil"), ("bf16", "rowwise"),
    ("int4", "none"), ("int8", "flat 16"), ("int8", "tile 1x64")])
def test_impossible_pairs_are_refused(format: str, scaling: str) -> None:
    """An error says what goes with what; nothing is measured in another scaling instead."""
    with pytest.raises(Invalid, match="scaling"):
        round_trip(torch.ones(2, 128), FORMATS[format], scaling)


def test_a_plain_cast_saturates() -> None:
    """Without scales what is beyond the largest code is counted, and huge values do not overflow the sums."""
    found = measured(torch.tensor([[1.0, 500.0, -1e30]]), "e4m3", "none")
    assert found["saturation_ratio"] == pytest.approx(2 / 3)
    assert found["rms"] == pytest.approx(1e30 / math.sqrt(3))
    assert found["scale_staleness_bits"] is None


def test_integers_underflow_by_design() -> None:
    """INT8 loses 0.9 % of a Gaussian in tiles of 128 and 1.6 % in one group of 4 Mi; heavy tails far more."""
    x = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0))
    assert measured(x, "int8", "tile 1x128")["underflow_ratio"] == pytest.approx(0.0089, abs=2e-4)
    assert measured(x, "int8", "tensorwise")["underflow_ratio"] == pytest.approx(0.016, abs=2e-3)
    torch.manual_seed(0)
    heavy = torch.distributions.StudentT(3.0).sample((1024, 4096))
    assert measured(heavy, "int8", "tile 1x128")["underflow_ratio"] == pytest.approx(0.025, abs=2e-3)
    assert measured(heavy, "int8", "tensorwise")["underflow_ratio"] > 0.3
