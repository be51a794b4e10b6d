"""Does FP8 lose anything against BF16? Paired seeds, held-out loss, and recipes that must be rejected.

    python benchmarks/parity.py [--quick] [--json] [--results parity.jsonl] [--limit-s 480]
    python benchmarks/parity.py --part 1/4 --results parity.jsonl       (and 2/4, 3/4, 4/4 beside it)
    python benchmarks/parity.py --summary parity.jsonl

Each seed trains the reference (BF16 linears, fp32 moments) and, from the same weights on the same data:

    fp8              FP8 linears, fp32 moments
    fp8 states       FP8 linears, E4M3 moments
    e5m2             a sabotage: every operand of the linears in E5M2 tiles
    wgrad 2 bits     a sabotage: the weight gradient of the linears rounded to -amax, 0, amax
    perturbed bf16   the reference with one weight moved by 1e-3: how far two equal recipes end apart

Told of each: the mean over the seeds of (its held-out loss - the reference's) / the reference's, in percent,
with its 95 % interval (Student's t); as trained, and `in BF16`: of the same weights with all products in
BF16, which leaves out what rounding does to this one forward. `within` where all of the interval is below
0.25 %, else `worse` where all of it is above 0, else `undecided`: more seeds would tell. The procedure is
sound if both sabotages are `worse`; a run of it that does not see them says nothing of FP8 either. It ends
with 1 if all runs are there and it is not sound, or fp8 or fp8 states is not `within` as trained; fewer than
five seeds or 1,000 steps never pass.

Five seeds and 1,000 steps: a decoder of 6 M parameters on a GPU, of 0.36 M on a CPU (half a minute a run).
Finished runs are kept in --results, a line each, and not done again; none begins that would not be done
within --limit-s. --part 1/4 does every 4th of all runs, recipe by recipe; processes may share one file.
--quick: 0.36 M parameters, 40 steps and two seeds, too little to tell.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8scope import backend
from fp8scope.quantize import dequantize
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.formats import E5M2
from fp8scope_trainer.data import Corpus, standard_library
from fp8scope_trainer.decoder import DecoderConfig
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.paired import Curve, Numbers, Schedule, mean_and_half_width, trained
from fp8scope_trainer.processes import joined
from fp8scope_trainer.proxy import MODEL

MARGIN = 0.25
"""Percent."""
STEPS, SEEDS = 1000, 5
ON_GPU = DecoderConfig(width=384, layers=4, heads=6, kv_heads=2, head_width=64, hidden=1024, context=256)
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
        return dequantize(backend.quantize_tiles(x.contiguous(), E5M2)).to(x.dtype)
    return x.bfloat16().to(x.dtype)


class SabotagedLinear(nn.Linear):
    """Takes the place of an `Fp8Linear` and its weight."""

    kind: Kind
    precision: Precision = "fp8"

    def set_precision(self, precision: Precision) -> None:
        """bf16, for good."""
        self.precision, self.kind = precision, "wgrad 2 bits"  # whose forward is that of BF16

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


REFERENCE = "bf16"
IN_BF16 = ", in BF16"
"""Of a recipe's name: its weights, evaluated in BF16."""
RECIPES: dict[str, Numbers] = {
    REFERENCE: Numbers(precision="bf16"),
    "fp8": Numbers(precision="fp8"),
    "fp8 states": Numbers(precision="fp8", states="fp8"),
    "e5m2": Numbers(precision="bf16", change=sabotage("e5m2")),
    "wgrad 2 bits": Numbers(precision="bf16", change=sabotage("wgrad 2 bits")),
    "perturbed bf16": Numbers(precision="bf16", change=perturb),
}
"""The reference first, then in the order of their weight."""
MUST_PASS = ("fp8", "fp8 states")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run, and all that its loss depends on."""

    recipe: str
    seed: int
    steps: int
    batch: int
    width: int
    machine: str


Losses = dict[Run, float]
"""Held-out."""


def wanted(seeds: list[int], **same: Any) -> list[Run]:
    """All runs, recipe by recipe."""
    return [Run(recipe=name, seed=seed, **same) for name in RECIPES for seed in seeds]


def read(paths: Iterable[Path]) -> Losses:
    """The finished runs that files hold."""
    lines = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return {Run(**line["run"]): line["held_out"] for line in lines}


def completed(
    runs: list[Run], path: Path | None, limit_s: float, do: Callable[[Run], dict[str, float]]
) -> Losses:
    """What `path` holds, and those of `runs` that are missing there and fit into the time. do: its losses, by
    name."""
    losses: Losses = {} if path is None else read([path])
    started, longest = time.perf_counter(), 0.0
    for run in runs:
        begun = time.perf_counter()
        if run in losses or begun - started + longest > limit_s:
            continue
        found = do(run)
        losses |= {replace(run, recipe=name): loss for name, loss in found.items()}
        longest = max(longest, time.perf_counter() - begun)
        print(f"seed {run.seed}  {run.recipe:<15} held-out {losses[run]:.5f}  "
              f"{time.perf_counter() - begun:.0f} s", flush=True)
        if path is not None:
            with path.open("a") as file:
                file.write("".join(
                    json.dumps({"run": asdict(run) | {"recipe": name}, "held_out": loss}) + "\n"
                    for name, loss in found.items()))
    return losses


def judged(losses: Losses) -> dict[str, dict[str, Any]]:
    """Of each recipe what the module says; runs without their reference are left out."""
    found = {}
    for name in (one + form for one in list(RECIPES)[1:] for form in ("", IN_BF16)):
        percents = [100 * (loss / losses[base] - 1) for run, loss in losses.items()
                    if run.recipe == name and (base := replace(run, recipe=REFERENCE)) in losses]
        if not percents:
            continue
        mean, half = mean_and_half_width(percents)
        word = "within" if mean + half < MARGIN else "worse" if mean - half > 0 else "undecided"
        found[name] = {"seeds": len(percents), "mean_percent": round(mean, 4), "verdict": word,
                       "half_width_95": round(half, 4) if math.isfinite(half) else None,
                       "percents": [round(one, 4) for one in percents]}
    return found


def held_out(
    run: Run, config: DecoderConfig, lr: float, corpus: Corpus[Tensor], device: torch.device
) -> dict[str, float]:
    """Trains. The losses, as trained and with the weights in BF16, by name."""
    last, schedule = Curve(), Schedule(steps=run.steps, batch=run.batch, lr=lr, warmup_steps=run.steps // 10,
                                       held_out_batches=64)
    for curve in trained(config, RECIPES[run.recipe], schedule, corpus, seed=run.seed, device=device):
        last = curve
    return {run.recipe: last.held_out, run.recipe + IN_BF16: last.in_bf16}


def done_here(options: argparse.Namespace) -> tuple[Losses, bool]:
    """The runs that are there after those of this process, and whether none is missing."""
    with joined(1) as world:
        large = world.device.type == "cuda" and not options.quick
        config = ON_GPU if large else MODEL
        machine = torch.cuda.get_device_name() if world.device.type == "cuda" else platform.machine()
        runs = wanted(options.seeds, steps=options.steps, batch=16 if large else 8, width=config.width,
                      machine=machine)
        corpus, lr = standard_library(limit=20_000_000), 3e-4 if large else 5e-4
        part, parts = options.part
        losses = completed(runs[part - 1 :: parts], options.results, options.limit_s,
                           lambda run: held_out(run, config, lr, corpus, world.device))
        if options.results is not None:
            losses |= read([options.results])
    told = {replace(run, recipe=run.recipe + form) for run in runs for form in ("", IN_BF16)}
    complete = all(run in losses for run in runs) and len(options.seeds) >= SEEDS and options.steps >= STEPS
    return {run: loss for run, loss in losses.items() if run in told}, complete


def merged(paths: list[Path]) -> tuple[Losses, bool]:
    """The runs that files hold, which must be of one comparison, and whether they are enough of them."""
    losses = read(paths)
    if len({replace(run, recipe="", seed=0) for run in losses}) > 1:
        raise SystemExit("the files hold runs of several comparisons: other steps, models or machines")
    pairs = {name: sum(run.recipe == name for run in losses) for name in (REFERENCE, *MUST_PASS)}
    return losses, all(number >= SEEDS for number in pairs.values()) and all(
        run.steps >= STEPS for run in losses)


def main() -> int:
    """Prints one line a run, then one a recipe."""
    options = parsed()
    losses, complete = merged(options.summary) if options.summary else done_here(options)
    found = judged(losses)
    for name, one in found.items():
        print(f"{name:<24} {one['mean_percent']:+.4f} % +- {one['half_width_95']}  {one['verdict']} "
              f"({one['seeds']} seeds)")
    sound = all(found.get(name, {}).get("verdict") == "worse" for name in SABOTAGES)
    passed = sound and complete and all(found.get(name, {}).get("verdict") == "within" for name in MUST_PASS)
    print(f"{'sound' if sound else 'NOT sound: a sabotage was not rejected'}; "
          f"{'passed' if passed else 'not passed'}{'' if complete else ': too few seeds or steps'}")
    if options.json:
        print(json.dumps({"benchmark": "parity", "complete": complete, "sound": sound, "results": found,
                          "runs": [asdict(run) | {"held_out": loss} for run, loss in losses.items()]}))
    return 0 if passed or not complete or options.quick else 1


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, 40 steps, two seeds")
    add("--json", action="store_true", help="print a summary as the last line")
    add("--seeds", type=int, nargs="+", help=f"(0 to {SEEDS - 1}; 0 and 1 with --quick)")
    add("--steps", type=int, help=f"of each run ({STEPS}; 40 with --quick)")
    add("--part", type=_part, default=(1, 1), help="1/4: every 4th of the runs, from the first on (1/1)")
    add("--results", type=Path, help="file that finished runs are kept in, a line each")
    add("--summary", type=Path, nargs="+", help="run nothing; judge the runs in these files")
    add("--limit-s", type=float, default=480.0, help="no run begins that would end after this (480)")
    given = parser.parse_args()
    given.seeds = given.seeds or list(range(2 if given.quick else SEEDS))
    given.steps = given.steps or (40 if given.quick else STEPS)
    return given


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N")
    return int(part), int(parts)


if __name__ == "__main__":
    sys.exit(main())
