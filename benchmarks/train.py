"""A whole training step on one GPU: FP8 and quantized states against compiled BF16.

    python benchmarks/train.py [--quick] [--json] [--preset billion] [--limit-s 200] [--profile FILE]

The 1.33 B decoder on bytes of the standard library, 8 sequences of 2,048: forward, loss, backward, clipping
by the global norm, optimizer, and one wait for the device, as `fp8scope train` does it. Weights are fp32
under FSDP2 on one rank, gathered in BF16. Each job is built from the same seed and reads the same data.

    bf16 compiled              nn.Linear, layers under torch.compile, torch's fused AdamW: the yardstick
    bf16                       the same, not compiled
    fp8 compiled               Fp8Linear, layers under torch.compile, torch's fused AdamW
    tensorwise compiled        the same, one scale a tensor; and with delayed scales
    fp8                        the block recipe, not compiled
    fp8 compiled, fp8 states   with our AdamW, moments in E4M3

tokens/s is from the median step; memory is the most that torch had allocated; `estimate` is the estimator's
figure for it; MFU is against the dense BF16 peak. A job that fails says why and does not stop the others; one
that would begin after --limit-s seconds is left out and named. --profile writes for each job as JSON which 40
kernels take most of the device's time in two further steps, and how much of it all kernels take.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.profiler import profile

from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.data import Corpus, Text, batch_at, standard_library
from fp8scope_trainer.decoder import SHAPES, Decoder, DecoderConfig
from fp8scope_trainer.decoder_size import flops_per_token, size_of
from fp8scope_trainer.estimate import Plan, estimate
from fp8scope_trainer.history import advance_histories
from fp8scope_trainer.processes import joined
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.shard import shard
from fp8scope_trainer.throughput import device_peak, mfu

CANNOT_RUN = 2
LR = 3e-4
WARM_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One row of the table."""

    name: str
    fp8: bool
    compiled: bool
    states: str = ""
    """Of our AdamW; empty for torch's fused one."""
    recipe: Recipe = field(default_factory=Recipe)


JOBS = (
    Job(name="bf16 compiled", fp8=False, compiled=True),
    Job(name="fp8 compiled", fp8=True, compiled=True),
    Job(name="fp8 compiled, fp8 states", fp8=True, compiled=True, states="fp8"),
    Job(name="tensorwise compiled", fp8=True, compiled=True, recipe=Recipe(scaling="tensorwise")),
    Job(name="tensorwise delayed compiled", fp8=True, compiled=True,
        recipe=Recipe(scaling="tensorwise", policy="delayed")),
    Job(name="fp8", fp8=True, compiled=False),
    Job(name="bf16", fp8=False, compiled=False),
)


