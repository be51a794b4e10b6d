"""How long steps take, and how much of that is the probe's own work on the training thread.

Host time is taken around everything that the probe reads or measures there (`Watch.guarded`). Not in it:
hooks that find nothing to do (about 2 us a call), and waits for a merge, which are waits for another rank.

On a GPU the host runs ahead of the work it queues, so the length of a step is taken there: between events
recorded at the boundaries, for the worker to read once both have happened. Nothing waits for it here.
"""

from dataclasses import dataclass, replace
from time import perf_counter

import torch

from fp8scope.capture import Relaxed


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step of one rank or, merged, the largest of every number over the ranks."""

    sampled: bool = False
    """Whether the step was measured."""
    detailed: bool = False
    """Whether it was measured in detail."""
    on_device: bool = False
    """Whether `seconds` is a GPU's time."""
    seconds: float = 0.0
    """From boundary to boundary; 0 where it is not known, as of the first step."""
    probe_seconds: float = 0.0
    """The probe's own host time on the training thread."""


class Lap:
    """A step that has ended for the host."""

    def __init__(self, time: StepTime, begin: torch.cuda.Event | None, end: torch.cuda.Event | None) -> None:
        self._time = time
        self._begin = begin
        self._end = end

    def wait(self) -> None:
        """Blocks until the step has ended for the device too."""
        if self._end is not None:
            with Relaxed():
                self._end.synchronize()

    def time(self) -> StepTime:
        """How long it took; to be called after `wait`."""
        if self._end is None:
            return self._time
        with Relaxed():
            seconds = self._begin.elapsed_time(self._end) / 1e3 if self._begin is not None else 0.0
        return replace(self._time, seconds=seconds, on_device=True)


class Timer:
    """Times the steps of one scope; whoever works for the probe adds to `probe_seconds`."""

    def __init__(self, device: torch.device) -> None:
        self.probe_seconds = 0.0
        self.device = device
        self._boundary = 0.0
        self._event: torch.cuda.Event | None = None

    def lap(self, *, sampled: bool, detailed: bool = False) -> Lap:
        """The step that ends here."""
        now, before = perf_counter(), self._boundary
        time = StepTime(sampled=sampled, detailed=detailed, seconds=now - before if before else 0.0,
                        probe_seconds=self.probe_seconds)
        self._boundary, self.probe_seconds = now, 0.0
        if self.device.type != "cuda":
            return Lap(time, None, None)
        begin, self._event = self._event, torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(self.device))
        return Lap(time, begin, self._event)
