"""/metrics for Prometheus: a few series per run, read from the database at each scrape.

Bounded: per run and role, never per layer; runs that ended are left out after a while, and of very many
runs only the newest are exported, with a count of the rest. A gauge is never NaN, because NaN > x is false
and no alert would fire: what is not finite is counted by `fp8scope_nonfinite_values_total`, from 0 on.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib.metadata import version

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import and_, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_server.catalogue import Catalogue, read_catalogue
from fp8scope_server.frames import read_newest
from fp8scope_server.models import BatchRow, Producer, Run
from fp8scope_server.nonfinite import NonfiniteTally
from fp8scope_server.runs import ACTIVE, read_firing, read_last_step, read_layer_counts, read_lost

ENDED = timedelta(minutes=15)
"""A run that has been silent for this long is no longer exported."""
MAX_RUNS = 100
"""Most runs exported at once."""

_RATIOS = ("underflow_ratio", "saturation_ratio")


@dataclass(kw_only=True, slots=True)
class RunNumbers:
    """What is exported of one run."""

    run: str
    active: bool
    last_step: int | None
    last_sample: datetime | None
    layers_in_bf16: int
    firing: int
    lost: dict[str, int]
    worst: dict[str, dict[str, float]] = field(default_factory=dict)
    """Ratio -> role -> the largest of the newest finite values."""
    nonfinite: dict[str, int] = field(default_factory=dict)
    """Role -> NaNs and infinities so far."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot(Collector):
    """Everything that one scrape tells."""

    runs: Sequence[RunNumbers]
    truncated: int
    batches: int

    def collect(self) -> Iterator[Metric]:
        """Metric families, as prometheus_client asks for them."""
        yield InfoMetricFamily("fp8scope_build", "Version of the collector.",
                               {"version": version("fp8scope")})
        yield GaugeMetricFamily("fp8scope_runs_active", "Runs that sent something within the last minute.",
                                sum(one.active for one in self.runs))
        yield GaugeMetricFamily("fp8scope_runs_truncated", "Recent runs left out because there are too many.",
                                self.truncated)
        yield CounterMetricFamily("fp8scope_batches", "Batches stored, of all runs.", self.batches)
        yield from self._gauges()
        yield from self._by_role()
        lost = CounterMetricFamily("fp8scope_lost_batches", "Batches that the probe lost.",
                                   labels=("run", "reason"))
        for one in self.runs:
            for reason, count in sorted(one.lost.items()):
                lost.add_metric((one.run, reason), count)
        yield lost

    def _gauges(self) -> Iterator[Metric]:
        """One number per run; a run that has none is left out."""
        for name, documentation, values in (
            ("run_last_step", "Newest optimizer step.", [one.last_step for one in self.runs]),
            ("run_last_sample_timestamp_seconds", "When the newest batch arrived.",
             [one.last_sample.timestamp() if one.last_sample else None for one in self.runs]),
            ("layers_in_bf16", "Layers that run in BF16 now.", [one.layers_in_bf16 for one in self.runs]),
            ("alerts_firing", "Layers that a rule holds out of FP8 now.", [one.firing for one in self.runs]),
        ):
            gauge = GaugeMetricFamily(f"fp8scope_{name}", documentation, labels=("run",))
            for one, value in zip(self.runs, values, strict=True):
                if value is not None:
                    gauge.add_metric((one.run,), value)
            yield gauge

    def _by_role(self) -> Iterator[Metric]:
        for ratio in _RATIOS:
            gauge = GaugeMetricFamily(
                f"fp8scope_{ratio}_max", f"Largest {ratio} of a tensor in the newest samples.",
                labels=("run", "role"))
            for one in self.runs:
                for role, value in sorted(one.worst[ratio].items()):
                    gauge.add_metric((one.run, role), value)
            yield gauge
        nonfinite = CounterMetricFamily(
            "fp8scope_nonfinite_values", "NaNs and infinities in tensors, before any cast.",
            labels=("run", "role"))
        for one in self.runs:
            for role, count in sorted(one.nonfinite.items()):
                nonfinite.add_metric((one.run, role), count)
        yield nonfinite


async def read_snapshot(session: AsyncSession, tally: NonfiniteTally) -> Snapshot:
    """The numbers of the runs that are going on or ended a moment ago."""
    recent = Run.last_seen_at > func.now() - ENDED
    rows = (await session.execute(
        select(Run.id, (Run.last_seen_at > func.now() - ACTIVE).label("active")).where(recent)
        .order_by(Run.last_seen_at.desc(), Run.id).limit(MAX_RUNS))).all()
    total = await session.scalar(select(func.count()).select_from(Run).where(recent)) or 0
    ids = [row.id for row in rows]
    tally.keep(ids)
    layers = await read_layer_counts(session, ids)
    firing = await read_firing(session, ids)
    lost = await read_lost(session, ids)
    runs = []
    for row in rows:
        catalogue = await read_catalogue(session, row.id)
        runs.append(RunNumbers(
            run=row.id, active=row.active, last_step=await read_last_step(session, row.id),
            last_sample=await _last_sample(session, row.id), layers_in_bf16=layers[row.id][1],
            firing=firing.get(row.id, 0), lost=lost[row.id],
            worst={ratio: await _worst(session, row.id, ratio, catalogue) for ratio in _RATIOS},
            nonfinite=await tally.read(session, row.id, catalogue)))
    batches = await session.scalar(select(func.count()).select_from(BatchRow)) or 0
    return Snapshot(runs=runs, truncated=total - len(ids), batches=batches)


async def _last_sample(session: AsyncSession, run: str) -> datetime | None:
    newest = and_(BatchRow.attempt_id == Producer.attempt_id, BatchRow.producer == Producer.producer,
                  BatchRow.seq == Producer.last_seq)
    return await session.scalar(
        select(func.max(BatchRow.received_at)).join(Producer, newest).where(Producer.run_id == run))


async def _worst(session: AsyncSession, run: str, ratio: str, catalogue: Catalogue) -> dict[str, float]:
    """Role -> the largest newest finite value, over what the job really runs in, if anything is."""
    newest = await read_newest(session, run, ratio, catalogue=catalogue)
    live = {index for index in newest if catalogue.series[index].live}
    worst: dict[str, float] = {}
    for index in live or newest:
        role, value = catalogue.series[index].role, newest[index][1]
        if math.isfinite(value):
            worst[role] = max(value, worst.get(role, value))
    return worst


router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    state = request.app.state
    async with state.database.session() as session:
        snapshot = await read_snapshot(session, state.nonfinite)
    registry = CollectorRegistry()
    registry.register(snapshot)
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})
