"""A small real training job with the probe on it, until told to end; run by training.py.

    python train_job.py RUN FOLDER [--resume] [--clock-back SECONDS] [--clock-back-at STEP] [--pause SECONDS]

It trains until FOLDER/stop exists and keeps the number of finished steps in FOLDER/steps. When the precision
of its layer changes it notes {"step", "precision"} in FOLDER/switches. Settings come from the environment.
Its clock goes wrong at the start, or before a step.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import fp8scope
from fp8scope_protocol.commands import Precision


class Switched(nn.Linear):
    """Says that it can be switched; what it computes does not matter here."""

    precision: Precision = "fp8"

    def set_precision(self, precision: Precision) -> None:
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--clock-back", type=float, default=0.0)
    parser.add_argument("--clock-back-at", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.01)
    options = parser.parse_args()
    if not options.clock_back_at:
        set_back(options.clock_back)
    torch.manual_seed(0)
    model = nn.Sequential(Switched(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8scope.attach(model, optimizer, run=options.run, every=1, resume=options.resume,
                         remote_control=True) as scope:
        train(model, optimizer, scope, options)


def set_back(seconds: float) -> None:
    """The wall clock, as an administrator or a time server does."""
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() - seconds
    time.time_ns = lambda: true_time_ns() - int(seconds * 1e9)


def train(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, scope: fp8scope.Scope, options: argparse.Namespace
) -> None:
    layer, folder = model[0], options.folder
    assert isinstance(layer, Switched)
    before, step = layer.precision, 0
    while not (folder / "stop").exists():
        if options.clock_back_at and step == options.clock_back_at:
            set_back(options.clock_back)
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scope.step(step, loss=loss.detach())
        step += 1
        if layer.precision != before:
            before = layer.precision
            with (folder / "switches").open("a") as file:
                file.write(json.dumps({"step": step, "precision": before}) + "\n")
        (folder / "steps.new").write_text(str(step))
        (folder / "steps.new").rename(folder / "steps")
        time.sleep(options.pause)


if __name__ == "__main__":
    main()
