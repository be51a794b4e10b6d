"""How near is the round trip to one read of the tensor?

    python benchmarks/stats_kernel.py [--quick] [--json]

Times `round_trip` of E4M3 under tile scales, of x and of x.t(), with and without the exponent histogram, next
to `torch.linalg.vector_norm` (one read), a device copy, and the plain-torch reference. The share of read
bandwidth is the time of `vector_norm` over that of the round trip.

Then quantization: codes as FP8 layers make them, of x and of x.t(), codes with the sums of the round trip,
and the kernels for tensors of any layout. What sums add is codes with sums over codes alone.

A graph run replays one CUDA graph over 2 GiB of distinct tensors, so nothing is found in the L2 cache and the
host does not matter. An eager run is `triton.testing.do_bench`, allocations and launches included.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from fp8scope import backend, quantize_kernel, roundtrip
from fp8scope.sums import RowSums
from fp8scope_protocol.formats import E4M3

SHAPES = [(8192, 4096), (16384, 8192), (32768, 16384)]
GRAPH_BYTES = 2**31
SCALING = "tile 1x128"
CODES, CODES_AND_SUMS = "codes", "codes and sums"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One function on one bf16 tensor: medians, and the share of read bandwidth in a graph."""

    megabytes: int
    name: str
    graph_us: float | None
    eager_us: float
    share_of_read: float | None


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Median time of one of `calls`, replayed in a row from a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    times: list[float] = []
    for _ in range(7):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * float(start.elapsed_time(end)) / len(calls))
    return sorted(times)[3]


def eager_us(function: Callable[[], object], quick: bool) -> float:
    return 1e3 * float(do_bench(function, warmup=20, rep=50 if quick else 200, return_mode="median"))


def functions(row: RowSums, target: Tensor) -> dict[str, Callable[[Tensor], object]]:
    """What is timed, by name; each takes x."""
    trip = partial(backend.round_trip, element=E4M3, scaling=SCALING, out=row)
    return {
        "vector_norm": torch.linalg.vector_norm,
        "copy": target.copy_,
        "round_trip, no histogram": partial(trip, histogram=False),
        "round_trip of x.t(), no histogram": lambda x: trip(x.t(), histogram=False),
        "round_trip": trip,
        "round_trip of x.t()": lambda x: trip(x.t()),
        CODES: partial(backend.quantize_tiles, element=E4M3),
        "codes of x.t()": lambda x: backend.quantize_tiles(x.t(), E4M3),
        CODES_AND_SUMS: partial(backend.quantize_tiles, element=E4M3, out=row),
        "codes, quantize_kernel": partial(quantize_kernel.quantize_tiles, element=E4M3),
        "codes of x.t(), quantize_kernel": lambda x: quantize_kernel.quantize_tiles(x.t(), E4M3),
    }


def times(shape: tuple[int, int], quick: bool) -> list[Timing]:
    """Every function on bf16 of `shape`; plain torch on the smallest, and eager (it copies from the host)."""
    size = shape[0] * shape[1] * 2
    tensors = [(torch.randn(shape, device="cuda") * 0.02).to(torch.bfloat16)
               for _ in range(max(2, GRAPH_BYTES // size))]
    x, found, read_us = tensors[0], [], 0.0
    for name, function in functions(RowSums.zeros("cuda"), torch.empty_like(tensors[0])).items():
        eager = eager_us(partial(function, x), quick)
        graph = graph_us([partial(function, one) for one in tensors])
        read_us = read_us or graph
        found.append(Timing(megabytes=size >> 20, name=name, graph_us=graph, eager_us=eager,
                            share_of_read=read_us / graph))
    if shape == SHAPES[0]:
        eager = eager_us(lambda: roundtrip.round_trip(x, E4M3, SCALING, out=RowSums.zeros("cuda")), quick)
        found.append(Timing(megabytes=size >> 20, name="round_trip, plain torch", graph_us=None,
                            eager_us=eager, share_of_read=None))
    return found


def show(found: list[Timing]) -> None:
    print(f"{'MiB':>5} {'':34} {'graph us':>9} {'of read':>8} {'eager us':>9}")
    for one in found:
        graph = "" if one.graph_us is None else f"{one.graph_us:.1f}"
        share = "" if one.share_of_read is None else f"{one.share_of_read:.0%}"
        print(f"{one.megabytes:5} {one.name:34} {graph:>9} {share:>8} {one.eager_us:9.1f}")
    for size, added in sums_added(found).items():
        print(f"{size:5} sums add {added:.0%} to codes alone")


def sums_added(found: list[Timing]) -> dict[int, float]:
    """By MiB, what sums add to the time of quantization."""
    times = {(one.megabytes, one.name): one.graph_us for one in found}
    return {size: (times[size, CODES_AND_SUMS] or 0.0) / (times[size, CODES] or 1.0) - 1.0
            for size in dict.fromkeys(one.megabytes for one in found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64 and 256 MiB, without 1 GiB")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("stats_kernel: needs a CUDA device of compute capability 8.9 or more", file=sys.stderr)
        return 2
    shapes = SHAPES[:2] if arguments.quick else SHAPES
    found = [one for shape in shapes for one in times(shape, arguments.quick)]
    show(found)
    if arguments.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                   "triton": triton.__version__}
        results = {"times": [asdict(one) for one in found], "sums added": sums_added(found)}
        print(json.dumps({"benchmark": "stats_kernel", "machine": machine, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
