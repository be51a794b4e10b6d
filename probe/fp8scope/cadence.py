"""The cadence: how many steps lie between two full measurements.

It begins as asked for and changes for two reasons, each time with an event that says why:

- *Budget.* Where measuring takes a larger share of the job's time than `budget`, `every` doubles until it
  does not, at most to LONGEST times what was asked for. It halves again where half of it would take no more
  than ROOM of the budget. It never lengthens while the collector reports an alert on the run.
- *Elevated sentinels* (elevation.py). The next `close_steps` steps are all measured; then it goes back.

Decided from merged numbers alone, so every rank decides the same at step n, and applies it at the boundary
before step n + 2, as it does commands.
"""

from dataclasses import dataclass

from fp8scope.budget import FEWEST, Costs
from fp8scope.elevation import Elevations
from fp8scope.timer import StepTime

LONGEST = 64
ROOM = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A new cadence, and why."""

    every: int
    why: str


class Cadence:
    """One per attach and rank; sees every merged step, in order."""

    def __init__(
        self, every: int, *, detail_every: int = 1, budget: float | None = None, close_steps: int = 0
    ) -> None:
        self.asked = every
        self.every = every
        """What was decided last."""
        self.overhead: float | None = None
        """Share of the job's time that measuring at this cadence takes; None while that cannot be said."""
        self._budget = budget
        self._close_steps = close_steps
        self._usual = every
        """What the budget allows."""
        self._close_until: int | None = None
        self._costs = Costs(detail_every=detail_every)
        self._elevations = Elevations()
        self._judged = 0
        """Sampled steps at the last change for the budget's sake."""

    def judge(self, step: int, time: StepTime, sentinels: dict[str, float], *, alert: bool) -> Change | None:
        """What the next merged step changes. `alert`: the collector holds a layer of the run out of FP8."""
        self._costs.add(time)
        self.overhead = self._costs.overhead(self.every)
        sign = self._elevations.add(sentinels)
        if sign and self._close_steps and self._usual > 1:
            self._close_until = step + self._close_steps
            return self._change(1, f"for {self._close_steps} steps: {sign}")
        if self._close_until is not None:
            if step < self._close_until:
                return None
            self._close_until = None
            return self._change(self._usual, f"after {self._close_steps} steps without a further sign")
        return self._spend(alert=alert)

    def _spend(self, *, alert: bool) -> Change | None:
        """Lengthens or shortens the cadence to what the budget allows."""
        budget, before = self._budget, self._usual
        if budget is None or self.overhead is None or self._costs.sampled_steps < self._judged + FEWEST:
            return None
        longest = LONGEST * self.asked
        if self.overhead > budget and not alert:
            while self._usual < longest and self._would_take(self._usual) > budget:
                self._usual *= 2
        elif before > self.asked and self._would_take(before // 2) <= ROOM * budget:
            self._usual //= 2
        if self._usual == before:
            return None
        self._judged = self._costs.sampled_steps
        limit = ", the longest it goes" if self._usual == longest else ""
        return self._change(self._usual, (
            f"{self._would_take(before):.2%} of the job's time at every {before} and "
            f"{self._would_take(self._usual):.2%} at every {self._usual}{limit}; the budget is {budget:.2%}: "
            f"{self._costs}"))

    def _would_take(self, every: int) -> float:
        return self._costs.overhead(every) or 0.0

    def _change(self, every: int, why: str) -> Change | None:
        """None where it was so already: a further sign in a close look only makes it longer."""
        before, self.every = self.every, every
        return None if every == before else Change(every=every, why=f"every {before} -> {every}, {why}")
