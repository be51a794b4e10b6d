"""What does a heat map cost as a palette PNG, and what as JSON?

    python benchmarks/heatmap.py [--quick] [--json]

A matrix of random ratios over six decades, drawn at 1,000 x 500 pixels: palette indices, worst-of-pixel
reduction, PNG. Beside it, in the same run, what a page would need to draw the same matrix itself: all values
as JSON. Medians in milliseconds; sizes in kilobytes.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from fp8scope_protocol.metrics import METRICS
from fp8scope_server.picture import Canvas, draw, encode_png
from fp8scope_server.scale import indices, scale_of

SIZES = {"500 series x 1,000 samples": (1000, 500), "500 series x 10,000 samples": (10_000, 500),
         "3,000 series x 3,000 samples": (3000, 3000)}


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of `work`, after one call that does not count."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def measure(samples: int, series: int, repeats: int) -> dict[str, float]:
    """Times and sizes for one matrix."""
    values = 10 ** np.random.default_rng(0).uniform(-6, 0, (samples, series))
    metric = METRICS["underflow_ratio"]
    missing = np.zeros(values.shape, dtype=np.bool_)
    steps = np.arange(samples) * 10
    canvas = Canvas(width=1000, height=500, first=0, last=int(steps[-1]) + 9)

    def to_indices() -> npt.NDArray[np.uint8]:
        return indices(metric, values, missing, scale_of(metric, values))

    cells = to_indices()
    pixels = draw(cells, steps, canvas, hold=10)
    exact = values.astype(np.float32)
    result = {
        "indices_ms": milliseconds(to_indices, repeats),
        "draw_ms": milliseconds(lambda: draw(cells, steps, canvas, hold=10), repeats),
        "png_ms": milliseconds(lambda: encode_png(pixels, "dark"), repeats),
        "json_ms": milliseconds(lambda: msgspec.json.encode(exact.tolist()), max(1, repeats // 4)),
        "png_kb": len(encode_png(pixels, "dark")) / 1000,
        "json_kb": len(msgspec.json.encode(exact.tolist())) / 1000,
    }
    picture = result["indices_ms"] + result["draw_ms"] + result["png_ms"]
    return result | {"json_over_picture": result["json_ms"] / picture}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest matrix only, few repeats")
    parser.add_argument("--json", action="store_true", help="results as JSON on the last line")
    options = parser.parse_args()
    sizes = dict(list(SIZES.items())[:1]) if options.quick else SIZES
    results = {name: measure(*size, repeats=4 if options.quick else 12) for name, size in sizes.items()}
    for name, numbers in results.items():
        print(name)
        for key, number in numbers.items():
            print(f"  {key:20} {number:10.1f}")
    if options.json:
        machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
        print(json.dumps({"benchmark": "heatmap", "machine": machine, "results": results}))


if __name__ == "__main__":
    main()
