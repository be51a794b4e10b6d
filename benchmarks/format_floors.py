"""What does each format cost a healthy tensor, in each scaling?

    python benchmarks/format_floors.py [--quick] [--json]

A Gaussian and a heavy-tailed tensor (Student's t, 3 degrees) of 1,024 x 4,096 through the reference round
trip: SQNR beside the catalogue's floor, underflow, saturation, and blocks whose largest value saturates.
"""

import argparse
import json
import platform
from typing import Any

import torch
from torch import Tensor

from fp8scope.derive import derive
from fp8scope.quantize import quantize
from fp8scope.roundtrip import round_trip
from fp8scope.sums import SumTables
from fp8scope_protocol.formats import FORMATS, parse_scaling, sqnr_floor_db
from fp8scope_protocol.series import Layout, Series

SHAPE = (1024, 4096)
GROUPS = ("tile 1x128", "block 128x128", "rowwise", "tensorwise", "flat 256")
MX = ("mx 1x32 floor", "mx 1x32 rceil")


def sources(shape: tuple[int, int]) -> dict[str, Tensor]:
    """The same tensors in every run."""
    torch.manual_seed(0)
    return {"gaussian": torch.randn(shape), "t(3)": torch.distributions.StudentT(3.0).sample(shape)}


def measure(x: Tensor, format: str, scaling: str) -> dict[str, float]:
    """Metrics of one round trip, and the share of blocks whose largest is beyond the largest code."""
    element, groups = FORMATS[format], parse_scaling(scaling)
    row = round_trip(x, element, scaling)
    tables = SumTables(counts=row.counts[None], sums=row.sums[None], maxes=row.maxes[None],
                       histogram=row.histogram[None])
    series = Series(name="x", role="activation", format=format, scaling=scaling)
    found = derive(tables, Layout(series=(series,)))
    numbers = {key: found[key][0].item() for key in ("sqnr_db", "underflow_ratio", "saturation_ratio")}
    numbers["floor_db"] = sqnr_floor_db(element, groups)
    if groups.e8m0:
        scales = quantize(x, element, scaling).scales
        amax = x.view(len(x), -1, 32).abs().amax(dim=-1)
        numbers["saturated_block_ratio"] = (amax > element.largest * scales).double().mean().item()
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows")
    parser.add_argument("--json", action="store_true", help="results as JSON on the last line")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    print(f"{'tensor':9} {'format':6} {'scaling':14} {'SQNR dB':>8} {'floor':>6} {'underflow':>10} "
          f"{'saturated':>10}")
    for name, x in sources((SHAPE[0] // 8, SHAPE[1]) if options.quick else SHAPE).items():
        for format in ("e4m3", "e5m2", "int8", "int4", "mxfp8"):
            for scaling in MX if format == "mxfp8" else GROUPS:
                numbers = measure(x, format, scaling)
                results[f"{name} {format} {scaling}"] = numbers
                blocks = numbers.get("saturated_block_ratio")
                print(f"{name:9} {format:6} {scaling:14} {numbers['sqnr_db']:8.2f} "
                      f"{numbers['floor_db']:6.2f} {numbers['underflow_ratio']:10.2%} "
                      f"{numbers['saturation_ratio']:10.2%}"
                      + (f"  of {blocks:.1%} of the blocks the largest" if blocks else ""))
    if options.json:
        machine = f"{platform.processor() or platform.machine()}, torch {torch.__version__}"
        print(json.dumps({"benchmark": "format_floors", "machine": machine, "results": results}))


if __name__ == "__main__":
    main()
