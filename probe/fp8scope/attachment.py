"""`attach`: one line that puts the probe on a training job.

    scope = fp8scope.attach(model, optimizer, run="pretrain-7b", every=10)
"""

import platform
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fp8scope.arguments import (
    bare_optimizers,
    check_arguments,
    check_budget,
    check_places,
    check_rename,
    check_switch,
    check_unattached,
    format_names,
    warn_of_lonely_ranks,
)
from fp8scope.cadence import Cadence
from fp8scope.part import Part
from fp8scope.ranks import declining, join_ranks, leaving
from fp8scope.scope import Scope, device_of
from fp8scope.settings import read_settings, token_for
from fp8scope.worker import Worker
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.wire import Hello


def attach(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    run: str,
    every: int = 10,
    detail_every: int = 32,
    collector: str | None = None,
    spool: str | Path | None = None,
    resume: bool = False,
    start_step: int | None = None,
    formats: Iterable[str] = ("e4m3",),
    remote_control: bool = False,
    budget: float | None = 0.01,
    rename: Callable[[str], str] | None = None,
) -> Scope:
    """Puts the probe on `model`. Call it on every rank, after sharding if the model is sharded.

    run: name of the run; a name used before starts a new run, unless `resume` continues the newest of it.
    every: steps between two measurements; sentinels are taken in every step.
    detail_every: of the measured steps, every how manieth is also measured in detail: columnwise tiles,
        exponent histograms, optimizer states, outlying channels and errors of products.
    collector: address, or `offline`; else FP8SCOPE_COLLECTOR, else http://127.0.0.1:8050.
    start_step: number of the first step; None takes it from the optimizer's state, which is 0 for a new run.
    formats: measured as what-ifs in layers that do not quantize by themselves and in optimizer states; each
        a format, or `format/scaling` to replace its usual scalings (see `recipes.usual_scaling`). Every
        further one costs as much again.
    remote_control: whether the collector may change the precision of layers.
    budget: share of the job's time that measuring may take; beyond it `every` grows. None: it never does.
    rename: from the name of a layer or parameter in `model` to its name in the whole, where other ranks have
        other layers of the same names: pipeline stages that count their layers from 0, experts.

    A model that has a probe is refused: its layers can report to one only.
    """
    with declining():
        if not isinstance(model, nn.Module):
            raise Invalid("model", type(model).__name__, "must be a torch.nn.Module")
        given = bare_optimizers(optimizers)
        names = format_names(formats)
        check_arguments(run, every, detail_every, start_step, names)
        check_budget(budget)
        check_switch("resume", resume)
        check_switch("remote_control", remote_control)
        check_rename(rename)
        check_places(collector, spool)
        check_unattached(model)
        warn_of_lonely_ranks()
        settings = read_settings(collector=collector, spool=spool)
        first = _first_step(given) if start_step is None else int(start_step)
        holding = Part(rename).holding(model)
    every, detail_every = int(every), int(detail_every)
    ranks = join_ranks(
        repr((run, every, detail_every, names, remote_control, resume, first, budget, settings.close_steps,
              settings.twin_elements)),
        holding, handshake_seconds=settings.handshake_seconds, reduce_seconds=settings.reduce_seconds,
    )
    hello = Hello(
        run=run, attempt="", producer="", resume=resume, every=every, remote_control=remote_control,
        started_ns=time.time_ns(), host=socket.gethostname(), precision=ranks.holding.precision,
        unobserved=ranks.holding.unobserved, facts=_facts(model, given),
    )
    cadence = Cadence(every, detail_every=detail_every, budget=budget, close_steps=settings.close_steps)
    with leaving(ranks):
        token = token_for(settings) if ranks.leads else None  # only who sends needs one
        worker = Worker(hello, ranks=ranks, settings=settings, token=token, cadence=cadence)
    try:
        return Scope(model, given, worker=worker, every=every, detail_every=detail_every, formats=names,
                     start_step=first, rename=rename, twin_elements=settings.twin_elements)
    except Exception:
        worker.close()  # it tells the other ranks
        raise


def _first_step(optimizers: tuple[Optimizer, ...]) -> int:
    """How many steps the optimizers have made, by their own count; 0 if they do not count."""
    counts = [state["step"] for one in optimizers for state in one.state.values()
              if isinstance(state, Mapping) and isinstance(state.get("step"), int | float | Tensor)]
    return max((int(count) for count in counts), default=0)


def _facts(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[str, str]:
    return {
        "model": type(model).__name__,
        "parameters": str(sum(p.numel() for p in model.parameters() if not is_lazy(p))),
        "optimizer": ", ".join(type(one).__name__ for one in optimizers),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "fp8scope": _own_version(),
        "device": str(device_of(model)),
    }


def _own_version() -> str:
    try:
        return version("fp8scope")
    except PackageNotFoundError:
        return "not installed"  # imported from a folder
