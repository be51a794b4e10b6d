"""The scope: a probe on one model, and the clock that counts its steps.

A step closes at the first training forward of the model after an optimizer's step, or when the job says
`scope.step(n)`; once a job has said so, only that counts (two optimizers, an optimizer inside backward, steps
that a gradient scaler skips). What lies between two closings is one step, however many micro-batches it has.

In a job that never calls the whole model (its parts are called by themselves, or it is checkpointed as one) a
step closes at the first training forward of a layer after all optimizers have stepped; where a compiled model
hides those too, when an optimizer steps again.

CUDA graphs run no hooks when they are replayed. Where they hold the model's forward, a step closes when all
optimizers have stepped; where they hold these, too, only `scope.step(n)` closes it.

At the boundary before step n + 2 the commands that were merged with step n are applied, on every rank alike:
the only moment at which the training thread may wait for the probe, and by then the answer is normally there.
"""

import atexit
import logging
import threading
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8scope.arguments import bare, check_switch, check_unattached, is_whole
from fp8scope.attention import install_attention
from fp8scope.capture import Relaxed
from fp8scope.fidelity import Loss, measure_fidelity
from fp8scope.fused import measure_fused
from fp8scope.gaps import Gaps
from fp8scope.hooks import Removable, install
from fp8scope.inert import InertObserver, can_report
from fp8scope.part import Part, Rename
from fp8scope.planned import reserve_rows
from fp8scope.precision import set_precision
from fp8scope.root import install_roots
from fp8scope.routers import install_routers
from fp8scope.rows import Rows
from fp8scope.sample import MOST_KEPT
from fp8scope.scripting import answer_scripting
from fp8scope.sentinels import Number, Sentinels
from fp8scope.states import StateRecorder, measure_states
from fp8scope.stored_rows import measure_stored
from fp8scope.sums import SentinelSums, StepRecord, StepWorker
from fp8scope.twins import Twins
from fp8scope.updates import Samples, Updates
from fp8scope.watch import Watch
from fp8scope_protocol.commands import Command, CommandReport, SetPrecision
from fp8scope_protocol.errors import Fp8scopeError, Invalid
from fp8scope_protocol.recipes import parse_recipes

LOG = logging.getLogger("fp8scope")


