"""Does FP8 lose anything against BF16? Paired seeds, held-out loss, and recipes that must be rejected.

    python benchmarks/parity.py [--quick] [--json] [--results parity.json] [--limit-s 480]

Each seed trains the reference (BF16 linears, fp32 moments) and, from the same weights on the same data:

    fp8              FP8 linears, fp32 moments
    fp8 states       FP8 linears, E4M3 moments
    perturbed bf16   the reference with one weight moved by 1e-3: how far two equal recipes end apart
    e5m2             a sabotage: every operand of the linears in E5M2 tiles
    wgrad 2 bits     a sabotage: the weight gradient of the linears rounded to -amax, 0, amax

Told of each: the mean over the seeds of (its held-out loss - the reference's) / the reference's, in percent,
with its 95 % interval (Student's t). `worse` where the whole interval is above 0, `within` where all of it is
below 0.1 %, `undecided` otherwise: more seeds would tell. The procedure is sound if both sabotages are
`worse`; a run of it that does not see them says nothing of FP8 either, and ends with 1.

Finished runs are kept in --results and not done again, so a long comparison fits into several calls; none
begins after --limit-s. Five seeds by default; --quick: 0.36 M parameters and 40 steps, too little to tell.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8scope.quantize import dequantize, quantize_tiles
from fp8scope_protocol.formats import E5M2
from fp8scope_trainer.data import standard_library
from fp8scope_trainer.decoder import DecoderConfig
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.paired import Curve, Numbers, Schedule, mean_and_half_width, trained
from fp8scope_trainer.processes import joined
from fp8scope_trainer.proxy import MODEL

MARGIN = 0.1
"""Percent."""
ON_GPU = DecoderConfig(width=512, layers=8, heads=8, kv_heads=4, head_width=64, hidden=1408, context=512)
Kind = Literal["e5m2", "wgrad 2 bits"]
SABOTAGES: tuple[Kind, ...] = ("e5m2", "wgrad 2 bits")


class Sabotaged(torch.autograd.Function):
    """Y [M, N] = X [M, K] W^T, W [N, K], done badly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: Kind) -> Tensor:
        ctx.kind = kind
        x, weight = coarse(x, kind), coarse(weight, kind)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dy = coarse(dy, ctx.kind)
        dw = dy.t() @ x
        if ctx.kind == "wgrad 2 bits":
            largest = dw.abs().amax().clamp(min=1e-30)
            dw = (dw / largest).round() * largest
        return dy @ weight, dw, None


def coarse(x: Tensor, kind: Kind) -> Tensor:
    """x [R, C] after a round trip through E5M2, or rounded to bf16."""
    if kind == "e5m2":
        return dequantize(quantize_tiles(x.contiguous(), E5M2)).to(x.dtype)
    return x.bfloat16().to(x.dtype)


class SabotagedLinear(nn.Linear):
    """Takes the place of an `Fp8Linear` and its weight."""

    kind: Kind

    def forward(self, input: Tensor) -> Tensor:
        x = input.reshape(-1, self.in_features)
        y: Tensor = Sabotaged.apply(x, self.weight, self.kind)  # type: ignore[no-untyped-call]
        return y.view(*input.shape[:-1], self.out_features)


def sabotage(kind: Kind) -> Callable[[nn.Module], None]:
    """Every FP8-able linear of a model becomes a sabotaged one."""
    def change(model: nn.Module) -> None:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, Fp8Linear):
                bad = SabotagedLinear(layer.in_features, layer.out_features, bias=False, device="meta")
                bad.weight, bad.kind = layer.weight, kind
                model.set_submodule(name, bad)
    return change


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """One weight of the first layer is moved by 1e-3."""
    model.get_parameter("layers.0.attention.qkv.weight")[0, 0] += 1e-3


RECIPES: dict[str, Numbers] = {
    "bf16": Numbers(precision="bf16"),
    "fp8": Numbers(precision="fp8"),
    "perturbed bf16": Numbers(precision="bf16", change=perturb),
    "wgrad 2 bits": Numbers(precision="bf16", change=sabotage("wgrad 2 bits")),
    "e5m2": Numbers(precision="bf16", change=sabotage("e5m2")),
    "fp8 states": Numbers(precision="fp8", states="fp8"),
}
"""In the order in which they are run, the reference first."""


