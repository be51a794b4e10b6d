"""A small real training job with the probe on it, until told to end; run by training.py.

    python train_job.py RUN FOLDER [--resume] [--clock-back SECONDS]

It trains until FOLDER/stop exists and keeps the number of finished steps in FOLDER/steps. When the precision
of its layer changes it notes {"step", "precision"} in FOLDER/switches. Settings come from the environment.
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
    options = parser.parse_args()
    if options.clock_back:
        true_time, true_time_ns = time.time, time.time_ns
        time.time = lambda: true_time() - options.clock_back
        time.time_ns = lambda: true_time_ns() - int(options.clock_back * 1e9)
    torch.manual_seed(0)
    model = nn.Sequential(Switched(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8scope.attach(model, optimizer, run=options.run, every=1, resume=options.resume,
                         remote_control=True) as scope:
        train(model, optimizer, scope, options.folder)


def train(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, scope: fp8scope.Scope, folder: Path
) -> None:
    layer = model[0]
    assert isinstance(layer, Switched)
    before, step = layer.precision, 0
    while not (folder / "stop").exists():
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
        time.sleep(0.01)


if __name__ == "__main__":
    main()
