"""What the probe costs a training step that is in a CUDA graph, off cadence and measured, on one GPU.

    python benchmarks/cuda_graphs.py [--quick] [--json] [--layers 12] [--width 2048] [--tokens 16384]

A captured kernel that finds its flag at 0 still starts and ends, so a graph with a probe is longer in every
step. Twelve residual blocks of a GELU mlp and two projections (48 linears), BF16, forward, backward and a
capturable AdamW in one graph. The graphs without and with a probe are replayed in alternating blocks;
figures are medians of GPU time a replay, boundaries of steps (`scope.step`) included, and their ratio.
"""

import argparse
import json
import platform
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from fp8scope.scope import Scope
from fp8scope.sums import StepRecord
from fp8scope.testing import MemoryWorker

WARM_UP = 3


class Block(nn.Module):
    """Four linears."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.mix, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(gelu(self.mix(self.norms[0](x))))
        y: Tensor = x + self.down(gelu(self.up(self.norms[1](x))))
        return y


class Dropped(MemoryWorker):
    """A worker that keeps nothing and waits for nothing."""

    def submit(self, record: StepRecord) -> None:
        """Nobody reads it."""


def captured(options: argparse.Namespace, every: int) -> Callable[[], None]:
    """A step in a graph; every = 0: without a probe."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(Block(options.width) for _ in range(options.layers))).bfloat16()
        x = torch.randn(options.tokens, options.width, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    scope = None
    if every:
        scope = Scope(model, (optimizer,), worker=Dropped(), every=every, detail_every=2**20, start_step=1)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            optimizer.zero_grad()
            step()
            if scope is not None:
                scope.step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()
        if scope is not None:
            scope.step()

    return replay


def timed(step: Callable[[], None], steps: int) -> float:
    """Milliseconds of GPU time a step."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / steps


def compared(options: argparse.Namespace, every: int) -> dict[str, float]:
    """Medians without and with a probe, in alternating blocks."""
    steps = {"bare": captured(options, 0), "probed": captured(options, every)}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(4 if options.quick else 10):
        for name, step in steps.items():
            time = timed(step, 10)
            if index:  # the first block warms up
                found[name].append(time)
    bare, probed = (statistics.median(times) for times in found.values())
    return {"bare ms": bare, "probed ms": probed, "ratio": probed / bare}


def main() -> int:
    parser = argparse.ArgumentParser(description="What the probe costs a step in a CUDA graph.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    results = {name: compared(options, every)
               for name, every in (("off cadence", 2**20), ("every 10th", 10), ("every step", 1))}
    for name, numbers in results.items():
        print(f"{name:12}", {key: round(value, 4) for key, value in numbers.items()})
    if options.json:
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.machine()}"
        print(json.dumps({"benchmark": "cuda_graphs", "machine": machine, "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