def held_out(name: str, seed: int, config: DecoderConfig, schedule: Schedule, device: torch.device) -> float:
    """Of one run."""
    last = Curve()
    corpus = standard_library(limit=20_000_000)
    for curve in trained(config, RECIPES[name], schedule, corpus, seed=seed, device=device):
        last = curve
    return last.held_out


def judged(losses: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """`losses`: recipe -> seed -> held-out loss. Of each recipe what the module says."""
    found = {}
    for name in RECIPES:
        pairs = [(one, losses["bf16"][seed]) for seed, one in losses.get(name, {}).items()
                 if seed in losses.get("bf16", {})]
        if name == "bf16" or not pairs:
            continue
        mean, half = mean_and_half_width([100 * (one - reference) / reference for one, reference in pairs])
        word = "worse" if mean - half > 0 else "within" if mean + half < MARGIN else "undecided"
        found[name] = {"seeds": len(pairs), "mean_percent": round(mean, 4), "verdict": word,
                       "half_width_95": round(half, 4) if len(pairs) > 1 else None}
    return found


def complete(path: Path | None, settings: dict[str, Any], seeds: int, limit_s: float,
             run: Callable[[str, int], float]) -> dict[str, dict[str, float]]:
    """Does what is missing in `path`, seed by seed, until the time is up."""
    losses: dict[str, dict[str, float]] = {name: {} for name in RECIPES}
    if path is not None and path.exists():
        kept = json.loads(path.read_text())
        if kept["settings"] != settings:
            raise SystemExit(f"{path} holds runs of other settings: {kept['settings']}")
        losses |= kept["losses"]
    started = time.perf_counter()
    for seed in range(seeds):
        for name in RECIPES:
            if str(seed) in losses[name] or time.perf_counter() - started > limit_s:
                continue
            losses[name][str(seed)] = run(name, seed)
            print(f"seed {seed}  {name:<15} held-out {losses[name][str(seed)]:.5f}", flush=True)
            if path is not None:
                path.write_text(json.dumps({"settings": settings, "losses": losses}))
    return losses


def main() -> int:
    """Prints one line a run, then one a recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 40 steps, two seeds")
    parser.add_argument("--json", action="store_true", help="print a summary as the last line")
    parser.add_argument("--seeds", type=int, help="pairs (5; 2 with --quick)")
    parser.add_argument("--steps", type=int, help="of each run (400 on a GPU, 150 on a CPU)")
    parser.add_argument("--results", type=Path, help="file that finished runs are kept in")
    parser.add_argument("--limit-s", type=float, default=480.0, help="no run begins after this")
    options = parser.parse_args()
    with joined(1) as world:
        large = world.device.type == "cuda" and not options.quick
        config = ON_GPU if large else MODEL
        steps = options.steps or (40 if options.quick else 400 if large else 150)
        schedule = Schedule(steps=steps, batch=16 if large else 8, lr=1e-3 if large else 2e-3)
        seeds = options.seeds or (2 if options.quick else 5)
        machine = torch.cuda.get_device_name() if world.device.type == "cuda" else platform.machine()
        settings = {"machine": machine, "steps": steps, "batch": schedule.batch, "width": config.width}
        losses = complete(options.results, settings, seeds, options.limit_s,
                          lambda name, seed: held_out(name, seed, config, schedule, world.device))
    found = judged(losses)
    for name, one in found.items():
        print(f"{name:<15} {one['mean_percent']:+.4f} % +- {one['half_width_95']}  {one['verdict']} "
              f"({one['seeds']} seeds)")
    done = all(len(losses[name]) >= seeds for name in RECIPES)
    if options.json:
        print(json.dumps({"benchmark": "parity", "settings": settings, "complete": done, "results": found,
                          "losses": losses}))
    seen = all(found.get(name, {}).get("verdict") == "worse" for name in SABOTAGES)
    return 0 if seen or not done or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
