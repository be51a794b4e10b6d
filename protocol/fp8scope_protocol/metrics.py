"""The metric catalogue: every number fp8scope reports, as data.

x is the high-precision tensor, s its scale, y = x / s, q the code, d = q s, e = x - d, N the number of
elements. All of it derives from sums that merge exactly over micro-batches, tiles and ranks; ratios are
never averaged. Counts travel as uint64 (`kind="count"`), everything else as float32 (`kind="value"`).

`merge` says how several samples become one when steps or series are put together: `sum`; `max` and
`min` keep the worst; `weighted` is a mean weighted by `elements`; `newest` is for what is a name, not an
amount. `worse` says which end is bad.
`floor` marks metrics whose unavoidable value depends on the format (see `floor_of`), so that pictures
can show the excess over it. `limit` is a published or measured reference line, not a verdict.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from fp8scope_protocol.errors import UnknownName
from fp8scope_protocol.formats import FORMATS, distortion_of, parse_scaling, sqnr_floor_db
from fp8scope_protocol.series import ORIENTATIONS, ROLES, Series

Kind = Literal["count", "value"]
Merge = Literal["sum", "max", "min", "weighted", "newest"]
Worse = Literal["high", "low", "neither"]
Group = Literal["round trip", "consequence", "sentinel"]


_OPERANDS = ("activation", "weight", "gradient")
_STATES = ("exp_avg", "exp_avg_sq", "momentum", "master_weight")
_STORED = (*_OPERANDS, *_STATES)
"""What is stored in codes, or could be."""
_COUNT, _SHARE, _ANGLE, _POSITIVE = (0.0, 2.0**64 - 1), (0.0, 1.0), (0.0, 2.0), (0.0, inf)
_SIZE = (0.0, 2.0**128 - 2.0**104)
"""A finite fp32 without its sign."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A reference line, for the roles, formats, orientation and policy it was measured or published for."""

    value: float
    source: str
    roles: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    orientation: str | None = None
    policy: str | None = None

    def applies(self, series: Series) -> bool:
        return (
            (not self.roles or series.role in self.roles)
            and (not self.formats or series.format in self.formats)
            and self.orientation in (None, series.orientation)
            and self.policy in (None, series.policy)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One number: its key, unit, definition, how samples merge, and which end is bad."""

    key: str
    unit: str
    definition: str
    kind: Kind = "value"
    merge: Merge = "weighted"
    worse: Worse = "high"
    group: Group = "round trip"
    floor: bool = False
    range: tuple[float, float] = (-inf, inf)
    """Smallest and largest possible value; infinite where no bound is certain."""
    roles: tuple[str, ...] = _STORED
    """What it is measured of, where it belongs to a series."""
    rowwise_only: bool = False
    limits: tuple[Limit, ...] = field(default=())

    def orientations_of(self, role: str) -> tuple[str, ...]:
        """In which it is measured of `role`; of what is no operand of a GEMM rowwise alone."""
        return ("rowwise",) if self.rowwise_only or role not in _OPERANDS else ORIENTATIONS

    def limit_of(self, series: Series) -> Limit | None:
        """The first limit that applies to `series`, if any."""
        return next((limit for limit in self.limits if limit.applies(series)), None)


_LING = "Ling 2.0 report, arXiv 2510.22115"
_MEASURED = "measured for fp8scope, see docs/log.md"
_E4M3_CODES = ("e4m3", "mxfp8")
_FP8 = (*_E4M3_CODES, "e5m2")

_ROUND_TRIP = (
    Metric(key="elements", unit="elements", kind="count", merge="sum", worse="neither", range=_COUNT,
           roles=ROLES, definition="N"),
    Metric(key="calls", unit="calls", kind="count", merge="sum", worse="neither", range=_COUNT, roles=ROLES,
           definition="times the tensor was seen in the step: micro-batches and repeated uses"),
    Metric(key="nan_count", unit="elements", kind="count", merge="sum", range=_COUNT,
           definition="NaNs in x, before any cast", limits=(Limit(value=0, source=_MEASURED),)),
    Metric(key="inf_count", unit="elements", kind="count", merge="sum", range=_COUNT,
           definition="infinities in x, before any cast", limits=(Limit(value=0, source=_MEASURED),)),
    Metric(key="zero_block_count", unit="blocks", kind="count", merge="sum", worse="neither", range=_COUNT,
           definition="blocks in which every element is zero"),
    Metric(key="underflow_ratio", unit="ratio", range=_SHARE,
           definition="#(x != 0 and q == 0) / N; under stochastic rounding #(0 < |x| < half the smallest "
                      "subnormal x s) / N",
           limits=(Limit(value=0.005, source=_LING, formats=_FP8, orientation="rowwise"),)),
    Metric(key="underflow_nonzero_ratio", unit="ratio", range=_SHARE,
           definition="underflowed elements / #(x != 0)"),
    Metric(key="zero_ratio", unit="ratio", range=_SHARE, definition="#(q == 0) / N", worse="neither"),
    Metric(key="distortion", unit="1 - cosine", floor=True, range=_ANGLE,
           definition="1 - cos(x, d): n = sum e^2 / sum x^2, b = sum x e / sum x^2, c = sqrt(1 - 2b + n); "
                      "(n - b^2) / (c (c + 1 - b))",
           limits=(Limit(value=5e-3, source=_MEASURED, roles=("activation",), formats=_FP8, policy="delayed"),
                   Limit(value=1e-3, source=_MEASURED, formats=_E4M3_CODES, policy="current"))),
    Metric(key="gain", unit="ratio", definition="1 - b: sum x d / sum x^2", worse="neither"),
    Metric(key="sqnr_db", unit="dB", worse="low", floor=True,
           definition="10 log10(sum x^2 / sum e^2)"),
    Metric(key="saturation_ratio", unit="ratio", range=_SHARE,
           definition="#(finite x, |x| > largest code x s x (1 + 2^-20)) / N",
           limits=(Limit(value=1e-3, source=_MEASURED, policy="delayed"),)),
    Metric(key="amax", unit="value", merge="max", range=_SIZE, definition="largest finite |x|"),
    Metric(key="amin_nonzero", unit="value", merge="min", worse="neither", range=_SIZE,
           definition="smallest nonzero finite |x|"),
    Metric(key="rms", unit="value", worse="neither", range=_SIZE, definition="sqrt(sum x^2 / N)"),
    Metric(key="mean_abs", unit="value", worse="neither", range=_SIZE, definition="sum |x| / N"),
    Metric(key="kurtosis", unit="ratio", worse="neither", range=_POSITIVE,
           definition="N sum x^4 / (sum x^2)^2, about zero; 3 for a Gaussian"),
    Metric(key="channel_outlier_ratio", unit="ratio", merge="max", worse="neither",
            range=_POSITIVE, roles=("activation",), rowwise_only=True,
           definition="largest column rms / median column rms, the worst call of the step"),
    Metric(key="scale_min", unit="value", merge="min", worse="neither", range=_POSITIVE,
           definition="smallest scale of a block that is not all zero"),
    Metric(key="scale_max", unit="value", merge="max", worse="neither", range=_POSITIVE,
           definition="largest scale"),
    Metric(key="scale_log2_mean", unit="log2", worse="neither", definition="mean of log2 s over blocks"),
    Metric(key="scale_log2_std", unit="log2", worse="neither", range=_POSITIVE,
           definition="spread of log2 s over blocks"),
    Metric(key="bad_block_ratio", unit="ratio", range=_SHARE,
           definition="share of blocks whose sum e^2 / sum x^2 is over four times the format's floor"),
    Metric(key="scale_staleness_bits", unit="log2", merge="max",
           definition="log2(amax now / (largest code x scale used)), the worst block; above 0 saturates",
           limits=(Limit(value=0.5, source=_MEASURED, policy="delayed"),)),
    Metric(key="worst_rank", unit="rank", merge="newest", worse="neither", range=_POSITIVE,
           definition="the rank that loses most: with NaN or Inf in x, else by the larger of underflowed / "
                      "nonzero elements and sum e^2 / sum x^2"),
)

_CONSEQUENCE = (
    Metric(key="gemm_error", unit="ratio", merge="max", group="consequence", floor=True,
            range=_POSITIVE, roles=("activation",), rowwise_only=True,
           definition="relative error of the GEMM's output on 64 sampled rows against high-precision "
                      "operands",
           limits=(Limit(value=0.08, source=_MEASURED, roles=("activation",), formats=_E4M3_CODES),)),
    Metric(key="wgrad_row_error_max", unit="ratio", merge="max", group="consequence", floor=True,
            range=_POSITIVE, roles=("gradient",),
           definition="relative error of dW against high-precision operands over 64 sampled columns, the "
                      "worst row; layers take turns"),
    Metric(key="grad_fidelity", unit="1 - cosine", group="consequence", range=_ANGLE, roles=("wgrad",),
           definition="1 - cos(g, d): one micro-batch's gradient in BF16 and in the job's precision, the "
                      "same random numbers"),
    Metric(key="grad_fidelity_norm_ratio", unit="ratio", group="consequence", worse="neither",
            range=_POSITIVE, roles=("wgrad",),
           definition="||d|| / ||g|| of the same two"),
    Metric(key="grad_noise", unit="1 - cosine", group="consequence", worse="neither",
            range=_ANGLE, roles=("wgrad",),
           definition="1 - cos(g, g'), g' of another micro-batch: what grad_fidelity is to be compared "
                      "with"),
    Metric(key="update_error", unit="ratio", group="consequence", range=_POSITIVE, roles=("exp_avg_sq",),
           definition="||u - u'|| / ||u'|| on a sample of blocks: u the step from the stored states, u' from "
                      "fp32 twins that have run beside them"),
    Metric(key="update_norm_ratio", unit="ratio", group="consequence", worse="neither",
            range=_POSITIVE, roles=("exp_avg_sq",),
           definition="||u|| / ||u'|| on the same sample; 0.95 to 1.05 is healthy"),
    Metric(key="update_gain", unit="ratio", group="consequence", worse="low",
            roles=("weight",), rowwise_only=True,
           definition="sum(applied x intended) / sum(intended^2) over the changes of weights that have no "
                      "master, on a sample of blocks",
           limits=(Limit(value=0.9, source=_MEASURED, roles=("weight",)),)),
)

_SENTINELS = (
    Metric(key="loss", unit="loss", group="sentinel", definition="the training loss, mean over ranks"),
    Metric(key="grad_norm", unit="value", group="sentinel", worse="neither",
           definition="L2 norm of all gradients before clipping"),
    Metric(key="grad_norm_ratio", unit="ratio", group="sentinel", merge="max",
           definition="gradient norm / its median over the last 64 that were taken"),
    Metric(key="update_max", unit="lr", group="sentinel", merge="max",
           definition="largest |update| / lr of the optimizer step, on a sample of blocks where the "
                      "optimizer keeps no account of it"),
    Metric(key="v_zero_share", unit="ratio", group="sentinel",
           definition="share of second moments that are exactly zero where the first moment is not"),
    Metric(key="update_weight_ratio", unit="ratio", group="sentinel", merge="max",
           definition="||lr u|| / ||w|| over all parameters"),
    Metric(key="attn_logit_bound", unit="value", group="sentinel", merge="max",
           definition="max ||q|| max ||k|| / sqrt(d) over heads and tokens of a forward, the worst layer"),
    Metric(key="router_entropy", unit="ratio", group="sentinel", merge="min", worse="low",
           definition="entropy of the softmax over a router's experts / log(experts), mean over the tokens "
                      "of a forward, the lowest router"),
    Metric(key="router_logit_max", unit="value", group="sentinel", merge="max",
           definition="largest |logit| of a router, the worst one"),
    Metric(key="scale_staleness_bits", unit="log2", group="sentinel", merge="max",
           definition="the worst scale staleness of any delayed-scaling layer"),
    Metric(key="nonfinite_count", unit="tensors", kind="count", group="sentinel", merge="sum",
           definition="gradient tensors with a NaN or an infinity, and losses that are one"),
    Metric(key="loss_scale", unit="ratio", group="sentinel", worse="neither",
           definition="the gradient scaler's current scale"),
    Metric(key="lr", unit="lr", group="sentinel", worse="neither", definition="learning rate of group 0"),
    Metric(key="overhead_ratio", unit="ratio", group="sentinel", merge="max",
           definition="share of the job's time that the probe takes at its present cadence; see probe.md"),
)

METRICS: dict[str, Metric] = {m.key: m for m in _ROUND_TRIP + _CONSEQUENCE}
"""Per-series metrics, in catalogue order."""

SENTINELS: dict[str, Metric] = {m.key: m for m in _SENTINELS}
"""Per-step numbers of the whole job, in catalogue order."""

COUNT_KEYS: tuple[str, ...] = tuple(m.key for m in METRICS.values() if m.kind == "count")
VALUE_KEYS: tuple[str, ...] = tuple(m.key for m in METRICS.values() if m.kind == "value")

HISTOGRAM_BINS = 40
"""`exponent_histogram`: counts of floor(log2 |y|) in 40 bins from 2^-24 to 2^15, both ends open."""
HISTOGRAM_FIRST_EXPONENT = -24


def parse_metric(key: str) -> Metric:
    """The per-series metric called `key`, or `UnknownName` naming near misses."""
    try:
        return METRICS[key]
    except KeyError:
        raise UnknownName("metric", key, METRICS) from None


def floor_of(metric: Metric, series: Series) -> float:
    """The unavoidable value of `metric` by format, scaling and rounding of `series`; 0 if there is none."""
    if not metric.floor:
        return 0.0
    sqnr_db = sqnr_floor_db(FORMATS[series.format], parse_scaling(series.scaling), series.rounding)
    if metric.key == "sqnr_db":
        return sqnr_db
    if metric.key in ("gemm_error", "wgrad_row_error_max"):
        # Two operands, each with relative error 10^(-sqnr/20), independent of one another.
        return float((2.0 ** 0.5) * 10.0 ** (-sqnr_db / 20.0))
    return distortion_of(sqnr_db)