class Scope:
    """A probe on a model. Made by `attach`; use it as a context manager, or `close` it.

    Nothing here raises into the training loop after construction, apart from wrong arguments.
    """

    def __init__(
        self, model: nn.Module, optimizers: tuple[Optimizer, ...], *, worker: StepWorker, every: int,
        detail_every: int = 1, formats: tuple[str, ...] = ("e4m3",), start_step: int = 0,
        rename: Rename | None = None, twin_elements: int = MOST_KEPT,
    ) -> None:
        check_unattached(model)
        self.every = every
        """Steps between two measurements at present."""
        self.detail_every = detail_every
        self.current = start_step
        """The step under way."""
        self._worker = worker
        self._part = Part(rename, worker.holders, first_depth=worker.first_depth)
        self._layers = self._part.layers(model)
        self._model = model
        self._optimizers = tuple(map(bare, optimizers))
        self.explicit = False
        """Whether only `step` closes steps; so from its first call on."""
        self._stepped: set[int] = set()
        """Ids of the optimizers that have stepped in the step under way."""
        self._called = False
        """Whether the whole model was called in the step under way."""
        self._closed = False
        self._awaited: deque[int] = deque()
        self._reports: list[CommandReport] = []
        self._ended = False
        """Whether any step has."""
        self._passed: list[CommandReport] = []
        """On commands that name no layer of this rank."""
        device = device_of(model)
        self._places = self._part.places(model)
        with torch.inference_mode(False):  # else no later step could add to the sums
            self._watch = Watch(Rows(device), recipes=parse_recipes(formats),
                                rank=worker.rank, world=worker.world)
            self._sentinels = Sentinels(device, world=worker.job, copies=self._copies)
        reserve_rows(self._watch, model, self._optimizers)
        self._samples = Samples(self._watch, self._places)
        self._updates = Updates(self._watch, self._samples, self._sentinels)
        self._twins = Twins(self._watch, self._places, most=twin_elements)
        self._watch.begin_step = self._on_layer
        self._gaps = Gaps(self._watch, self._layers, model, partial(self._part.layers, model))
        self._handles = [*self._install(), *answer_scripting(model)]
        self._begin()
        atexit.register(_close_at_exit, weakref.ref(self))
        self._forgotten = weakref.finalize(self, _close_forgotten, worker)
        self._forgotten.atexit = False

    def log(self, **values: Number) -> None:
        """Numbers of the current step that the job knows: loss, grad_norm, lr, loss_scale.

        Detached tensors stay on their device. A loss may be given once a micro-batch.
        """
        if not (self._closed or self._is_captured("log")):
            self._sentinels.log(values)

    def read_gradients(self, optimizer: Optimizer) -> None:
        """Reads the gradients of `optimizer` now, as they are before clipping, and not again when it steps.

        For trainers that clip without telling the norm; others say `log(grad_norm=...)`, which is a norm in
        every step: off cadence gradients are read in one step of four.
        """
        with self._watch.guarded("optimizer"):
            self._sentinels.read_gradients(bare(optimizer), sampled=self._watch.sampling)

    def grad_fidelity(self, loss: Loss, other: Loss | None = None) -> None:
        """Compares the gradients of one micro-batch in the job's precision and in BF16; see `fidelity.py`.

        Call it on every rank, rarely (it costs two or three passes and sets of gradients), between two
        optimizer steps. `loss` runs the model on one micro-batch and returns its loss; `other` does so on
        another one, for the noise between batches. The numbers travel with the next measured step. What
        `loss` raises becomes an event.
        """
        if self._closed:
            return
        watch, called = self._watch, self._called
        sampling, due = watch.sampling, watch.due
        watch.sample(False)
        watch.expect(False)
        stepped, self._stepped = self._stepped, set()  # these forwards begin no step
        try:
            measure_fidelity(self._model, self._layers, self._part.places(self._model), self._watch,
                             loss, other)
        except Exception as error:
            self._watch.note("grad_fidelity", error)
        finally:  # Ctrl-C passes, and the job may go on
            self._stepped, self._called = stepped, called
            watch.sample(sampling)
            watch.expect(due)

    @property
    def series(self) -> int:
        """How many series have been measured so far, in this rank."""
        return self._watch.rows.count

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped in the step under way; a gradient scaler may have skipped it."""
        return bool(self._stepped)

    def step(self, n: int | None = None, *, skipped: bool = False, **values: Number) -> None:
        """Closes step `n` (None: the current one), after the optimizer's step or in its place if `skipped`.
        From the first call on only these calls close steps. Further arguments are those of `log`.
        """
        if n is not None and not is_whole(n, least=0):
            raise Invalid("n", n, "must be a step number, 0 or more, or None for the current step")
        check_switch("skipped", skipped)
        if self._closed or self._is_captured("step"):
            return
        self.log(**values)
        self.explicit = True
        if n is not None:
            self.current = int(n)
        self._close_step(skipped=skipped)

    def detach(self) -> None:
        """Leaves the model and the optimizers as they were found; CUDA graphs go on without measuring."""
        self._watch.end(self._model, self._sentinels.board)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        owners: list[Any] = [*(layer.module for layer in self._layers), *self._optimizers]
        for owner in owners:
            if isinstance(getattr(owner, "observer", None), InertObserver):
                owner.observer = None

    def close(self) -> None:
        """Closes the step under way if the optimizer has stepped, detaches and sends what is left."""
        if self._closed:
            return
        if not self.explicit and (self._stepped or self._sentinels.has_board):
            self._close_step(skipped=False)
        if self._watch.rows.count and not self._ended:
            LOG.warning("fp8scope: no step has ended, so nothing was sent: give attach the optimizers, or "
                        "call scope.step() after each step")
        self._closed = True
        self.detach()
        if self._reports or self._passed:  # on what was applied at the last boundary, on all ranks alike
            self._worker.submit(StepRecord(step=self.current, sentinels=SentinelSums.zeros(),
                                           reports=tuple(self._reports), passed=tuple(self._passed)))
        self._forgotten.detach()
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _install(self) -> list[Removable]:
        handles = install(self._layers, self._watch)
        handles += install_attention(self._model, self._watch,
                                     partial(self._sentinels.add, "attn_logit_bound"), self._part.rename)
        handles += install_routers(self._model, self._watch, self._sentinels.add, self._part.rename)
        handles += install_roots(self._model, self._watch, self._on_forward)
        for optimizer in self._optimizers:
            for register, hook in ((optimizer.register_step_pre_hook, self._before_optimizer),
                                   (optimizer.register_step_post_hook, self._after_optimizer)):
                # in a compiled step a graph break
                handles.append(register(torch.compiler.disable(hook)))  # type: ignore[no-untyped-call]
            handles.append(optimizer.register_load_state_dict_post_hook(self._twins.forget))
            if can_report(optimizer):
                optimizer.observer = StateRecorder(self._watch, self._places)  # type: ignore[attr-defined]
        return handles

    def _copies(self, parameter: Tensor) -> int:
        """How many ranks hold a part of a parameter."""
        place = self._places.get(id(parameter))
        return self._worker.world if place is None else self._part.copies(place)

    def _begin(self) -> None:
        """The step under way: measured or not, in detail or not, the same on every rank."""
        samples, rest = divmod(self.current, self.every)
        self._watch.begin(sampling=rest == 0, detailed=samples % self.detail_every == 0)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch.capturing():
            self._capture_optimizer(optimizer)
            return
        if id(optimizer) in self._stepped and not self.explicit:
            self._close_step(skipped=False)
        ready = kwargs.get("closure", next(iter(args[1:]), None)) is None  # else gradients come later
        with self._watch.guarded("optimizer"):
            if self._watch.sampling:  # FSDP may have replaced parameters since
                self._places.clear()
                self._places.update(self._part.places(self._model))
                self._updates.before(optimizer)
            if ready:
                self._sentinels.read_gradients(optimizer, sampled=self._watch.sampling)
        if self._watch.detailed:
            measure_fused(self._model, self._places, self._watch)
        with self._watch.guarded("twins"):
            self._twins.before(optimizer, ready=ready)

    def _capture_optimizer(self, optimizer: Optimizer) -> None:
        """Its step becomes part of a CUDA graph: what is read of gradients does, too."""
        with self._watch.guarded("optimizer"), Relaxed():
            self._watch.unobserved("optimizer", "its step is in a CUDA graph: what it does to weights and "
                                                "states is not measured, gradients are")
            if not self.explicit:
                self._watch.unobserved("step", "the optimizer's step is in a CUDA graph: call scope.step(n) "
                                               "after each replay, else no step ends")
            self._twins.forget(optimizer)
            with self._sentinels.recorded():
                self._sentinels.read_gradients(optimizer, sampled=True)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch.capturing():
            with self._watch.guarded("optimizer"), Relaxed(), self._sentinels.recorded():
                self._sentinels.after_step(optimizer)
            return
        self._stepped.add(id(optimizer))
        with self._watch.guarded("optimizer"):
            self._sentinels.read_gradients(optimizer, sampled=self._watch.sampling)
            self._sentinels.after_step(optimizer)
        if self._watch.sampling:
            with self._watch.guarded("optimizer"):
                self._updates.after(optimizer)
        if self._watch.detailed:
            measure_states(optimizer, self._places, self._watch)
            with self._watch.guarded("optimizer"):
                measure_stored(optimizer, self._samples, self._watch)
        with self._watch.guarded("twins"):
            self._twins.after(optimizer)
        all_stepped = self._stepped.issuperset(map(id, self._optimizers))
        ends = all_stepped and not self._called and not self.explicit
        self._watch.expect(ends and not self._watch.hides)
        if ends and self._watch.hides:
            self._close_step(skipped=False)

    def _on_forward(self) -> None:
        """A training forward of the whole model begins."""
        if self._watch.capturing():
            self._watch.pass_begins()
            return
        if self._stepped and not self.explicit:
            self._close_step(skipped=False)
        self._called = True

    def _on_layer(self) -> None:
        """The first training forward of a layer since all optimizers stepped, in a job without the above."""
        self._watch.expect(False)
        if self._stepped and not self.explicit:
            self._close_step(skipped=False)

    def _is_captured(self, call: str) -> bool:
        """Whether a CUDA graph is being captured, of which `call` can be no part; that is said."""
        if self._watch.capturing():
            self._watch.unobserved("step", f"scope.{call} has no effect while a CUDA graph is captured: call "
                                           "it after each replay")
            return True
        return False

    def _close_step(self, *, skipped: bool) -> None:
        step = self.current
        self._stepped.clear()
        self._called, self._ended = False, True
        record = StepRecord(step=step, skipped=skipped, sentinels=SentinelSums.zeros())
        with self._watch.guarded("step"):
            record = self._record(step, skipped)
        with self._watch.guarded("step"):  # apart: its own time belongs to the next step
            lap = self._watch.timer.lap(sampled=self._watch.sampling, detailed=self._watch.detailed)
            record = replace(record, wait=lap.wait, time=lap.time)
        self._worker.submit(record)  # whatever happened: other ranks count on this one's record
        self._awaited.append(step)
        self.current = step + 1
        self._obey()
        self._begin()

    def _record(self, step: int, skipped: bool) -> StepRecord:
        tables, layout = None, None
        if self._watch.sampling:
            self._gaps.note(step)
            self._sentinels.add("scale_staleness_bits", self._watch.rows.worst_staleness())
            tables, layout = self._watch.rows.collect() or (None, None)
        sentinels = self._sentinels.take()
        reports, self._reports = tuple(self._reports), []
        passed, self._passed = tuple(self._passed), []
        return StepRecord(
            step=step, skipped=skipped, sentinels=sentinels, tables=tables, layout=layout,
            events=self._watch.events(step), reports=reports, passed=passed,
        )

    def _obey(self) -> None:
        """Applies what was merged with the step before the last one."""
        if len(self._awaited) < 2:
            return
        result = self._worker.result(self._awaited.popleft())  # a wait here is for other ranks
        self.every = result.every or self.every
        with self._watch.guarded("step"):
            for command in result.commands:
                names = self._names_here(command.action)
                reports = self._reports if names else self._passed
                reports.append(self._apply(command, names or command.action.modules))

    def _names_here(self, action: SetPrecision) -> tuple[str, ...]:
        """Those of its layers that this rank has to answer for: all, unless ranks hold different ones."""
        if not self._worker.partial:
            return action.modules
        known = {layer.name for layer in self._layers}
        return tuple(name for name in action.modules if name in known)

    def _apply(self, command: Command, names: tuple[str, ...]) -> CommandReport:
        try:
            fixed = {layer for layer, _ in self._watch.recorded}.intersection(names)
            if fixed:
                raise Invalid("modules", min(fixed), "is in a CUDA graph, which computes as it was captured")
            precision = set_precision(self._layers, replace(command.action, modules=names))
        except Fp8scopeError as error:
            return CommandReport(id=command.id, state="rejected", step=self.current, reason=str(error))
        return CommandReport(id=command.id, state="applied", step=self.current, precision=precision)


def device_of(model: nn.Module) -> torch.device:
    """Where the sums are kept: with the first parameter on an accelerator, else on the CPU."""
    devices = (p.device for p in model.parameters())
    return next((one for one in devices if one.type not in ("cpu", "meta")), torch.device("cpu"))


def _close_at_exit(reference: "weakref.ref[Scope]") -> None:
    scope = reference()
    if scope is not None:
        scope.close()


def _close_forgotten(worker: StepWorker) -> None:
    """Of a scope that was collected with its model, as when a notebook's cell runs again. Other ranks would
    take it for one that has left."""
    if worker.job == 1:
        threading.Thread(target=worker.close, name="fp8scope-close", daemon=True).start()
