"""How a training run shows itself: a bar on a terminal, lines elsewhere, a summary at the end."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 10
"""Steps between two plain lines."""


class Display(Protocol):
    """Shown a step at a time."""

    def __call__(self, step: int, loss: float, tokens_per_second: float) -> None: ...


@dataclass(slots=True)
class Record:
    """What happened, step by step."""

    tokens_per_step: int
    losses: list[float] = field(default_factory=list)
    precision_changes: list[dict[str, Any]] = field(default_factory=list)
    """Each with the first step that ran in the new precision."""
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    _precisions: dict[str, str] = field(default_factory=dict)

    def add(self, loss: float) -> float:
        """Notes a step; returns tokens per second so far."""
        self.losses.append(loss)
        self.ended = time.perf_counter()
        return len(self.losses) * self.tokens_per_step / max(self.ended - self.started, 1e-9)

    def note_precision(self, step: int, precisions: dict[str, str]) -> None:
        """Keeps what differs from the step before."""
        for module, precision in precisions.items():
            if self._precisions.get(module, precision) != precision:
                self.precision_changes.append({"step": step, "module": module, "precision": precision})
        self._precisions = precisions

    def summary(self) -> dict[str, Any]:
        """For `--json`. A loss that is not finite is null: JSON has no NaN."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        shown = [round(loss, 6) if math.isfinite(loss) else None for loss in self.losses]
        seconds = self.ended - self.started
        return {
            "steps": len(self.losses),
            "loss": {"first": shown[0] if shown else None, "last": shown[-1] if shown else None,
                     "min": round(min(finite), 6) if finite else None,
                     "nonfinite": len(self.losses) - len(finite)},
            "losses": shown,
            "seconds_per_step": round(seconds / max(len(shown), 1), 4),
            "tokens_per_second": round(len(shown) * self.tokens_per_step / max(seconds, 1e-9), 1),
            "precision_changes": self.precision_changes,
        }


@contextmanager
def display(steps: int, *, rank: int) -> Iterator[Display]:
    """Rank 0 shows a bar if standard error is a terminal, else lines; other ranks show nothing."""
    if rank != 0:
        yield lambda step, loss, tokens_per_second: None
    elif sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task("train", total=steps, loss=math.nan, speed=0.0)
            yield lambda step, loss, tokens_per_second: bar.update(
                task, completed=step + 1, loss=loss, speed=tokens_per_second)
    else:
        yield lambda step, loss, tokens_per_second: _line(step, steps, loss, tokens_per_second)


def print_summary(summary: dict[str, Any]) -> None:
    """One line of strict JSON."""
    print(json.dumps(summary, allow_nan=False), flush=True)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"), TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(), console=Console(stderr=True),
    )


def _line(step: int, steps: int, loss: float, tokens_per_second: float) -> None:
    if step % LINE_EVERY == 0 or step == steps - 1:
        text = f"step {step:>5}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        print(text, file=sys.stderr, flush=True)
