"""One rank of a small pipeline-parallel job, and the same job in one process; run by test_pipeline.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import fp8scope
from fp8scope_protocol.commands import Precision

WIDTH, LAYERS, STAGES = 32, 4, 2
MICRO_BATCHES, MICRO_ROWS = 4, 8
SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "zero-bubble": lambda stage, n, loss_fn: ScheduleInterleavedZeroBubble([stage], n, loss_fn=loss_fn),
}


class Switched(nn.Linear):
    """Says that it can be switched; what it computes does not matter here."""

    precision: Precision = "fp8"

    def set_precision(self, precision: Precision) -> None:
        self.precision = precision


class Stage(nn.Module):
    """Layers `first` to `last` of the model, by their numbers in the whole."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = {str(i): Switched(WIDTH, WIDTH) for i in range(LAYERS)}
        self.layers = nn.ModuleDict({str(i): whole[str(i)] for i in range(first, last)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


@dataclass(frozen=True)
class Job:
    """What every rank of a job does. `folder` is where it meets and spools."""

    folder: str
    schedules: Sequence[str] = tuple(SCHEDULES)
    world: int = STAGES
    steps: int = 3
    collector: str = "offline"
    without_probe: tuple[int, ...] = ()
    until_switched: str = ""
    """Run until this layer is in bf16, instead of `steps`."""


def batch(step: int, replica: int = 0, replicas: int = 1) -> Tensor:
    """Inputs, and targets, of the micro-batches of one data-parallel replica: [rows, WIDTH]."""
    rows = torch.randn(MICRO_BATCHES * MICRO_ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return rows.chunk(replicas)[replica]


def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: str, collector: str,
    rename: Callable[[str], str] | None = None,
) -> fp8scope.Scope:
    return fp8scope.attach(model, optimizer, run=run, every=2, detail_every=1, collector=collector,
                           remote_control=True, budget=None, rename=rename)


def train_alone(run: str, steps: int) -> None:
    """The whole model in this process, one micro-batch after the other."""
    model = Stage(0, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with attach(model, optimizer, run, "offline") as scope:
        for step in range(steps):
            for x in batch(step).chunk(MICRO_BATCHES):
                loss = mse_loss(model(x), x)
                scope.log(loss=loss.detach())
                loss.backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= MICRO_BATCHES
            optimizer.step()
            optimizer.zero_grad()


def train_stage(rank: int, job: Job) -> None:
    """One rank: a stage, and one of world / STAGES replicas of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=rank, world_size=job.world)
    mesh = init_device_mesh("cpu", (STAGES, job.world // STAGES), mesh_dim_names=("pp", "dp"))
    for name in job.schedules:
        run_interleaved(name, rank, job) if name == "interleaved" else run_schedule(name, rank, mesh, job)
    dist.destroy_process_group()


def run_schedule(name: str, rank: int, mesh: Any, job: Job) -> None:
    index, replica, replicas = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), mesh["dp"].size()
    part = LAYERS // STAGES
    model: nn.Module = Stage(part * index, part * (index + 1))
    shapes: dict[str, Any] = {}  # else the stages rehearse once to learn them, which DDP does not survive
    if replicas > 1:
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        x = torch.empty(MICRO_ROWS, WIDTH)
        shapes = {"input_args": (x.clone().requires_grad_(index > 0),), "output_args": (x.requires_grad_(),)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stage = PipelineStage(model, index, STAGES, torch.device("cpu"), group=mesh["pp"].get_group(), **shapes)
    schedule = SCHEDULES[name](stage, MICRO_BATCHES // replicas, loss_fn=mse_loss)
    scope = None
    if rank not in job.without_probe:
        scope = attach(model, optimizer, name, job.collector)
    step = 0
    while step < job.steps:
        x = batch(step, replica, replicas)
        losses: list[Tensor] = []
        schedule.step(x) if index == 0 else schedule.step(target=x, losses=losses)
        for loss in losses:
            if scope is not None:
                scope.log(loss=loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if job.until_switched and _switched(model, job.until_switched):
            break
    if scope is not None:
        scope.close()
    dist.barrier()


def run_interleaved(name: str, rank: int, job: Job) -> None:
    """Two stages of one layer on each rank, every other one, in a list that is never called itself."""
    numbers = range(rank, LAYERS, STAGES)
    model = nn.ModuleList(Stage(i, i + 1) for i in numbers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stages = [PipelineStage(part, i, LAYERS, torch.device("cpu"))
              for part, i in zip(model, numbers, strict=True)]
    schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=mse_loss)  # type: ignore[arg-type]
    with attach(model, optimizer, name, job.collector, lambda name: name.partition(".")[2]) as scope:
        for step in range(job.steps):
            x = batch(step)
            losses: list[Tensor] = []
            schedule.step(x) if rank == 0 else schedule.step(target=x, losses=losses)
            for loss in losses:
                scope.log(loss=loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()


def _switched(model: nn.Module, name: str) -> bool:
    """Whether the layer is in bf16, on any rank."""
    here = [one.precision != "fp8" for layer, one in model.named_modules()
            if isinstance(one, Switched) and layer.removeprefix("module.") == name]
    found = torch.tensor(float(any(here)))
    dist.all_reduce(found)
    return bool(found)
