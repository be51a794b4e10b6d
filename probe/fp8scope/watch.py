"""What all hooks of one attach share: whether this step is measured, where it is put, and what went wrong."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fp8scope.backend import round_trip
from fp8scope.rows import Rows
from fp8scope.sharding import local
from fp8scope_protocol.formats import Format
from fp8scope_protocol.recipes import Recipe
from fp8scope_protocol.series import Series
from fp8scope_protocol.wire import ProbeEvent


class Watch:
    """State of one attach that changes from step to step."""

    def __init__(self, rows: Rows, *, recipes: tuple[Recipe, ...], rank: int, world: int) -> None:
        self.rows = rows
        self.recipes = recipes
        """The what-ifs."""
        self.rank = rank
        self.world = world
        self.sampling = False
        """True while the current step is measured in full."""
        self._once: set[tuple[str, ...]] = set()
        self._forwarded: set[int] = set()
        self._problems: Counter[tuple[str, str]] = Counter()
        self._unobserved: dict[tuple[str, str], bool] = {}
        """(name, reason) -> whether it was told."""
        self.ran: set[str] = set()
        """Layers whose forward was measured in this step."""
        self.gradients: set[str] = set()
        """Layers whose gradient was."""

    def begin(self, *, sampling: bool) -> None:
        """A new step."""
        self.sampling = sampling
        self._once.clear()
        self._forwarded.clear()
        self.ran.clear()
        self.gradients.clear()

    def counts(self, module: nn.Module) -> bool:
        """Whether this forward of `module` belongs to the measured step, each pass once.

        Called from a forward pre-hook. No: evaluation, no_grad, transforms of torch.func, and what
        checkpointing computes again. Under reentrant checkpointing the first pass runs without gradients, so
        there the recomputation counts.
        """
        if not (self.sampling and module.training and torch.is_grad_enabled()):
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:  # such tensors have no values yet
            return False
        if torch._C._current_graph_task_id() == -1:
            self._forwarded.add(id(module))
            return True
        return id(module) not in self._forwarded

    def once(self, *key: str) -> bool:
        """True the first time in a step that `key` is asked for."""
        if key in self._once:
            return False
        self._once.add(key)
        return True

    def measure(
        self, series: Series, x: Tensor, element: Format, *, scales: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> None:
        """Adds the round trip of x [R, C] to the row of `series`."""
        row = self.rows.row(series)
        here = x.device == self.rows.device
        found = round_trip(x, element, series.scaling, scales=scales, codes=codes, rounding=series.rounding,
                           out=row if here else None)
        if not here:
            row.add(found.to(self.rows.device))

    def largest(self, series: Series, column: int, value: Tensor) -> None:
        """Raises one of the maxes of `series` to `value`, float64 []."""
        cell = self.rows.row(series).maxes[column]
        torch.maximum(cell, value.to(cell.device, non_blocking=cell.is_cuda), out=cell)

    def unobserved(self, name: str, reason: str) -> None:
        """`name` cannot be measured; said once per attach."""
        self._unobserved.setdefault((name, reason), False)

    @contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """Measures out of sight: without gradients, autocast, inference mode and the job's dispatch modes
        (selective checkpointing counts operations). Nothing that goes wrong inside reaches training."""
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch.autocast(self.rows.device.type, enabled=False))
                if torch._C._len_torch_dispatch_stack():
                    stack.enter_context(_disable_current_modes())
                yield
        except Exception as error:
            self._problems[where, f"{type(error).__name__}: {error}"[:300]] += 1

    def events(self, step: int) -> tuple[ProbeEvent, ...]:
        """What there is to tell since the last call."""
        found = []
        for (where, text), times in self._problems.items():
            text += f" ({times} times)" if times > 1 else ""
            found.append(ProbeEvent(kind="probe_error", step=step, name=where, text=text))
        self._problems.clear()
        for (name, reason), told in self._unobserved.items():
            if not told:
                found.append(ProbeEvent(kind="unobserved", step=step, name=name, text=reason))
                self._unobserved[name, reason] = True
        return tuple(found)


def matrix(x: Tensor) -> Tensor:
    """x [..., C] as [R, C]; a DTensor's local part."""
    x = local(x)
    return x.flatten(0, -2) if x.dim() > 1 else x.view(1, -1)
