"""What all hooks of one attach share: whether this step is measured, where it is put, and what went wrong."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fp8scope.backend import round_trip, round_trips, takes_flag
from fp8scope.batch import Trip
from fp8scope.capture import Relaxed
from fp8scope.rows import Rows
from fp8scope.saved_input import Kept
from fp8scope.sharding import local
from fp8scope.timer import Timer
from fp8scope_protocol.formats import Format
from fp8scope_protocol.recipes import Recipe
from fp8scope_protocol.series import Series
from fp8scope_protocol.wire import ProbeEvent

TURNS = 8
"""Detailed steps in which every layer has once had the turn of what is dearest."""


class Operand(NamedTuple):
    """A tensor that is measured with current scales, and where it is put."""

    series: Series
    x: Tensor
    """[R, C]"""
    element: Format
    power_of_two: bool = False
    root: bool = False
    """Whether the square root of x is measured."""


class Guard:
    """A context without gradients, autocast, inference mode, the job's dispatch modes (selective
    checkpointing counts operations) and function modes (a default device) and what subclasses of Tensor make
    of functions, in which errors are counted and go no further, and time is counted.

    Entered several times a layer and step: what is off already is not switched off, which takes 3 us where
    `contextlib.ExitStack` over all four takes 40.
    """

    __slots__ = ("_begin", "_device", "_functions", "_problems", "_stack", "_timer", "_where",
                 "_with_gradients")

    def __init__(self, where: str, problems: Counter[tuple[str, str]], timer: Timer) -> None:
        self._where = where
        self._problems = problems
        self._timer = timer
        self._device = timer.device.type
        self._stack: ExitStack | None = None
        self._functions = torch._C.DisableTorchFunction()

    def __enter__(self) -> None:
        self._begin = perf_counter()
        self._functions.__enter__()
        self._with_gradients = torch.is_grad_enabled()
        modes = torch._C._len_torch_dispatch_stack()
        if modes or torch.is_inference_mode_enabled() or torch.is_autocast_enabled(self._device):
            self._stack = ExitStack()
            self._stack.enter_context(torch.inference_mode(False))
            self._stack.enter_context(torch.autocast(self._device, enabled=False))
            if modes:
                self._stack.enter_context(_disable_current_modes())
        torch._C._set_grad_enabled(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        torch._C._set_grad_enabled(self._with_gradients)
        if self._stack is not None:
            self._stack.close()
        self._functions.__exit__(kind, error, trace)
        self._timer.probe_seconds += perf_counter() - self._begin
        if isinstance(error, Exception):
            self._problems[self._where, f"{type(error).__name__}: {error}"[:300]] += 1
            return True
        return False


class Watch:
    """State of one attach that changes from step to step.

    CUDA graphs. Hooks run while a graph is captured, not when it is replayed. So during a capture they act
    as in a light step, whichever step it is, and record kernels that look at `flag` when they run: it lies on
    the device at a fixed address and is set at step boundaries. Rows lie at fixed addresses, too. What has no
    such kernel is left out and listed.
    """

    def __init__(self, rows: Rows, *, recipes: tuple[Recipe, ...], rank: int, world: int) -> None:
        self.rows = rows
        self.recipes = recipes
        """The what-ifs."""
        self.rank = rank
        self.world = world
        self.timer = Timer(rows.device)
        self.sampling = False
        """True while the current step is measured."""
        self.due = False
        """True when the next training forward of any layer begins a step."""
        self.idle = True
        """Whether a layer's forward has nothing to tell: neither of the two."""
        self.begin_step: Callable[[], None] = lambda: None
        """What is due; the scope's."""
        self.rehearsing = False
        """True from a forward on that is no part of the step; see root.py."""
        self._in_detail = False
        self.flag = torch.zeros(1, dtype=torch.int32, device=rows.device)
        """1 while the current step is measured, 0 while it is not: what captured kernels look at."""
        self._flagged = False
        self.recording = False
        """Whether a CUDA graph was being captured when `capturing` was last asked."""
        self.captured = False
        """Whether that was ever so."""
        self.hides = False
        """Whether layers were captured: replays of their graph run no hooks."""
        self.recorded: set[tuple[str, str]] = set()
        """(layer, role) of what is measured in CUDA graphs."""
        on_gpu = rows.device.type == "cuda"  # without functions in Python; bool() is False
        self.side_stream: Callable[[], int | bool] = (
            partial(torch._C._cuda_getCurrentRawStream, -1) if on_gpu else bool)
        """The current device's current stream, 0 where that is the default one, which cannot be captured: a
        look at a variable of the thread, where `asks_capturing` calls the driver."""
        self.asks_capturing: Callable[[], bool] = (
            torch._C._cuda_isCurrentStreamCapturing if on_gpu else bool)
        """Whether a CUDA graph is being captured; `capturing` also takes note of it."""
        self._once_outside: set[tuple[str, ...]] = set()
        """`_once` of the step, during a capture."""
        self._details = 0
        self._once: set[tuple[str, ...]] = set()
        self._forwarded: set[int] = set()
        self._problems: Counter[tuple[str, str]] = Counter()
        self._unobserved: dict[tuple[str, str], bool] = {}
        """(name, reason) -> whether it was told."""
        self.ran: set[str] = set()
        """Layers whose forward was measured in this step."""
        self.asked: set[str] = set()
        """Layers with an output whose gradient was waited for."""
        self.gradients: set[str] = set()
        """Layers whose gradient was measured."""
        self.plans: dict[Any, Any] = {}
        """What kernels keep of earlier batches; see `backend.round_trips`."""
        self.anchor = torch.zeros(1, device=rows.device, requires_grad=True)
        """See compiled.py."""
        self.calls: dict[str, dict[int, Kept | None]] = {}
        """Layer -> calls of this step in compiled regions, and what each keeps for its backward pass."""

    def begin(self, *, sampling: bool, detailed: bool) -> None:
        """A new step."""
        self.sample(sampling)
        self.expect(False)
        self._in_detail = sampling and detailed
        self._details += self._in_detail
        self._once.clear()
        self._forwarded.clear()
        self.ran.clear()
        self.asked.clear()
        self.gradients.clear()
        self.calls.clear()

    def end(self, model: nn.Module, board: Tensor) -> None:
        """The scope is about to go. Graphs go on without measuring; what kernels read and write, `board`
        too, lives while the model does."""
        if not self.capturing():
            self.sample(False)
        if self.captured:
            weakref.finalize(model, _let_go, self.flag, self.rows, board)

    def expect(self, due: bool) -> None:
        """Sets `due`."""
        self.due = due
        self.idle = not (due or self.sampling)

    def sample(self, on: bool) -> None:
        """Measures from here on, or does not; CUDA graphs that are replayed from here on, too."""
        if self.rows.device.type == "cuda" and on != self._flagged:
            self.flag.fill_(on)  # asynchronous; in every step it would cost a launch
            self._flagged = on
        self.sampling = on

    def attends(self) -> bool:
        """Whether a layer's forward has anything to tell: if not idle, and while a CUDA graph is captured."""
        return self.capturing() or not self.idle

    @property
    def measuring(self) -> bool:
        """Whether what layers compute is to be measured: in measured steps, and while a graph is captured."""
        return self.capturing() or self.sampling

    @property
    def detailed(self) -> bool:
        """True while the step is measured in detail: also what costs as much again as the rest together,
        which are columnwise tiles, histograms, optimizer states, outlying channels and errors of products."""
        return self._in_detail and not self.recording

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, so that kernels launched now run when it is replayed."""
        now = self.asks_capturing()
        if now != self.recording:
            self.recording, self.captured = now, True
            self._once, self._once_outside = (set(), self._once) if now else (self._once_outside, set())
        return now

    def pass_begins(self) -> None:
        """A forward of the whole model is captured: a graph of its own, for all that is known."""
        self._once.clear()

    def counts(self, module: nn.Module) -> bool:
        """Whether this forward of `module` belongs to a step, each pass once; a step that is due begins.

        Called from a forward pre-hook of a measured step. No: evaluation, no_grad, `torch.jit.trace`,
        transforms of torch.func, and what checkpointing computes again. Under reentrant checkpointing the
        first pass runs without gradients, so there the recomputation counts.
        """
        if not (module.training and torch.is_grad_enabled()) or self.rehearsing or torch._C._is_tracing():
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:  # such tensors have no values yet
            return False
        return self.is_first_pass(module)

    def is_first_pass(self, module: nn.Module) -> bool:
        """Whether this forward of `module` is not the repetition of one that counted."""
        recomputed = torch._C._current_graph_task_id() != -1
        if self.due and not self.recording and not (recomputed and id(module) in self._forwarded):
            self.begin_step()
        if not recomputed:
            self._forwarded.add(id(module))
            return True
        return id(module) not in self._forwarded

    def sample_of(self, name: str, call: int) -> Kept | None:
        """What a call of layer `name` kept, once. Checkpointing repeats a call, which is known by another
        number then: it can only be meant where there was one."""
        calls = self.calls.get(name, {})
        if call not in calls and len(calls) == 1:
            call = next(iter(calls))
        sample = calls.get(call)
        if sample is not None:
            calls[call] = None
        return sample

    def has_turn(self, index: int) -> bool:
        """Whether layer `index` is measured in this step by what only every TURNS-th layer is."""
        return self.detailed and (index - self._details + 1) % TURNS == 0

    def once(self, *key: str) -> bool:
        """True the first time in a step that `key` is asked for."""
        if key in self._once:
            return False
        self._once.add(key)
        return True

    def measure(
        self, series: Series, x: Tensor, element: Format, *, scales: Tensor | None = None,
        codes: Tensor | None = None, power_of_two: bool = False,
    ) -> None:
        """Adds the round trip of x [R, C] to the row of `series`."""
        if self.recording:
            self._record(series, x, element, scales=scales, codes=codes, power_of_two=power_of_two)
            return
        row = self.rows.row(series)
        here = x.device == self.rows.device
        found = round_trip(x, element, series.scaling, scales=scales, codes=codes, rounding=series.rounding,
                           power_of_two=power_of_two, histogram=self.detailed, out=row if here else None)
        if not here:
            row.add(found.to(self.rows.device))

    def measure_all(self, operands: Sequence[Operand], where: str) -> None:
        """Adds the round trips of all, of different series, to their rows: together where kernels can, else,
        and where that fails, one by one. Guarded in itself; not while a CUDA graph is captured."""
        done: set[int] = set()
        with self.guarded(where):
            trips = [Trip(one.x, one.element, one.series.scaling, self.rows.row(one.series), one.root,
                          one.power_of_two) for one in operands]
            done = round_trips(trips, histogram=self.detailed, plans=self.plans)
        for i, one in enumerate(operands):
            if i not in done:
                with self.guarded(one.series.name):
                    x = one.x.float().sqrt() if one.root else one.x
                    self.measure(one.series, x, one.element, power_of_two=one.power_of_two)

    def announce(self, series: Series) -> bool:
        """Makes sure that `series` has a row. False, and said, where a capture is under way and none is left.
        """
        if self.recording and not self.rows.has_room(series):
            self.unobserved(series.name, f"{series.role}: its first step is captured in a CUDA graph, where "
                                         "no memory can be had; run a measured step before the capture")
            return False
        self.rows.row(series)
        return True

    def largest(self, series: Series, column: int, value: Tensor) -> None:
        """Raises one of the maxes of `series` to `value`, float64 []."""
        cell = self.rows.row(series).maxes[column]
        torch.maximum(cell, value.to(cell.device, non_blocking=cell.is_cuda), out=cell)

    def _record(self, series: Series, x: Tensor, element: Format, **how: Any) -> None:
        """Puts a round trip into the CUDA graph that is captured; it acts where the flag is set."""
        self.hides = True
        if not takes_flag(x, element, series.scaling) or x.device != self.rows.device:
            self.unobserved(series.name, f"{series.role} in {series.format}: not measured in CUDA graphs, "
                                         "which takes a kernel")
        elif self.announce(series):
            with Relaxed():
                round_trip(x, element, series.scaling, rounding=series.rounding, histogram=False,
                           out=self.rows.row(series), flag=self.flag, **how)
            self.recorded.add((series.module, series.role))
            self.unobserved("CUDA graphs", "what they hold is measured as in steps that are not detailed: "
                                           "columnwise tiles, histograms, errors of products, outlying "
                                           "channels, attn_logit_bound and sentinels of routers are missing "
                                           "there")

    def unobserved(self, name: str, reason: str) -> None:
        """`name` cannot be measured; said once per attach."""
        self._unobserved.setdefault((name, reason), False)

    def guarded(self, where: str) -> "Guard":
        """Measures out of sight, and keeps what goes wrong from training; the time is the probe's."""
        return Guard(where, self._problems, self.timer)

    def note(self, where: str, error: Exception) -> None:
        """Counts what went wrong, to be told with the step."""
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


def _let_go(*kept: object) -> None:
    """Nothing is left to do with what was kept."""


def matrix(x: Tensor) -> Tensor:
    """x [..., C] as [R, C]; a DTensor's local part."""
    x = local(x)
    return x.flatten(0, -2) if x.dim() > 1 else x.view(1, -1)
