"""One rank of a small job that uses the probe's transport as a scope does; run by test_ranks.py.

`job` (a dict, put there by runpy) says what happens; the rank writes what it saw to job["out"] as JSON.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fp8scope.cadence import Cadence
from fp8scope.producer import Holding
from fp8scope.ranks import join_ranks
from fp8scope.settings import ProbeSettings
from fp8scope.sums import (
    COUNT_COLUMNS,
    MAX_COLUMNS,
    SENTINEL_SUM_COLUMNS,
    SUM_COLUMNS,
    SentinelSums,
    StepRecord,
    SumTables,
)
from fp8scope.timer import StepTime
from fp8scope.worker import Worker
from fp8scope_protocol.commands import CommandReport
from fp8scope_protocol.series import Layout, Series
from fp8scope_protocol.wire import Hello

ELEMENTS = 1000


def layout_of(names: list[str]) -> Layout:
    return Layout(series=tuple(
        Series(name=name, role="activation", format="e4m3", scaling="tile 1x128", module=name, depth=i)
        for i, name in enumerate(names)
    ))


def record_of(step: int, rank: int, job: dict[str, Any], layout: Layout) -> StepRecord:
    """All fine, but from step 5 on in job["bad_rank"]: amax 1e4 and 30 % underflow in the last series.
    job["errors"]: {rank: {series: relative squared error}}."""
    tables = SumTables.zeros(len(layout.series))
    tables.counts[:, COUNT_COLUMNS.index("elements")] = ELEMENTS
    tables.counts[:, COUNT_COLUMNS.index("coded")] = ELEMENTS
    tables.counts[:, COUNT_COLUMNS.index("nonzero")] = ELEMENTS
    tables.maxes[:, MAX_COLUMNS.index("amax")] = 1.0
    if rank == job.get("bad_rank") and step >= 5:
        tables.maxes[-1, MAX_COLUMNS.index("amax")] = 1e4
        tables.counts[-1, COUNT_COLUMNS.index("underflow")] = 300
    for series, error in job.get("errors", {}).get(rank, {}).items():
        tables.sums[series, SUM_COLUMNS.index("coded_x2")] = 1.0
        tables.sums[series, SUM_COLUMNS.index("e2")] = error
    if step == job.get("damaged", {}).get(rank):
        tables = tables.take([0])  # of several series
    sentinels = SentinelSums.zeros()
    sentinels.sums[SENTINEL_SUM_COLUMNS.index("loss_sum")] = float(rank)
    sentinels.sums[SENTINEL_SUM_COLUMNS.index("loss_count")] = 1.0
    sentinels.maxes[0] = float(rank)
    cost = job.get("cost", {}).get(rank, 1e-3)  # seconds, of a step of 0.1
    time = StepTime(sampled=True, seconds=0.1, probe_seconds=cost)
    return StepRecord(step=step, sentinels=sentinels, tables=tables, layout=layout, time=lambda: time)


def train(
    worker: Worker | None, rank: int, job: dict[str, Any]
) -> tuple[dict[int, int], dict[int, int]]:
    """Steps until every rank has applied a command, or job["steps"]; returns {command id: step} and
    {step: new cadence}."""
    layout = layout_of(job.get("names", {}).get(rank, ["layers.0", "layers.3"]))
    applied: dict[int, int] = {}
    cadences: dict[int, int] = {}
    reports: tuple[CommandReport, ...] = ()
    tail = None
    for step in range(job["steps"]):
        if step == job.get("stall", {}).get(rank):
            time.sleep(2.0)
        if step == job.get("behind", {}).get(rank):
            wait_for_end(Path(f"{job['out']}.0"))
        if step == job.get("close", {}).get(rank) and worker is not None:
            worker.close()
        if step == job.get("die", {}).get(rank):
            os._exit(9)
        if worker is not None:
            result = worker.result(-1 if job.get("unasked") else step - 2)
            if result.every is not None:
                cadences[step] = result.every
            for command in result.commands:
                applied[command.id] = step
                reports += (CommandReport(id=command.id, state="applied", step=step),)
            worker.submit(replace(record_of(step, rank, job, layout), reports=reports))
            reports = ()
        if job.get("until_switched"):  # the job's own collective: all ranks stop at the same step
            done = torch.tensor([len(applied)])
            dist.all_reduce(done)
            if tail is None and int(done) == job["world"]:
                tail = step + 3
            if tail == step:
                break
            time.sleep(0.005)
    return applied, cadences


def wait_for_end(seen: Path) -> None:
    """Until the process that wrote `seen` as its last deed is gone."""
    while not seen.exists() or not seen.read_text():
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        while True:
            os.kill(json.loads(seen.read_text())["pid"], 0)
            time.sleep(0.01)


def main(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{job['port']}", rank=rank,
                            world_size=job["world"])
    settings = ProbeSettings(**{**job["settings"], "spool": Path(job["settings"]["spool"])})
    worker = ranks = None
    if rank not in job.get("without_probe", []):
        configuration = "every=1" if rank not in job.get("unlike", []) else "every=2"
        holding = Holding(names=tuple(job.get("holds", {}).get(rank, ())))
        ranks = join_ranks(configuration, holding, handshake_seconds=settings.handshake_seconds,
                           reduce_seconds=settings.reduce_seconds)
        worker = Worker(Hello(run="run", attempt="", producer="", remote_control=True), ranks=ranks,
                        settings=settings, token=None, cadence=Cadence(1, budget=job.get("budget")))
    applied, cadences = train(worker, rank, job)
    ours = torch.ones(1)
    if not job.get("die") and not job.get("behind"):
        dist.all_reduce(ours)  # the job's own group still works
    seen: dict[str, Any] = {"pid": os.getpid(), "applied": applied, "cadences": cadences, "sum": float(ours)}
    if worker is not None and ranks is not None:
        seen |= {"world": worker.world, "apart": ranks.apart, "attempt": ranks.attempt}
        worker.close()
        seen |= {"waits": worker.waits, "lost": dict(worker.lost)}
    Path(f"{job['out']}.{rank}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(globals()["rank"], globals()["job"])
