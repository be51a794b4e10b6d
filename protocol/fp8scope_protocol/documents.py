"""JSON documents of the collector's read API: what people and the dashboard see.

Plain frozen dataclasses: FastAPI turns them into the OpenAPI schema, msgspec reads them back. JSON has
no NaN: a `Number` is a float, or "NaN", "Infinity" or "-Infinity", or null where nothing was measured.
"""

import math
from dataclasses import dataclass, field

Number = float | str | None


def to_number(value: float, *, missing: bool = False) -> Number:
    """`value` by the rule of this module."""
    if missing:
        return None
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def from_number(number: Number) -> float:
    """Inverse of `to_number`; NaN for null."""
    return math.nan if number is None else float(number)


@dataclass(frozen=True, kw_only=True)
class AttemptDocument:
    """One life of a run."""

    id: str
    number: int
    started_at: str
    """ISO 8601 with offset, the collector's clock."""
    producers: int
    first_step: int | None
    last_step: int | None
    clock_ahead_s: float | None = None
    """How far the clock of its producers is ahead of the collector's, the one that is off most, told by the
    batch that came fastest: below 0 it is behind, or every batch came late. null before the first batch."""


@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """One run, as in the list of runs."""

    id: str
    """Unique; used in addresses. Equals `name`, or `name-2` when the name was used before."""
    name: str
    created_at: str
    last_seen_at: str
    active: bool
    """True while something arrived within the last minute."""
    last_step: int | None
    loss: Number
    layers: int
    layers_in_bf16: int
    samples: int
    """Stored values: series x metrics x sampled steps."""
    batches: int
    lost: dict[str, int]
    """Batches the probe lost, by reason."""
    firing: int
    """Alerts raised in the newest attempt and not yet over."""
    every: int
    remote_control: bool
    attempts: list[AttemptDocument] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SeriesDocument:
    """One series of a run; `index` addresses it in frames and pictures."""

    index: int
    name: str
    module: str
    role: str
    orientation: str
    format: str
    scaling: str
    policy: str
    live: bool
    depth: int
    aliases: list[str]


@dataclass(frozen=True, kw_only=True)
class LayerDocument:
    """A layer's precision now: `requested` by the last command, `running` as the probe measured it."""

    name: str
    running: str
    switchable: bool
    reason: str
    since_step: int | None


@dataclass(frozen=True, kw_only=True)
class FramesDocument:
    """Exact values of one metric: values[i][j] belongs to steps[i] and series[j]."""

    metric: str
    steps: list[int]
    series: list[SeriesDocument]
    values: list[list[Number]]


@dataclass(frozen=True, kw_only=True)
class ScaleDocument:
    """Colour scale of a heat map: `colours` run evenly from `low` to `high`, in log10 when `log`."""

    low: float
    high: float
    log: bool
    unit: str
    """Of `low` and `high`; `x floor` where colours show the excess over what the format cannot avoid."""
    colours: list[str]
    """#rrggbb, from low to high."""


@dataclass(frozen=True, kw_only=True)
class HeatmapDocument:
    """How to read a heat map's pixels.

    Pixel column x shows the steps from first + x (last + 1 - first) / width; pixel row y shows the
    series rows[floor(y len(rows) / height)].
    """

    metric: str
    first: int | None
    """None when nothing was sampled in the window."""
    last: int | None
    columns: int
    """Sampled steps between `first` and `last`."""
    width: int
    height: int
    rows: list[SeriesDocument]
    scale: ScaleDocument
    legend: dict[str, str]
    """#rrggbb of what is no value: missing, bf16, saturated, inf, nan."""
    summary: str
    """The picture in words."""


@dataclass(frozen=True, kw_only=True)
class CellDocument:
    """Every metric of one series at one step (the nearest sampled step at or before the one asked for)."""

    step: int
    series: SeriesDocument
    precision: str
    """What the layer ran in at that step."""
    metrics: dict[str, Number]
    histogram: list[int]
    """Exponent histogram (metrics.HISTOGRAM_BINS counts); empty where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class StepsDocument:
    """Per-step numbers of the job: columns[key][i] belongs to steps[i]."""

    steps: list[int]
    skipped: list[bool]
    columns: dict[str, list[Number]]


@dataclass(frozen=True, kw_only=True)
class WorstDocument:
    """One of the worst series of a metric in the newest samples."""

    series: SeriesDocument
    step: int
    value: Number
    limit: float | None
    rank: int | None = None
    """The rank that lost most of it in that step (`worst_rank`); null where ranks were not merged."""


@dataclass(frozen=True, kw_only=True)
class EventDocument:
    """Something that happened: an alert, a switch, a command, a gap, a note of the probe."""

    id: int
    step: int
    at: str
    kind: str
    name: str
    text: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class LiveDocument:
    """What the live websocket pushes: fetch the rest when it grew."""

    version: int
    last_step: int | None
