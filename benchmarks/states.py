"""Do moments in few bits train as fp32 moments do, over the same number of steps?

    python benchmarks/states.py [--quick] [--json] [--states int8 fp8 int4] [--results F] [--limit-s 440]
    python benchmarks/states.py --summary int8.jsonl fp8.jsonl int4.jsonl

A decoder on bytes of the standard library, its linears in TF32 (fp32 on a CPU), AdamW over 5 / (1 - beta2)
steps, at least 1,000: with fp32 moments and, from the same weights on the same data, with those of --states.
Told of each, and what decides (int4 is told and decides nothing):

    held-out loss   less that of the fp32 run                                              within +-0.015
    direct          ||u|| / ||u'|| over all weights of the layers: u is what the step did to them, u' what
                    exact fp32 moments that were fed the same gradients would have done    within 0.95 to 1.05
    probe           `update_norm_ratio` as the probe reports it, mean over elements        within 0.95 to 1.05
    fallen          one weight [64, 4096], gradients of noise: for 5 / (1 - beta2) steps, then as long with
                    those of half of each block (half), or of all (whole), a tenth as large: the median
                    over the fallen of sqrt(v) as stored over the exact one                within 0.95 to 1.05

direct and probe are means over the last fifth of 50 measured steps: what rounding does to v builds up slowly.
The span beside direct is that of all of them. A GPU adds in no fixed order, so two fp32 runs differ, too:
where the files hold several of one seed, their mean is the reference and the span of their losses is told.
With several --seeds everything is the mean over them.

Finished runs are kept in --results, a line each, and not done again; none begins that would not be done
within --limit-s. Processes with other --states may share one file. --quick: the tiny preset and 40 steps,
too few to tell.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8scope
from fp8scope.spool import adopt
from fp8scope_protocol.wire import decode_batch, is_missing
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.data import Corpus, batch_at, standard_library
from fp8scope_trainer.decoder import Decoder, DecoderConfig
from fp8scope_trainer.moments import decode, slots
from fp8scope_trainer.paired import Schedule, mean_and_half_width
from fp8scope_trainer.rules import ADAMW
from fp8scope_trainer.state_block import FORMATS
from fp8scope_trainer.state_format import StateFormat

REFERENCE = "fp32"
LOSS_LIMIT, RATIO_LIMIT = 0.015, 0.05
DECIDES = ("int8", "fp8")
LEAST_STEPS = 1000
SAMPLES = 50
"""Measured steps of a run."""
FALLEN = (64, 4096)
CLIP = 3.0
"""Largest |u|, `AdamW`'s default; the exact step gets it, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model, and how it is trained."""

    model: DecoderConfig
    batch: int
    lr: float


PRESETS = {
    "tiny": Preset(batch=2, lr=2e-3, model=DecoderConfig(
        width=128, layers=1, heads=2, kv_heads=1, head_width=64, hidden=128, context=32)),
    "small": Preset(batch=8, lr=5e-4, model=DecoderConfig(
        width=1024, layers=3, heads=16, kv_heads=8, head_width=64, hidden=2048, context=256)),
}
"""`small`: 29 M parameters, in rows of 1,024 and 2,048, so that blocks of INT8 are whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run."""

    preset: str
    states: str
    beta2: float
    steps: int
    seed: int
    machine: str


@dataclass(slots=True)
class Exact:
    """fp32 moments of some parameters, beside those that an optimizer keeps."""

    parameters: list[Tensor]
    beta2: float
    m: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.m, self.v = ([torch.zeros_like(one) for one in self.parameters] for _ in range(2))

    def feed(self, factor: Tensor) -> None:
        """A step's gradients, each times `factor` []."""
        gradients = torch._foreach_mul([one.grad for one in self.parameters if one.grad is not None], factor)
        torch._foreach_lerp_(self.m, gradients, 1 - 0.9)
        torch._foreach_mul_(self.v, self.beta2)
        torch._foreach_addcmul_(self.v, gradients, gradients, 1 - self.beta2)

    def compared(self, before: list[Tensor], step: int, lr: float, decay: float) -> tuple[float, float]:
        """(||u|| / ||u'||, ||u - u'|| / ||u'||) of step `step` >= 1, given the weights before it."""
        sums = torch.zeros(3, dtype=torch.float64, device=before[0].device)
        for weight, was, m, v in zip(self.parameters, before, self.m, self.v, strict=True):
            got = (was.double() * (1 - lr * decay) - weight.detach().double()) / lr
            root = v.double().sqrt() / math.sqrt(1 - self.beta2**step)
            exact = (m.double() / (1 - 0.9**step) / (root + 1e-8)).clamp(-CLIP, CLIP)
            sums += torch.stack([one.square().sum() for one in (got, exact, got - exact)])
        got2, exact2, missed2 = sums.tolist()
        return math.sqrt(got2 / exact2), math.sqrt(missed2 / exact2)


