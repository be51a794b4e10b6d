"""Sentinels that are elevated: the first sign of trouble, in steps that are not measured in full too.

A value is elevated when it is over `least` and, where there is a `factor`, over that many times the median of
its own last WINDOW values; NaN and infinities always are. The limits are those of design and measurement: an
Adam update seldom exceeds 3 lr, a scale that is half a bit stale saturates soon, and logits of small healthy
decoders stay below 50 while they grow, which they do for long without QKNorm (docs/log.md). They
ask for a closer look, not for a change: a false alarm costs some sampled steps.

One sign is one elevation, however long it lasts: a sentinel counts again after CALM values in a row that were
not elevated. So a job that lives with a bad number is not measured at every step for ever.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW = 64
"""Values whose median is the healthy one."""
FEWEST = 16
"""Values below which a median says nothing, and no sentinel is elevated."""
CALM = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Elevation:
    """When a sentinel is elevated."""

    sentinel: str
    least: float
    factor: float | None = None

    def limit(self, past: deque[float]) -> float:
        """The value beyond which it is, given finite earlier ones."""
        if self.factor is None:
            return self.least
        return max(self.least, self.factor * statistics.median(past))


ELEVATIONS = (
    Elevation(sentinel="nonfinite_count", least=0.0),
    Elevation(sentinel="grad_norm_ratio", least=4.0),  # is itself a ratio to a median
    Elevation(sentinel="update_max", least=3.0, factor=3.0),
    Elevation(sentinel="update_weight_ratio", least=0.0, factor=4.0),
    Elevation(sentinel="v_zero_share", least=0.01, factor=3.0),
    Elevation(sentinel="scale_staleness_bits", least=0.5),
    Elevation(sentinel="attn_logit_bound", least=100.0, factor=2.0),
)


class Elevations:
    """What the sentinels of a run are used to. Fed with the same numbers it says the same on every rank."""

    def __init__(self) -> None:
        self._past: dict[str, deque[float]] = {}
        self._calm: dict[str, int] = {}
        """Sentinel -> values in a row that were not elevated, from its last elevation on."""

    def add(self, sentinels: Mapping[str, float]) -> str:
        """What has become elevated in this step, in words; empty where nothing has."""
        signs = []
        for one in ELEVATIONS:
            value = sentinels.get(one.sentinel)
            if value is None:
                continue
            past = self._past.setdefault(one.sentinel, deque(maxlen=WINDOW))
            if len(past) >= FEWEST and not value <= (limit := one.limit(past)):
                if self._calm.get(one.sentinel, CALM) >= CALM:
                    signs.append(f"{one.sentinel} is {value:.4g}, over {limit:.3g}")
                self._calm[one.sentinel] = 0
            else:
                self._calm[one.sentinel] = self._calm.get(one.sentinel, CALM) + 1
            if math.isfinite(value):
                past.append(value)
        return ", ".join(signs)
