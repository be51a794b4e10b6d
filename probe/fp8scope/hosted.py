"""A scope inside a trainer that calls back: what the integrations have in common.

Wrong arguments are refused when the callback is made. After that nothing raises into the trainer: a fault is
logged, the first time with its traceback, and training goes on, without a probe if it could not attach.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Required, TypedDict

from torch import nn
from torch.optim import Optimizer

from fp8scope.arguments import check_arguments, check_budget, check_rename, format_names
from fp8scope.attachment import attach
from fp8scope.scope import Scope
from fp8scope.sentinels import Number
from fp8scope.settings import read_settings

LOG = logging.getLogger("fp8scope")


class AttachOptions(TypedDict, total=False):
    """Options of `attach` that a callback takes; the trainer knows the model, the optimizers and the step."""

    run: Required[str]
    every: int
    detail_every: int
    collector: str | None
    spool: str | Path | None
    resume: bool
    formats: Iterable[str]
    remote_control: bool
    budget: float | None
    rename: Callable[[str], str] | None


class HostedScope:
    """A scope that begins and ends with the training of one trainer. Can be pickled until it begins."""

    def __init__(self, options: AttachOptions) -> None:
        call = signature(attach).bind(nn.Identity(), start_step=None, **options)
        call.apply_defaults()
        self._options: dict[str, Any] = dict(options)
        self._options["formats"] = formats = format_names(call.arguments["formats"])
        given = call.arguments
        check_arguments(given["run"], given["every"], given["detail_every"], None, formats)
        check_budget(given["budget"])
        check_rename(given["rename"])
        read_settings(**{name: call.arguments[name] for name in ("collector", "spool")})
        self._told = False
        self.scope: Scope | None = None
        """None before training, after it, and if attaching failed."""

    def begin(self, model: nn.Module, optimizers: Iterable[Optimizer], *, step: int) -> None:
        """Attaches, on every rank. Training that goes on from a checkpoint continues the run of that name."""
        self.end()
        with self._guarded("attaching"):
            options = {"resume": step > 0} | self._options
            self.scope = attach(model, optimizers, start_step=step, **options)
            self.scope.explicit = True

    def log(self, **values: Number | None) -> None:
        """Numbers of the step under way; None for what is not known."""
        if self.scope is not None:
            with self._guarded("log"):
                self.scope.log(**{name: value for name, value in values.items() if value is not None})

    def read_gradients(self, optimizer: Optimizer) -> None:
        """Reads the gradients now, before the trainer clips them."""
        if self.scope is not None:
            with self._guarded("read_gradients"):
                self.scope.read_gradients(optimizer)

    def step(self, n: int | None = None) -> None:
        """Closes the step under way; a gradient scaler skipped it if no optimizer has stepped."""
        if self.scope is not None:
            with self._guarded("step"):
                self.scope.step(n, skipped=not self.scope.stepped)

    def end(self) -> None:
        """Detaches, and sends what is left."""
        scope, self.scope = self.scope, None
        if scope is not None:
            with self._guarded("closing"):
                scope.close()

    @contextmanager
    def _guarded(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            LOG.warning("fp8scope: %s failed: %s", where, error, exc_info=not self._told)
            self._told = True