def trained(job: Job, corpus: Corpus[Tensor], device: torch.device) -> dict[str, Any]:
    """Figures of one run."""
    preset, every = PRESETS[job.preset], max(1, job.steps // SAMPLES)
    schedule = Schedule(steps=job.steps, batch=preset.batch, lr=preset.lr, warmup_steps=job.steps // 20,
                        held_out_batches=64)
    torch.manual_seed(job.seed)
    model = Decoder(preset.model).to(device)
    optimizer = AdamW(parameter_groups(model, states=job.states), betas=(0.9, job.beta2), seed=job.seed)
    exact = Exact([p for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2],
                  job.beta2)
    found: list[tuple[float, float]] = []
    half_way = 0.0
    with (tempfile.TemporaryDirectory() as folder,
          fp8scope.attach(model, optimizer, run="states", every=every, detail_every=1, budget=None,
                          collector="offline", spool=Path(folder)) as scope):
        for step in range(job.steps):
            measured = step % every == 0
            if step == job.steps // 2:
                half_way = time.perf_counter()
            before = [one.detach().clone() for one in exact.parameters] if measured else []
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr_at(step)
            loss, factor = gradients_of(model, optimizer, corpus.train, step, job, schedule, device)
            exact.feed(factor)
            optimizer.step()
            if measured:
                found.append(exact.compared(before, step + 1, schedule.lr_at(step), 0.1))
            optimizer.zero_grad()
            scope.step(step, loss=loss)
        seconds = time.perf_counter() - half_way
        scope.close()
        last = max(1, len(found) // 5)
        probe = reported(Path(folder), first_step=every * (len(found) - last))
    ratios, errors = zip(*found, strict=True)
    return {
        "held_out": held_out(model, corpus, schedule, device), "probe": probe,
        "direct": {"ratio": fmean(ratios[-last:]), "min": min(ratios), "max": max(ratios),
                   "error": fmean(errors[-last:])},
        "s_per_step": seconds / (job.steps - job.steps // 2),
    }


def gradients_of(
    model: Decoder, optimizer: AdamW, text: Tensor, step: int, job: Job, schedule: Schedule,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Forward and backward: the loss, and what the optimizer will multiply each gradient by."""
    loss = loss_of(model, text, step, schedule.batch, job.seed, device)
    torch.autograd.backward(loss)
    optimizer.clip_gradients(schedule.clip)
    assert optimizer.grad_scale is not None
    return loss.detach(), optimizer.grad_scale.reciprocal()


@torch.no_grad()
def held_out(model: Decoder, corpus: Corpus[Tensor], schedule: Schedule, device: torch.device) -> float:
    """Mean loss on text that is never trained on."""
    model.eval()
    return fmean(loss_of(model, corpus.held_out, step, schedule.batch, 0, device).item()
                 for step in range(schedule.held_out_batches))


def loss_of(
    model: Decoder, text: Tensor, step: int, batch: int, seed: int, device: torch.device
) -> Tensor:
    """Cross entropy of a step's sequences."""
    tokens, targets = (one.to(device) for one in batch_at(
        text, step=step, batch=batch, length=model.config.context, seed=seed))
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def reported(folder: Path, *, first_step: int) -> dict[str, float] | None:
    """The probe's `update_norm_ratio` from `first_step` on, and the series farthest from 1; None if it has
    none, as of fp32 moments."""
    sums: dict[int, list[tuple[float, int]]] = {}
    for spool in adopt(folder, "states", limit=2**40):
        while (record := spool.peek()) is not None:
            batch = decode_batch(record.payload)
            ratios = batch.arrays.get("update_norm_ratio")
            if ratios is not None and batch.header.step >= first_step:
                for i in (~is_missing(ratios[0])).nonzero()[0].tolist():
                    one = ratios[0][i].item(), int(batch.arrays["elements"][0, i])
                    sums.setdefault(i, []).append(one)
            spool.ack(record)
        spool.close()
    if not sums:
        return None
    means = [fmean(ratio for ratio, _ in one) for one in sums.values()]
    elements = [max(count for _, count in one) for one in sums.values()]
    mean = sum(a * b for a, b in zip(means, elements, strict=True)) / sum(elements)
    return {"ratio": mean, "min": min(means), "max": max(means), "series": len(means)}


@torch.no_grad()
def fallen(states: str, beta2: float, steps: int, device: torch.device, *, half: bool) -> float:
    """The median of sqrt(v) over the exact one, see the module."""
    generator = torch.Generator(device).manual_seed(0)
    weight = nn.Parameter(torch.zeros(FALLEN, device=device))
    optimizer = AdamW([weight], lr=1e-3, betas=(0.9, beta2), states=states, weight_decay=0.0)
    factor, exact = torch.ones(FALLEN, device=device), torch.zeros(FALLEN, device=device)
    falls = torch.ones(FALLEN, dtype=torch.bool, device=device)
    if half:
        falls[:, ::2] = False
    for step in range(2 * steps):
        if step == steps:
            factor[falls] = 0.1
        weight.grad = torch.randn(FALLEN, generator=generator, device=device).mul_(factor)
        exact.mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
        optimizer.step()
    square = decode(slots(optimizer.state[weight], ADAMW), StateFormat.of(states), FALLEN[1]).square
    assert square is not None
    return float((square[falls] / exact[falls]).sqrt().median())


def measured(job: Job, corpus: Corpus[Tensor], device: torch.device) -> dict[str, Any]:
    """Everything that is told of one run."""
    began = time.perf_counter()
    found: dict[str, Any] = {}
    if job.states != REFERENCE:
        steps = min(job.steps, round(5 / (1 - job.beta2)))
        found["fallen"] = {name: fallen(job.states, job.beta2, steps, device, half=name == "half")
                           for name in ("half", "whole")}
    found |= trained(job, corpus, device)
    return found | {"seconds": time.perf_counter() - began}


def read(paths: Iterable[Path]) -> list[tuple[Job, dict[str, Any]]]:
    """The finished runs that files hold."""
    lines = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return [(Job(**line["job"]), line["found"]) for line in lines]


def judged(runs: list[tuple[Job, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the module says of each job that has a reference, over its seeds."""
    references: dict[Job, list[float]] = defaultdict(list)
    pairs: dict[Job, list[tuple[Job, dict[str, Any]]]] = defaultdict(list)
    for job, found in runs:
        if job.states == REFERENCE:
            references[job].append(found["held_out"])
    for job, found in runs:
        if job.states != REFERENCE and replace(job, states=REFERENCE) in references:
            pairs[replace(job, seed=0)].append((job, found))
    return [_verdict(some, [references[replace(job, states=REFERENCE)] for job, _ in some])
            for some in pairs.values()]


def _verdict(pairs: list[tuple[Job, dict[str, Any]]], references: list[list[float]]) -> dict[str, Any]:
    """Of one job: each seed's run, and the losses of its fp32 runs."""
    several = [found for _, found in pairs]
    mean, half = mean_and_half_width([found["held_out"] - fmean(losses)
                                      for found, losses in zip(several, references, strict=True)])
    each = [{"direct": found["direct"]["ratio"],
             "probe": math.nan if found["probe"] is None else found["probe"]["ratio"],
             **{f"fallen_{name}": one for name, one in found["fallen"].items()}} for found in several]
    ratios = {name: fmean(one[name] for one in each) for name in each[0]}
    outside = [name for name, one in ratios.items() if not abs(one - 1) <= RATIO_LIMIT]
    if not abs(mean) <= LOSS_LIMIT:
        outside.insert(0, "loss")
    return asdict(pairs[0][0]) | {
        "seed": [job.seed for job, _ in pairs], "held_out": fmean(found["held_out"] for found in several),
        "difference": mean, "half_width_95": half if math.isfinite(half) else None,
        "span_of_references": max(max(one) - min(one) for one in references),
        "references": sum(map(len, references)), "ratios": ratios, "outside": outside, "details": several}


def line(one: dict[str, Any]) -> str:
    """A verdict."""
    ratios = "  ".join(f"{name.replace('_', ' ')} {ratio:.4f}" for name, ratio in one["ratios"].items())
    direct = [found["direct"] for found in one["details"]]
    half = "" if one["half_width_95"] is None else f" +- {one['half_width_95']:.4f}"
    word = f"NOT within: {', '.join(one['outside'])}" if one["outside"] else "within"
    shape = f"{one['states']:<6} beta2 {one['beta2']:<6} {one['steps']} steps, {len(direct)} seeds"
    loss = (f"held-out {one['held_out']:.4f} ({one['difference']:+.4f}{half} against fp32, whose runs of a "
            f"seed span {one['span_of_references']:.4f})")
    more = (f"(direct {min(d['min'] for d in direct):.3f} to {max(d['max'] for d in direct):.3f}, "
            f"error {fmean(d['error'] for d in direct):.3f})")
    return "  ".join((shape, loss, ratios, more, word))


def wanted(options: argparse.Namespace, machine: str) -> list[Job]:
    """The runs that were asked for, short ones first."""
    jobs = []
    for beta2 in sorted(options.beta2):
        steps = options.steps or max(LEAST_STEPS, round(5 / (1 - beta2)))
        for states in dict.fromkeys((REFERENCE, *options.states)):
            jobs += [Job(preset=options.preset, states=states, beta2=beta2, steps=steps, seed=seed,
                         machine=machine) for seed in options.seeds]
    return jobs


def completed(
    jobs: list[Job], path: Path | None, limit_s: float, device: torch.device
) -> list[tuple[Job, dict[str, Any]]]:
    """Does what is missing in `path` as far as the time allows; all runs that are there then."""
    started, runs = time.perf_counter(), [] if path is None else read([path])
    corpus, s_per_step = standard_library(limit=20_000_000), 0.0
    for job in jobs:
        if job in [one for one, _ in runs]:
            continue
        if time.perf_counter() - started + 1.1 * job.steps * s_per_step > limit_s:
            print(f"{job.states:<6} beta2 {job.beta2:<6} seed {job.seed}  left out: would end too late",
                  flush=True)
            continue
        found = measured(job, corpus, device)
        s_per_step = found["s_per_step"]
        runs.append((job, found))
        print(f"{job.states:<6} beta2 {job.beta2:<6} seed {job.seed}  held-out {found['held_out']:.4f}  "
              f"{found['seconds']:.0f} s, {1e3 * found['s_per_step']:.1f} ms a step", flush=True)
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps({"job": asdict(job), "found": found}) + "\n")
    return runs


def main() -> int:
    """Prints a line a run, then a verdict each."""
    options = parsed()
    if options.summary:
        runs, missing = read(options.summary), False
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
        jobs = wanted(options, machine)
        runs = completed(jobs, options.results, options.limit_s, device)
        missing = not {*jobs} <= {job for job, _ in runs}
    verdicts = judged(runs)
    for one in verdicts:
        print(line(one))
    if options.json:
        print(json.dumps({"benchmark": "states", "machine": runs[0][0].machine if runs else "",
                          "torch": torch.__version__, "complete": not missing, "results": verdicts}))
    failed = any(one["outside"] for one in verdicts if one["states"] in DECIDES)
    return 1 if failed and not options.quick else 0


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="the tiny preset, 40 steps, beta2 0.95")
    add("--json", action="store_true", help="print a summary as the last line")
    add("--results", type=Path, help="file that finished runs are kept in, a line each")
    add("--summary", type=Path, nargs="+", help="run nothing; judge the runs in these files")
    add("--limit-s", type=float, default=440.0, help="no run begins that would end after this (440)")
    add("--states", nargs="+", choices=FORMATS, default=["int8", "fp8", "int4"], help="besides fp32")
    add("--beta2", nargs="+", type=float, default=[0.95, 0.999])
    add("--seeds", nargs="+", type=int, default=[0])
    add("--preset", choices=PRESETS, default="small")
    add("--steps", type=int, help=f"of each run (5 / (1 - beta2), at least {LEAST_STEPS})")
    given = parser.parse_args()
    if given.quick:
        given.preset, given.steps, given.beta2 = "tiny", given.steps or 40, [0.95]
    return given


if __name__ == "__main__":
    sys.exit(main())
