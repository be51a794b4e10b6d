"""What the probe costs, as a share of the job's time.

    sampled     mean cost of a measured step, of which each `detail_every`-th is measured in detail
    always      cost of any other step, where it can be told
    step        length of a step without the probe
    overhead    (sampled + (every - 1) always) / (every step)

Costs and lengths are medians over the newest WINDOW steps of a kind (detailed, light, not sampled), so that a
checkpoint, an evaluation or a stray pause is no cost of the probe's. Steps before WARM_UP are left out: they
compile, allocate and read from disk.

On the CPU a cost is the host time that the probe took on the training thread, and a step without the probe is
what is left of its length.

On a GPU host time tells little: it is hidden while the GPU is busy, and the kernels run later. Two events
around each measurement would cost more than the measurement. So the cost of a sampled step is how much longer
such steps take than the others, both in GPU time, and what the probe does in *every* step is not in it. A job
that measures every step has nothing to compare: then host time stands in, which is too much where the GPU is
the slower one, until some steps are not sampled.
"""

import statistics
from collections import deque
from collections.abc import Callable

from fp8scope.timer import StepTime

WARM_UP = 20
"""Steps of an attach that say nothing about what is to come."""
WINDOW = 16
"""Steps of each kind whose median counts."""
FEWEST = 4
"""Sampled steps below which nothing is said."""


class Costs:
    """Collects the steps of a run. Fed with the same times it says the same on every rank."""

    def __init__(self, *, detail_every: int = 1) -> None:
        self.sampled_steps = 0
        """Sampled steps counted so far."""
        self._detail_every = detail_every
        self._steps = 0
        self._light: deque[StepTime] = deque(maxlen=WINDOW)
        self._detailed: deque[StepTime] = deque(maxlen=WINDOW)
        self._others: deque[StepTime] = deque(maxlen=WINDOW)

    def add(self, time: StepTime) -> None:
        """The next step, merged."""
        self._steps += 1
        if self._steps <= WARM_UP or time.seconds <= 0.0:
            return
        if time.sampled:
            self.sampled_steps += 1
        kind = self._others if not time.sampled else self._detailed if time.detailed else self._light
        kind.append(time)

    def overhead(self, every: int) -> float | None:
        """The share that measuring every `every`-th step takes; None while that cannot be said."""
        if len(self._light) + len(self._detailed) < FEWEST:
            return None
        sampled, always, step = self._parts()
        return (sampled + (every - 1) * always) / (every * step) if step > 0.0 else None

    def __str__(self) -> str:
        sampled, always, step = self._parts()
        return (f"a sampled step costs {sampled * 1e3:.3g} ms, any other {always * 1e3:.3g} ms, "
                f"a step takes {step * 1e3:.4g} ms without the probe")

    def _parts(self) -> tuple[float, float, float]:
        """(sampled, always, step) in seconds."""
        measured, others = (*self._light, *self._detailed), self._others
        on_device = measured[-1].on_device
        if on_device and len(others) >= FEWEST:
            step = _median([time.seconds for time in others])
            return self._mean_cost(lambda time: max(0.0, time.seconds - step)), 0.0, step
        hidden = 0.0 if on_device else 1.0  # host time that is in the length of a step
        step = _median([time.seconds - hidden * time.probe_seconds for time in (*measured, *others)])
        always = 0.0 if on_device else _median([time.probe_seconds for time in others])
        return self._mean_cost(lambda time: time.probe_seconds), always, step

    def _mean_cost(self, cost: Callable[[StepTime], float]) -> float:
        """Of sampled steps, each kind as often as it comes."""
        light, detailed = ([cost(time) for time in kind] for kind in (self._light, self._detailed))
        if not (light and detailed):
            return _median(light or detailed)
        share = 1.0 / self._detail_every
        return share * _median(detailed) + (1.0 - share) * _median(light)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
