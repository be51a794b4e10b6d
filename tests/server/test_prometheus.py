"""/metrics: parses whatever a run is called, stays bounded, and never hides what is not finite."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fp8scope_protocol.wire import MISSING
from fp8scope_server import prometheus
from fp8scope_server.prometheus import RunNumbers, Snapshot

Jobs = Callable[..., Any]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    return {(sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.fixture
def scrape(collector: Any, client: httpx.Client) -> Callable[[], Samples]:
    """Scrapes /metrics: (name, labels) -> value."""
    return lambda: parse(client.get(f"{collector.url}/metrics").raise_for_status().text)


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"fp8scope_{name}", frozenset(labels.items())))


def plane(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, dtype="<f4")


def counts(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, dtype="<u8")


def test_a_run_is_exported_by_role(job: Jobs, scrape: Callable[[], Samples]) -> None:
    """Newest step and the worst newest ratio of each role; counters from 0."""
    one = job()
    run = one.start()
    one.send(6, {"underflow_ratio": plane(.9, .9, .9, .9, .9, .9)})
    newest = {"underflow_ratio": plane(.25, .5, 0, .125, MISSING, 0), "nan_count": counts(*[0] * 6)}
    one.send(7, newest, lost={"spool_full": 2})
    samples = scrape()
    assert value(samples, "run_last_step", run=run) == 7
    stamp = value(samples, "run_last_sample_timestamp_seconds", run=run)
    assert stamp is not None
    assert 0 <= datetime.now(UTC).timestamp() - stamp < 60
    worst = {role: value(samples, "underflow_ratio_max", run=run, role=role)
             for role in ("activation", "weight", "gradient")}
    assert worst == {"activation": .25, "weight": .5, "gradient": 0}
    assert value(samples, "saturation_ratio_max", run=run, role="weight") is None
    assert value(samples, "nonfinite_values_total", run=run, role="weight") == 0
    assert value(samples, "lost_batches_total", run=run, reason="spool_full") == 2
    assert value(samples, "layers_in_bf16", run=run) == 1  # the head
    assert value(samples, "alerts_firing", run=run) == 0
    assert (value(samples, "runs_active") or 0) >= 1
    assert (value(samples, "batches_total") or 0) >= 2
    assert any(name == "fp8scope_build_info" for name, _ in samples)


def test_g4_nan_is_counted_and_no_gauge_is_nan(job: Jobs, scrape: Callable[[], Samples]) -> None:
    """A ratio of NaN is left out; the NaNs of the tensors are in a counter that grows by what came."""
    one = job(modules=("layers.0",))
    run = one.start()
    one.send(0, {"underflow_ratio": plane(np.nan, np.inf, np.nan), "nan_count": counts(3, 0, 0),
                 "inf_count": counts(0, 0, 4)})
    samples = scrape()
    assert np.isfinite(list(samples.values())).all()
    assert value(samples, "underflow_ratio_max", run=run, role="activation") is None
    assert value(samples, "nonfinite_values_total", run=run, role="activation") == 3
    assert value(samples, "nonfinite_values_total", run=run, role="weight") == 0
    assert value(samples, "nonfinite_values_total", run=run, role="gradient") == 4
    one.send(1, {"nan_count": counts(2, 0, 0)})
    for _ in range(2):
        assert value(scrape(), "nonfinite_values_total", run=run, role="activation") == 5


def test_g1_counters_are_the_same_after_a_restart(
    job: Jobs, scrape: Callable[[], Samples], collector: Any
) -> None:
    """The totals come from the database: a collector that has counted nothing yet agrees."""
    one = job(modules=("layers.0",))
    run = one.start()
    for step in range(3):
        one.send(step, {"nan_count": counts(step, 1, 0)})
    before = scrape()
    collector.app.state.nonfinite = type(collector.app.state.nonfinite)()
    after = scrape()
    for role, total in (("activation", 3), ("weight", 3), ("gradient", 0)):
        assert value(before, "nonfinite_values_total", run=run, role=role) == total
        assert value(after, "nonfinite_values_total", run=run, role=role) == total


@pytest.mark.parametrize("name", ['MacBook 14" a\\b', '{x="y"}', "läuft zu 99 %", "a,b"])
def test_g2_any_run_name_round_trips(job: Jobs, scrape: Callable[[], Samples], name: str) -> None:
    """Quotes and backslashes in a name break neither the scrape nor other runs."""
    other = job()
    other_run = other.start()
    other.send(1)
    one = job(run=name)
    assert one.start() == name
    one.send(2)
    samples = scrape()
    assert value(samples, "run_last_step", run=name) == 2
    assert value(samples, "run_last_step", run=other_run) == 1


def test_g2_newline_in_a_name_is_escaped() -> None:
    """Ingest refuses such a name; the exporter does not rely on it."""
    name = 'MacBook 14" a\\b\n# HELP'
    numbers = RunNumbers(run=name, active=True, last_step=3, last_sample=None, layers_in_bf16=0, firing=0,
                         lost={}, worst={"underflow_ratio": {}, "saturation_ratio": {}}, nonfinite={})
    registry = CollectorRegistry()
    registry.register(Snapshot(runs=[numbers], truncated=0, batches=0))
    assert value(parse(generate_latest(registry).decode()), "run_last_step", run=name) == 3


def test_g3_a_run_that_ended_is_no_longer_exported(
    job: Jobs, scrape: Callable[[], Samples], rows: Callable[..., list[tuple[Any, ...]]]
) -> None:
    """Silent for a while: still there, but not active. Silent for long: gone, with all its series."""
    one = job()
    run = one.start()
    one.send(5, one.values(layers_0=0.9))
    active = value(scrape(), "runs_active")
    assert active is not None
    age = "UPDATE runs SET last_seen_at = now() - make_interval(mins => %s) WHERE id = %s RETURNING 1"
    rows(age, 5, run)
    samples = scrape()
    assert value(samples, "runs_active") == active - 1
    assert value(samples, "underflow_ratio_max", run=run, role="weight") is not None
    rows(age, 20, run)
    assert not [labels for _, labels in scrape() if ("run", run) in labels]


def test_g3_very_many_runs_are_truncated_and_counted(
    job: Jobs, scrape: Callable[[], Samples], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest runs are exported, and how many are not is told."""
    runs = []
    for _ in range(4):
        one = job()
        runs.append(one.start())
        one.send(0)
    monkeypatch.setattr(prometheus, "MAX_RUNS", 2)
    samples = scrape()
    assert [run for run in runs if value(samples, "run_last_step", run=run) is not None] == runs[2:]
    assert (value(samples, "runs_truncated") or 0) >= 2


def test_what_if_series_do_not_mask_what_the_job_runs_in(job: Jobs, scrape: Callable[[], Samples]) -> None:
    """With live series, only they are exported: a what-if that underflows is no alarm."""
    one = job(modules=("layers.0",))
    run = one.start()
    one.send(0, {"underflow_ratio": plane(.5, .5, .5)})
    idea = job(run=one.run, attempt=one.attempt, producer="what-if", modules=("layers.8",), live=False)
    idea.start()
    idea.send(0, {"underflow_ratio": plane(1, 1, 1)})
    assert value(scrape(), "underflow_ratio_max", run=run, role="weight") == .5
