"""When does a frozen amax history show, and what does it do to the training?

    python benchmarks/drill.py [--quick] [--json]

The frozen-amax drill on the demo model in one process, beside a BF16 twin: same weights, data and growing
gain. Per block part and seed: steps from the fault to the first value over each published limit of the hurt
layer's activation, and the mean loss of FP8 less that of the twin, from the end of the growth to the release
and over the last ten steps. By default the history is released at step 75 of 110.
"""

import argparse
import json
import platform
import sys
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8scope.gemm import WgradSample
from fp8scope.quantize import Quantized, dequantize, quantize_blocks, quantize_tiles
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.data import standard_library
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.options import TrainOptions, parse
from fp8scope_trainer.processes import World
from fp8scope_trainer.train import batch, build, set_lr, train_step

LIMITS = {"saturation_ratio": 1e-3, "distortion": 5e-3, "gemm_error": 0.08}
STEPS = 110


class Meter:
    """A LinearObserver that measures one layer's activation at each step."""

    active = True

    def __init__(self) -> None:
        self.series: dict[str, list[float]] = {name: [] for name in LIMITS}

    def sums(self, role: str, x: Tensor, *, policy: str) -> None:
        """Reads x itself."""

    def tensor(
        self, role: str, orientation: str, x: Tensor, scales: Tensor, *, scaling: str, policy: str,
        power_of_two: bool = False, format: str = "e4m3",
    ) -> None:
        """Of the rowwise activation: saturation and distortion."""
        if (role, orientation) != ("activation", "rowwise"):
            return
        d = dequantize(quantize_tiles(x, E4M3, scales=scales))
        self.series["saturation_ratio"].append((x.abs() > 448 * scales[:, :1]).double().mean().item())
        cosine = F.cosine_similarity(x.double().flatten(), d.double().flatten(), dim=0)
        self.series["distortion"].append(1 - cosine.item())

    def sample(self, x: Tensor, column_scales: Tensor) -> None:
        """Keeps nothing."""

    def wgrad(
        self, dy: Tensor, column_scales: Tensor, sample: WgradSample, *, scaling: str = "tile 1x128",
        format: str = "e4m3",
    ) -> None:
        """Never called: nothing was kept."""

    def gemm(
        self, x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, *,
        scaling: str = "tile 1x128", weight_scaling: str = "block 128x128",
    ) -> None:
        """Of all rows of the output."""
        w: Quantized = quantize_blocks(weight, E4M3, scales=weight_scales)
        exact, y = x @ weight.t(), dequantize(quantize_tiles(x, E4M3, scales=x_scales)) @ dequantize(w).t()
        self.series["gemm_error"].append(((y - exact).norm() / exact.norm()).item())


def drilled(options: TrainOptions) -> tuple[Meter, list[float]]:
    """The run of `options`, unsharded: measurements of the hurt layer, and losses."""
    world = World(rank=0, size=1, device=torch.device("cpu"))
    corpus = standard_library(limit=4_000_000)
    model, _ = build(options, world)
    optimizer = AdamW(parameter_groups(model), lr=options.lr, seed=options.seed)
    assert options.drill is not None
    layer = model.get_submodule(options.drill.layer)
    assert isinstance(layer, Fp8Linear)
    layer.observer = meter = Meter()
    losses = []
    for step in range(options.steps):
        options.drill.before_step(model, step)
        set_lr(optimizer, options.lr * min(1.0, (step + 1) / options.recipe.warmup_steps))
        loss, _ = train_step(model, optimizer, [batch(corpus.train, step, options, world)])
        losses.append(loss.item())
    return meter, losses


def measure(part: str, seed: int) -> dict[str, float | None]:
    """One drill and its twin."""
    arguments = ["--drill", "frozen-amax", "--drill-part", part, "--seed", str(seed), "--steps", str(STEPS),
                 "--batch", "4", "--no-probe"]
    meter, losses = drilled(options := parse(arguments))
    _, twin = drilled(parse([*arguments, "--precision", "bf16"]))
    assert options.drill is not None
    fault, thaw = options.drill.fault_step, options.drill.released_at
    lead = {name: next((step - fault for step, value in enumerate(values)
                        if step >= fault and value > LIMITS[name]), None)
            for name, values in meter.series.items()}
    end_of_growth = fault + options.drill.gain_steps
    frozen = slice(end_of_growth, thaw + 5)
    return lead | {
        "loss_gap_frozen_and_thaw": round(fmean(losses[frozen]) - fmean(twin[frozen]), 4),
        "loss_gap_end": round(fmean(losses[-10:]) - fmean(twin[-10:]), 4),
        "twin_loss_end": round(fmean(twin[-10:]), 4),
    }


def main() -> int:
    """Prints one line a drill."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one part, one seed")
    parser.add_argument("--json", action="store_true", help="print a summary as the last line")
    options = parser.parse_args()
    results = {}
    for part in ("attention",) if options.quick else ("attention", "mlp"):
        for seed in (0,) if options.quick else (0, 1):
            found = results[f"{part}, seed {seed}"] = measure(part, seed)
            print(f"{part:<10} seed {seed}  " + "  ".join(f"{k} {v}" for k, v in found.items()), flush=True)
    if options.json:
        print(json.dumps({"benchmark": "drill", "machine": platform.processor() or platform.machine(),
                          "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
