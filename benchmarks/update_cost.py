"""What the numbers about an optimizer's step cost, each apart, beside the optimizer's own step.

    python benchmarks/update_cost.py [--quick] [--json] [--layers 12] [--width 2048]

The parameters of probe_overhead.py (48 linears, BF16, fused AdamW) with given gradients, no forward pass.
On a GPU, for each part: its time on the device, with the host far enough ahead that no launch is waited for;
the host's time; and the memory that it takes at most beyond what was there. Elsewhere host time alone.

    gradients    the norm of all gradients: sampled steps and, between them, one in four
    torch norm   the same by torch._foreach_norm, for comparison; the probe does without
    twins        every step: exact moments of the sample move on
    before       sampled steps: the sample of weights is kept
    after        sampled steps: the step is read from moments and weights
    detailed     twins of a detailed step: the stored moments' step beside the exact one
    take         every step: the sentinels go to the host
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from fp8scope.layers import parameter_places
from fp8scope.rows import Rows
from fp8scope.sentinels import Sentinels
from fp8scope.squares import squares
from fp8scope.twins import Twins
from fp8scope.updates import Samples, Updates
from fp8scope.watch import Watch

CYCLES = 40_000_000
"""The GPU sleeps for them, some 20 ms, while the host queues a part."""


class Parts:
    """A job without a forward pass, and what of the probe reads its optimizer."""

    def __init__(self, layers: int, width: int, device: torch.device) -> None:
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
        norms = [(width,)] * (2 * layers)
        self.model = nn.ParameterList(
            nn.Parameter(0.02 * torch.randn(shape, device=device, dtype=torch.bfloat16))
            for shape in (*shapes, *norms))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.watch = Watch(Rows(device), recipes=(), rank=0, world=1)
        self.sentinels = Sentinels(device, world=1)
        places = parameter_places(self.model)
        self.updates = Updates(self.watch, Samples(self.watch, places), self.sentinels)
        self.twins = Twins(self.watch, places)

    def step(self, timed: Callable[[str, Callable[[], object]], None], *, sampling: bool,
             detailed: bool = False) -> None:
        """One step of the optimizer and of the probe, each part through `timed`."""
        self.watch.begin(sampling=sampling, detailed=detailed)
        twins = "detailed" if detailed else "twins"
        if sampling:
            timed("before", lambda: self.updates.before(self.optimizer))
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            timed("gradients", lambda: self.sentinels.read_gradients(self.optimizer, sampled=True))
            timed("torch norm", lambda: squares(gradients))
        timed(twins, lambda: self.twins.before(self.optimizer, ready=True))
        timed("optimizer", self.optimizer.step)
        self.sentinels.after_step(self.optimizer)
        if sampling:
            timed("after", lambda: self.updates.after(self.optimizer))
        self.twins.after(self.optimizer)
        timed("take", self.sentinels.take)
        self.watch.rows.collect()


class Meter:
    """Collects what parts take."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: dict[str, list[dict[str, float]]] = {}

    @torch.no_grad()
    def __call__(self, name: str, part: Callable[[], object]) -> None:
        if self.device.type != "cuda":
            start = time.perf_counter()
            part()
            self.found.setdefault(name, []).append({"host us": (time.perf_counter() - start) * 1e6})
            return
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        start = time.perf_counter()
        part()
        host = time.perf_counter() - start
        end.record()
        torch.cuda.synchronize()
        self.found.setdefault(name, []).append({
            "us": begin.elapsed_time(end) * 1e3, "host us": host * 1e6,
            "MB at most": (torch.cuda.max_memory_allocated() - before) / 1e6})

    def results(self) -> dict[str, dict[str, float]]:
        """Medians of each part, and its time over that of the optimizer's step."""
        out = {name: {key: statistics.median(one[key] for one in many) for key in many[0]}
               for name, many in self.found.items()}
        unit = "us" if self.device.type == "cuda" else "host us"
        for numbers in out.values():
            numbers["of the optimizer's step"] = numbers[unit] / out["optimizer"][unit]
        return out


def measure(parts: Parts, meter: Meter, times: int) -> None:
    """So many steps of each kind."""
    for _ in range(times):
        for sampling, detailed in ((False, False), (True, False), (True, True)):
            parts.step(meter, sampling=sampling, detailed=detailed)


def main() -> int:
    parser = argparse.ArgumentParser(description="What the numbers about an optimizer's step cost.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    parts = Parts(options.layers, options.width, device)
    measure(parts, Meter(device), 1)  # compiles, and opens rows and twins
    meter = Meter(device)
    measure(parts, meter, 3 if options.quick else 10)
    results = meter.results()
    count = sum(parameter.numel() for parameter in parts.model.parameters())
    print(f"{count / 1e6:.0f} M parameters, twins {parts.twins.bytes / 1e6:.1f} MB, "
          f"{parts.twins.bytes / count:.4f} bytes a parameter")
    for name, numbers in results.items():
        print(f"{name:10}", {key: round(value, 3) for key, value in numbers.items()})
    if options.json:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        results["twins"]["bytes"] = parts.twins.bytes
        print(json.dumps({"benchmark": "update_cost", "results": results,
                          "machine": f"{where}, torch {torch.__version__}, {platform.machine()}"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
