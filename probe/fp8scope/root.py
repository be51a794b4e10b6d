"""Where a training forward of the model begins, or of a part that the job calls by itself."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from fp8scope.compiled import Key, trace_begin
from fp8scope.inert import Inert
from fp8scope.watch import Watch

REHEARSAL, REHEARSAL_DEPTH = "_forward_metadata_inference", 16
"""A function of torch.distributed.pipelining, and how many calls below it a stage's forward may be."""


def install_roots(
    model: nn.Module, watch: Watch, forward_begins: Callable[[], None]
) -> list[RemovableHandle]:
    """A hook on `model`, and on each part of a container without a forward of its own: a list of pipeline
    stages. A part is not the model, so its forward closes no step here."""
    parts = model.children() if type(model).forward is nn.Module.forward else ()
    roots = [(model, forward_begins), *((part, _nothing) for part in parts)]
    return [one.register_forward_pre_hook(RootHook(begins, watch), prepend=True) for one, begins in roots]


class RootHook(Inert):
    """Calls `forward_begins` when a training forward of the whole model does; not in evaluation or
    recomputation."""

    def __init__(self, forward_begins: Callable[[], None], watch: Watch) -> None:
        # Dynamo gives a frame up for good once it has found nothing in it to compile, as in evaluation. This
        # hook then runs as it is written, and what it calls must not be compiled piece by piece.
        self.forward_begins: Callable[[], None] = torch.compiler.disable(
            forward_begins)  # type: ignore[no-untyped-call]
        self.watch = watch
        self.key = Key(self, watch.rows.device)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if is_dynamo_compiling():
            trace_begin(self.key.tensor)
        elif torch._C._current_graph_task_id() == -1 and not (torch.compiler.is_compiling()
                                                              or torch._C._is_tracing()):  # by torch.jit
            self.forward_begins()
            self.watch.rehearsing = self.watch.sampling and _is_rehearsal()


def _nothing() -> None:
    """What a part's forward begins."""


def _is_rehearsal() -> bool:
    """Whether the forward under way is that by which torch.distributed.pipelining learns a stage's shapes:
    before the first step, on memory that nothing has been written to."""
    frame = sys._getframe(2)
    for _ in range(REHEARSAL_DEPTH):
        if frame.f_code.co_name == REHEARSAL:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
