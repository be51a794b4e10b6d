"""Which tensors of a decoder underflow in FP8, by role, orientation and depth?

    python benchmarks/who_underflows.py [--quick] [--json] [--device cpu] [--steps 200] [--seed 0]

The trainer's decoder in FP8, in situ, on one device (101 M parameters on a GPU; the demo model on a CPU and
with --quick), every tenth step measured in detail and read back from the spool. A figure is the share of
nonzero elements that became zero, weighted by elements, over the last half of the measured steps. Embedding
and head stay in high precision: their figures are what E4M3 would lose. Beside them the median SQNR and its
floor.
"""

import argparse
import json
import platform
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fp8scope
from fp8scope.spool import adopt
from fp8scope_protocol.formats import parse_format, parse_scaling, sqnr_floor_db
from fp8scope_protocol.series import Series, decode_layout
from fp8scope_protocol.wire import decode_batch, is_missing
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.data import standard_library
from fp8scope_trainer.options import TrainOptions, parse
from fp8scope_trainer.processes import StopSignal, World, joined, leave
from fp8scope_trainer.train import build, train

RUN = "who-underflows"
EVERY = 10
BANDS = ("embedding", "1st", "2nd", "3rd", "4th", "head", "all")
"""Columns of the table; 1st to 4th are quarters of the layers."""
WORST = 10


@dataclass(slots=True)
class Tally:
    """What some series lost over some steps."""

    lost: float = 0.0
    elements: int = 0
    sqnr: list[float] = field(default_factory=list)

    def add(self, ratio: float, elements: int, sqnr: float) -> None:
        """One series in one step."""
        self.lost += ratio * elements
        self.elements += elements
        self.sqnr.append(sqnr)

    @property
    def ratio(self) -> float:
        return self.lost / self.elements


def measure(options: TrainOptions, world: World, folder: Path) -> None:
    """Train, and leave what was measured in `folder`."""
    model, _ = build(options, world)
    optimizer = AdamW(parameter_groups(model), lr=options.lr, seed=options.seed)
    corpus = standard_library(limit=None if world.device.type == "cuda" else 4_000_000)
    with fp8scope.attach(model, optimizer, run=RUN, every=EVERY, detail_every=1, budget=None,
                         collector="offline", spool=folder) as scope:
        train(model, optimizer, corpus, scope, options, world, StopSignal())


def tallies(folder: Path, *, first_step: int) -> dict[Series, Tally]:
    """Every series that was measured from `first_step` on."""
    found: defaultdict[Series, Tally] = defaultdict(Tally)
    for spool in adopt(folder, RUN, limit=2**40):
        while (record := spool.peek()) is not None:
            batch = decode_batch(record.payload)
            if batch.header.layout is not None and batch.header.step >= first_step:
                layout, arrays = decode_layout(spool.layouts[batch.header.layout]), batch.arrays
                ratios, sqnr = arrays["underflow_nonzero_ratio"][0], arrays["sqnr_db"][0]
                known = ~(is_missing(ratios) | is_missing(sqnr))
                for i in known.nonzero()[0]:
                    found[layout.series[i]].add(ratios[i].item(), arrays["elements"][0, i].item(),
                                                sqnr[i].item())
            spool.ack(record)
        spool.close()
    return dict(found)


def band(name: str, layers: int) -> str:
    """Where in the decoder a series lies."""
    place = re.match(r"layers\.(\d+)\.", name)
    if place is None:
        return "head" if name.startswith("head") else "embedding"
    return BANDS[1 + int(place[1]) * 4 // layers]


def kind(series: Series) -> tuple[str, str, str, str, str]:
    """What a row of the table stands for."""
    return (series.role, series.orientation, series.format, series.scaling, series.rounding)


def merged(tallies: Iterable[Tally]) -> Tally:
    """One tally of several."""
    total = Tally()
    for one in tallies:
        total.lost += one.lost
        total.elements += one.elements
        total.sqnr += one.sqnr
    return total


def table(found: dict[Series, Tally], layers: int) -> dict[str, dict[str, float]]:
    """Prints it; the same by row."""
    order = {"activation": 0, "gradient": 1, "weight": 2}
    rows = sorted({kind(one) for one in found}, key=lambda row: (order.get(row[0], 3), row))
    print(f"{'role, orientation, scaling; quarters of layers':46}" + "".join(f"{name:>10}" for name in BANDS)
          + f"{'SQNR dB':>9}{'floor':>7}")
    results: dict[str, dict[str, float]] = {}
    for row in rows:
        _, _, element, scaling, rounding = row
        cells: dict[str, float] = {}
        for name in BANDS:
            part = [tally for one, tally in found.items()
                    if kind(one) == row and name in ("all", band(one.name, layers))]
            if part:
                cells[name] = merged(part).ratio
        sqnr = statistics.median(merged(t for one, t in found.items() if kind(one) == row).sqnr)
        floor = sqnr_floor_db(parse_format(element), parse_scaling(scaling), rounding)
        title = ", ".join((*row[:2], scaling)) + (", stochastic" if rounding == "stochastic" else "")
        print(f"{title:46}" + "".join(f"{cells[n]:10.2e}" if n in cells else f"{'':10}" for n in BANDS)
              + f"{sqnr:9.2f}{floor:7.2f}")
        results[title] = cells | {"sqnr_db": sqnr, "floor_db": floor}
    return results


def worst(found: dict[Series, Tally]) -> dict[str, float]:
    """Prints the series that lose most; the same by name."""
    ranked = sorted(found.items(), key=lambda pair: pair[1].ratio, reverse=True)[:WORST]
    results = {f"{one.name} {one.role} {one.orientation}{'' if one.live else ' (what-if)'}": tally.ratio
               for one, tally in ranked}
    for name, ratio in results.items():
        print(f"{ratio:10.2e}  {name}")
    return results


def main() -> int:
    """Prints the table and the worst series."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the demo model, 40 steps")
    parser.add_argument("--json", action="store_true", help="results as JSON on the last line")
    parser.add_argument("--device", help="cpu or cuda (cuda where there is one)")
    parser.add_argument("--steps", type=int, help="optimizer steps (200; 40 with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and rounding (0)")
    given = parser.parse_args()
    cpu = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu")).type == "cpu"
    steps = given.steps or (40 if given.quick else 200)
    preset = "demo" if given.quick or cpu else "hundred_million"
    options = parse(["--preset", preset, "--steps", str(steps), "--seed", str(given.seed)])
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    with (tempfile.TemporaryDirectory() as folder, nullcontext(alone) if cpu else joined(1) as world):
        measure(options, world, Path(folder))
        measured = range(0, steps, EVERY)
        first_step = measured[len(measured) // 2]
        found = tallies(Path(folder), first_step=first_step)
    print(f"\n{preset}, steps {first_step} to {measured[-1]}, every {EVERY}th\n")
    results: dict[str, Any] = {"preset": preset, "steps": steps, "seed": given.seed, "first_step": first_step}
    results |= {"underflow_nonzero_ratio": table(found, options.model.layers)}
    print(f"\nthe {WORST} series that lose most")
    results |= {"worst": worst(found)}
    if given.json:
        machine = torch.cuda.get_device_name() if not cpu else platform.processor() or platform.machine()
        print(json.dumps({"benchmark": "who_underflows", "machine": f"{machine}, torch {torch.__version__}",
                          "results": results}))
    return 0


if __name__ == "__main__":
    leave(main())
