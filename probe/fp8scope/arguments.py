"""What `attach` and its callbacks are given, checked: the wrong is refused before a model is touched."""

import logging
import os
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fp8scope.inert import Inert
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.recipes import parse_recipe
from fp8scope_protocol.wire import check_run

T = TypeVar("T")
LOG = logging.getLogger("fp8scope")

MOST_WRAPPERS = 16
"""One around the other; an object may also hold itself, or make up attributes without an end."""
LARGEST = 2**53
"""Of steps and of counts of steps: what JSON and the collector keep exactly."""


def bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside the wrappers of Accelerate, Lightning and others, which have no step hooks."""
    for _ in range(MOST_WRAPPERS):
        try:
            inner = getattr(optimizer, "optimizer", None)
        except Exception:  # a class of somebody else's, which is no optimizer
            break
        if inner is None:
            break
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise Invalid("optimizers", type(optimizer).__name__, "must be a torch.optim.Optimizer, or wrap one")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise Invalid("optimizers", type(optimizer).__name__,
                      "must call torch.optim.Optimizer.__init__, without which it has no step hooks")
    return optimizer


def bare_optimizers(given: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """Each one's inside, once: an optimizer may be given beside its wrapper or its scheduler."""
    many = _listed("optimizers", given) if isinstance(given, Iterable) else (given,)
    return tuple({id(one): one for one in map(bare, many)}.values())


def format_names(formats: Iterable[str]) -> tuple[str, ...]:
    """Each name once; a single one may stand for itself."""
    if not isinstance(formats, Iterable):
        raise Invalid("formats", formats, "must be names of formats")
    names = (formats,) if isinstance(formats, str) else _listed("formats", formats)
    for name in names:
        if not isinstance(name, str):
            raise Invalid("formats", name, "must be names of formats")
    return tuple(dict.fromkeys(names))


def _listed(field: str, given: Iterable[T]) -> tuple[T, ...]:
    try:
        return tuple(given)
    except Exception as error:
        raise Invalid(field, type(given).__name__, f"must be a list; this one raised {error!r}") from error


def check_arguments(
    run: str, every: int, detail_every: int, start_step: int | None, formats: tuple[str, ...]
) -> None:
    """Refuses what `attach` could not work with."""
    check_run(run)
    if not is_whole(every, least=1):
        raise Invalid("every", every, "must be a number of steps, 1 to 2^53")
    if not is_whole(detail_every, least=1):
        raise Invalid("detail_every", detail_every, "must be a number of measured steps, 1 to 2^53")
    if start_step is not None and not is_whole(start_step, least=0):
        raise Invalid("start_step", start_step, "must be a step number, 0 to 2^53")
    if not formats:
        raise Invalid("formats", formats, "must name at least one format")
    for name in formats:
        parse_recipe(name)


def check_places(collector: object, spool: object) -> None:
    """Refuses what is no text, before anything is asked of it, and a folder that no system can name."""
    if not isinstance(collector, str | None):
        raise Invalid("collector", collector, "must be a text, an address or offline, or None")
    if not isinstance(spool, str | Path | None):
        raise Invalid("spool", spool, "must be a folder")
    try:
        named = b"\0" not in os.fsencode(spool or "")
    except UnicodeEncodeError:
        named = False
    if not named:
        raise Invalid("spool", spool, "must be a folder that the system can name")


def check_switch(name: str, value: object) -> None:
    """Refuses what is neither True nor False: it would travel in the hello, which nobody could read."""
    if not isinstance(value, bool):
        raise Invalid(name, value, "must be True or False")


def check_rename(rename: object) -> None:
    """Refuses what cannot be called, as a prefix cannot; what it returns is checked with the model."""
    if rename is not None and not callable(rename):
        raise Invalid("rename", rename, "must be a function from a name to a name, or None")


def check_budget(budget: float | None) -> None:
    """Refuses what is no share of a job's time."""
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 < budget < 1:
        raise Invalid("budget", budget, "must be a share of the job's time, over 0 and under 1, or None")


def is_whole(n: object, *, least: int) -> bool:
    """Python's integers and NumPy's, but not True, as far as they can be stored."""
    return isinstance(n, Integral) and not isinstance(n, bool) and least <= int(n) <= LARGEST


def check_unattached(model: nn.Module) -> None:
    """Refuses a model that has a probe, whose layers can report to one only, and one that runs no hooks."""
    if isinstance(model, torch.jit.ScriptModule):
        raise Invalid("model", type(model).__name__,
                      "is compiled by torch.jit, which runs no hooks; attach to the module it was made of")
    for name, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if any(isinstance(hook, Inert) for hook in hooks):
            raise Invalid("model", name or type(model).__name__, "has a probe already; close its scope first")


def warn_of_lonely_ranks() -> None:
    """Says that a launched job has no process group yet: each rank would be measured as a run of its own."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1 and not (dist.is_available() and dist.is_initialized()):
        LOG.warning("fp8scope: WORLD_SIZE is %s, but there is no process group: each rank is measured alone; "
                    "call torch.distributed.init_process_group before attach", size)