def built(job: Job, config: DecoderConfig, device: torch.device) -> tuple[nn.Module, Optimizer]:
    """The job's model on `device`, sharded over one rank where that is a GPU, and its optimizer."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = Decoder(config)
    if job.fp8:
        convert(model, Conversion(recipe=job.recipe))
    if job.compiled:
        for layer in model.get_submodule("layers").children():
            layer.compile(dynamic=False)
    if device.type == "cuda":
        shard(model, stage=2, compute=torch.bfloat16)
    groups = parameter_groups(model, states=job.states or "fp32")
    if job.states:
        return model, AdamW(groups, lr=LR)
    plain = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
    return model, torch.optim.AdamW(plain, lr=LR, betas=(0.9, 0.95), fused=True)


def steps(
    model: nn.Module, optimizer: Optimizer, corpus: Corpus[Text], config: DecoderConfig, batch: int,
    device: torch.device,
) -> Iterator[tuple[float, float]]:
    """Endless steps: seconds and loss of each."""
    step = 0
    while True:
        started = time.perf_counter()
        tokens, targets = (one.to(device) for one in
                           batch_at(corpus.train, step=step, batch=batch, length=config.context))
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        advance_histories(model)
        waited = loss.item()
        yield time.perf_counter() - started, waited
        step += 1


def kernels(running: Iterator[object], *, most: int = 40) -> dict[str, Any]:
    """Microseconds on the device of two further steps, of all kernels and of those that take most."""
    with profile() as found:
        for _ in range(2):
            next(running)
    rows = [one for one in found.key_averages()
            if one.device_type != DeviceType.CPU and not getattr(one, "is_user_annotation", False)]
    rows.sort(key=lambda one: -one.self_device_time_total)
    return {
        "device_us": round(sum(one.self_device_time_total for one in rows)),
        "kernels": [{"us": round(one.self_device_time_total, 1), "calls": one.count, "name": one.key}
                    for one in rows[:most]],
    }


def measure(
    job: Job, config: DecoderConfig, batch: int, rounds: int, device: torch.device, *, profiled: bool
) -> dict[str, Any]:
    """Figures of one job."""
    corpus = standard_library(limit=20_000_000)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    model, optimizer = built(job, config, device)
    running = steps(model, optimizer, corpus, config, batch, device)
    for _ in range(WARM_UP):
        next(running)
    warmed = time.perf_counter() - started
    seconds, losses = zip(*(next(running) for _ in range(rounds)), strict=True)
    speed = batch * config.context / statistics.median(seconds)
    used = mfu(speed, flops_per_token(config), device_peak(device))
    plan = Plan(states=job.states or "fp32", precision="fp8" if job.fp8 else "bf16",
                tokens=batch * config.context)
    return {
        "tokens_per_second": round(speed), "step_ms": round(1e3 * statistics.median(seconds), 1),
        "step_ms_min": round(1e3 * min(seconds), 1), "mfu": None if used is None else round(used, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None,
        "estimate_gb": round(estimate(size_of(config), plan).bytes_per_gpu / 1e9, 2),
        "loss": round(losses[-1], 4), "build_and_warm_up_s": round(warmed, 1),
    } | ({"profile": kernels(running)} if profiled else {})


def attempted(
    job: Job, config: DecoderConfig, batch: int, rounds: int, device: torch.device, *, profiled: bool
) -> dict[str, Any]:
    """`measure`, or why it failed. Nothing of the job stays."""
    try:
        return measure(job, config, batch, rounds, device, profiled=profiled)
    except Exception as error:  # the other jobs are still worth their time
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    finally:
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def line(name: str, found: dict[str, Any], base: float | None) -> str:
    """A row of the table."""
    if "tokens_per_second" not in found:
        return f"{name:<28} {found.get('error') or found['left_out']}"
    ratio = f"{found['tokens_per_second'] / base:.3f}" if base else ""
    share = "" if found["mfu"] is None else f"{100 * found['mfu']:.1f} %"
    memory = "" if found["peak_gb"] is None else f"{found['peak_gb']:.1f}"
    return (f"{name:<28} {found['tokens_per_second']:>9,} tokens/s {ratio:>6}  {found['step_ms']:>7.1f} ms  "
            f"MFU {share:>6}  {memory:>6} GB ({found['estimate_gb']:.1f} expected)  loss {found['loss']:.3f}")


def main() -> int:
    """Prints one line a job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="6 steps a job instead of 20")
    parser.add_argument("--json", action="store_true", help="print a summary as the last line")
    parser.add_argument("--preset", choices=SHAPES, default="billion", help="demo also runs on a CPU")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--limit-s", type=float, default=200.0, help="no job begins after this")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write each job's longest kernels to it")
    options = parser.parse_args()
    if not torch.cuda.is_available() and options.preset != "demo":
        print("benchmarks/train.py needs a CUDA device; --preset demo runs on a CPU", file=sys.stderr)
        return CANNOT_RUN
    config, started = SHAPES[options.preset](), time.perf_counter()
    results: dict[str, dict[str, Any]] = {}
    profiles: dict[str, Any] = {}
    longest = 0.0
    with joined(1) as world:
        for job in JOBS:
            begun = time.perf_counter() - started
            if begun + longest / 2 > options.limit_s:
                found = {"left_out": f"{begun:.0f} s had passed"}
            else:
                found = attempted(job, config, options.batch, 6 if options.quick else 20, world.device,
                                  profiled=options.profile is not None)
                longest = max(longest, time.perf_counter() - started - begun)
            if "profile" in found:
                profiles[job.name] = found.pop("profile")
                options.profile.write_text(json.dumps(profiles, indent=1))
            results[job.name] = found
            print(line(job.name, found, results[JOBS[0].name].get("tokens_per_second")), flush=True)
        device = world.device
    if options.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        print(json.dumps({"benchmark": "train", "machine": name, "torch": torch.__version__,
                          "preset": options.preset, "batch": options.batch, "context": config.context,
                          "seconds": round(time.perf_counter() - started, 1), "results": results}))
    return 0 if all("error" not in found for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
