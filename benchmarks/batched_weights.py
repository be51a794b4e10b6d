"""What the weights of a measured step cost: together, beside one by one and beside one read of their bytes.

    python benchmarks/batched_weights.py [--quick] [--json]

BF16 weights in E4M3 with [128,128] blocks, as in a step that is not detailed. For 48 matrices of 2048 x 2048
and for 400 of 256 x 256, which may lie in the L2 cache:

    together      backend.round_trips: one launch and one that merges, with the tables of earlier calls
    new tables    the same where an address has changed, so that tables are made anew
    one by one    backend.round_trip for each
    one read      torch.linalg.vector_norm of as many bytes at once

us is time on the device, with the host far enough ahead that no launch is waited for; host us the time until
the last launch is queued. Needs a GPU of compute capability 8.9.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8scope.backend import round_trip, round_trips, runs_kernels
from fp8scope.batch import Trip
from fp8scope.sums import SumTables
from fp8scope_protocol.formats import E4M3

CASES = {"48 of 2048 x 2048": (48, 2048), "400 of 256 x 256": (400, 256)}
SCALING = "block 128x128"
CYCLES = 80_000_000
"""The GPU sleeps for them, some 40 ms, while the host queues a part."""


def measured(call: Callable[[], object], times: int) -> dict[str, float]:
    """Medians of time on the device and of the host's."""
    found: list[tuple[float, float]] = []
    call()  # compiles
    for _ in range(times):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        end.record()
        torch.cuda.synchronize()
        found.append((begin.elapsed_time(end) * 1e3, host * 1e6))
    device, hosts = zip(*found, strict=True)
    return {"us": statistics.median(device), "host us": statistics.median(hosts)}


def compare(count: int, width: int, times: int) -> dict[str, dict[str, float]]:
    """Every way of reading `count` matrices of width x width."""
    flat = 0.02 * torch.randn(count * width * width, device="cuda", dtype=torch.bfloat16)
    weights: list[Tensor] = list(flat.view(count, width, width).unbind(0))
    rows = SumTables.zeros(count, "cuda")
    trips = [Trip(x, E4M3, SCALING, rows.row(i)) for i, x in enumerate(weights)]
    plans: dict[Any, Any] = {}

    def one_by_one() -> None:
        for trip in trips:
            round_trip(trip.x, E4M3, SCALING, histogram=False, out=trip.row)

    ways: dict[str, Callable[[], object]] = {
        "together": lambda: round_trips(trips, histogram=False, plans=plans),
        "new tables": lambda: round_trips(trips, histogram=False, plans={}),
        "one by one": one_by_one,
        "one read": lambda: torch.linalg.vector_norm(flat, dtype=torch.float32),
    }
    found = {name: measured(way, times) for name, way in ways.items()}
    for numbers in found.values():
        numbers["of one read"] = numbers["us"] / found["one read"]["us"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="What the weights of a measured step cost.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    options = parser.parse_args()
    if not torch.cuda.is_available() or not runs_kernels(torch.zeros(1, device="cuda"), E4M3):
        print("batched_weights: needs a GPU of compute capability 8.9 and Triton", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, (count, width) in CASES.items():
        results[name] = compare(count, width, 10 if options.quick else 50)
        print(name)
        for way, numbers in results[name].items():
            print(f"  {way:10}", {key: round(value, 2) for key, value in numbers.items()})
    if options.json:
        print(json.dumps({
            "benchmark": "batched_weights", "results": results,
            "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.machine()}"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
