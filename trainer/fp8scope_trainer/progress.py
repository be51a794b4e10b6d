"""How a training run shows itself: a bar on a terminal, lines elsewhere, a summary at the end."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fp8scope_trainer.throughput import mfu

LINE_EVERY = 10
"""Steps between two plain lines."""


class Speed(NamedTuple):
    """Since the run began."""

    tokens_per_second: float
    mfu: float | None
    """Share of the devices' peak, see `throughput`; None where the peak is not known."""
    memory_bytes: int | None
    """Most that a GPU has had allocated; None on a CPU."""

    def __str__(self) -> str:
        share = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
        memory = "" if self.memory_bytes is None else f"  {self.memory_bytes / 1e9:.1f} GB"
        return f"{self.tokens_per_second:,.0f} tokens/s{share}{memory}"


class Display(Protocol):
    """Shown a step at a time."""

    def __call__(self, step: int, loss: float, speed: Speed) -> None: ...


@dataclass(slots=True)
class Record:
    """What happened, step by step."""

    tokens_per_step: int
    flops_per_token: float = 0.0
    peak_tflops: float | None = None
    """Of one device; None if it is not known."""
    devices: int = 1
    memory_bytes: int | None = None
    losses: list[float] = field(default_factory=list)
    precision_changes: list[dict[str, Any]] = field(default_factory=list)
    """Each with the first step that ran in the new precision."""
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    """None before the first step is done."""
    _precisions: dict[str, str] = field(default_factory=dict)

    def add(self, loss: float, memory_bytes: int | None = None) -> Speed:
        """Notes a step; returns the speed so far."""
        self.losses.append(loss)
        self.ended, self.memory_bytes = time.perf_counter(), memory_bytes
        return self.speed

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return 0.0 if self.ended is None else self.ended - self.started

    @property
    def speed(self) -> Speed:
        """Over all steps."""
        rate = len(self.losses) * self.tokens_per_step / max(self.seconds, 1e-9)
        used = mfu(rate, self.flops_per_token, self.peak_tflops, devices=self.devices)
        return Speed(rate, used, self.memory_bytes)

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
        speed = self.speed
        return {
            "steps": len(self.losses),
            "loss": {"first": shown[0] if shown else None, "last": shown[-1] if shown else None,
                     "min": round(min(finite), 6) if finite else None,
                     "nonfinite": len(self.losses) - len(finite)},
            "losses": shown,
            "seconds_per_step": round(self.seconds / max(len(shown), 1), 4),
            "tokens_per_second": round(speed.tokens_per_second, 1),
            "mfu": None if speed.mfu is None else round(speed.mfu, 4),
            "peak_memory_bytes": speed.memory_bytes,
            "precision_changes": self.precision_changes,
        }


@contextmanager
def display(steps: int, *, rank: int) -> Iterator[Display]:
    """Rank 0 shows a bar if standard error is a terminal, else lines; other ranks show nothing."""
    if rank != 0:
        yield lambda step, loss, speed: None
    elif sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task("train", total=steps, loss=math.nan, speed="")
            yield lambda step, loss, speed: bar.update(task, completed=step + 1, loss=loss, speed=str(speed))
    else:
        yield lambda step, loss, speed: _line(step, steps, loss, speed)


def print_summary(summary: dict[str, Any]) -> None:
    """One line of strict JSON."""
    print(json.dumps(summary, allow_nan=False), flush=True)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"), TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(), console=Console(stderr=True),
    )


def _line(step: int, steps: int, loss: float, speed: Speed) -> None:
    if step % LINE_EVERY == 0 or step == steps - 1:
        print(f"step {step:>5}  loss {loss:.4f}  {speed}", file=sys.stderr, flush=True)
