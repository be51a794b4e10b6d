"""A whole training step on one GPU: FP8 and quantized states against compiled BF16.

    python benchmarks/train.py [--quick] [--json] [--preset billion] [--limit-s 260] [--profile FILE]

The 1.33 B decoder on bytes of the standard library, 8 sequences of 2,048: forward, loss, backward, clipping
by the global norm, optimizer. Weights are fp32 under FSDP2 on one rank, gathered in BF16. Each job is built
from the same seed and reads the same data.

    bf16                 nn.Linear, layers under torch.compile, torch's fused AdamW: the yardstick
    block                Fp8Linear, layers under torch.compile, torch's fused AdamW
    block, fp8 states    with our AdamW, moments in E4M3, clipped while the step reads
    and so on            with wgrad's activation in blocks; with one scale a tensor, current and delayed
    probe                with the probe as `fp8scope train` attaches it: every 10th step, no limit
    not compiled         the same without torch.compile

The loss of a step is read while the next one runs, so that the host is ahead of the device; a step ends
when the device is through with it. tokens/s is from the median step, with the probe from the mean of ten or
twenty, every tenth of which is measured; memory is the most that torch had allocated; `estimate` is the
estimator's figure for it; MFU is against the dense BF16 peak. A job that fails says why and does not stop the
others; one that would begin after --limit-s seconds is left out and named. --profile writes for each job as
JSON which 40 kernels take most of the device's time in two further steps, and how much all of them take.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.profiler import profile

import fp8scope
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
EVERY = 10
"""Steps between two that the probe measures; the first is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One row of the table."""

    name: str
    fp8: bool
    compiled: bool
    states: str = ""
    """Of our AdamW; empty for torch's fused one."""
    recipe: Recipe = field(default_factory=Recipe)
    probe: bool = False


BLOCKS, TENSOR = Recipe(wgrad_activation="block"), Recipe(scaling="tensorwise")
DELAYED = Recipe(scaling="tensorwise", policy="delayed")
JOBS = (
    Job(name="bf16", fp8=False, compiled=True),
    Job(name="block", fp8=True, compiled=True),
    Job(name="block, fp8 states", fp8=True, compiled=True, states="fp8"),
    Job(name="wgrad in blocks, fp8 states", fp8=True, compiled=True, states="fp8", recipe=BLOCKS),
    Job(name="tensorwise, fp8 states", fp8=True, compiled=True, states="fp8", recipe=TENSOR),
    Job(name="delayed, fp8 states", fp8=True, compiled=True, states="fp8", recipe=DELAYED),
    Job(name="tensorwise, probe", fp8=True, compiled=True, states="fp8", recipe=TENSOR, probe=True),
    Job(name="block, probe", fp8=True, compiled=True, states="fp8", probe=True),
    Job(name="block, not compiled", fp8=True, compiled=False),
    Job(name="bf16, not compiled", fp8=False, compiled=False),
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


def observed(
    job: Job, model: nn.Module, optimizer: Optimizer, folder: str
) -> AbstractContextManager[fp8scope.Scope | None]:
    """The probe, spooling into `folder`; nothing for jobs without."""
    if not job.probe:
        return nullcontext()
    return fp8scope.attach(model, optimizer, run="train", every=EVERY, budget=None, collector="offline",
                           spool=Path(folder))


def steps(
    model: nn.Module, optimizer: Optimizer, corpus: Corpus[Text], config: DecoderConfig, batch: int,
    device: torch.device,
) -> Iterator[tuple[float, float]]:
    """Endless steps: seconds from the end of the one before to its own, and the loss."""
    step, reading, ended = 0, None, time.perf_counter()
    while True:
        tokens, targets = (sent(one, device) for one in
                           batch_at(corpus.train, step=step, batch=batch, length=config.context))
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        if isinstance(optimizer, AdamW):
            optimizer.clip_gradients(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        advance_histories(model)
        if reading is not None:
            found = reading()
            yield time.perf_counter() - ended, found
            ended = time.perf_counter()
        reading = read_later(loss.detach())
        step += 1


def sent(x: Tensor, device: torch.device) -> Tensor:
    """x on the device, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def read_later(loss: Tensor) -> Callable[[], float]:
    """Copies the loss when the device is there; the call waits for that, and for nothing that comes later."""
    if not loss.is_cuda:
        return loss.item
    copy = torch.empty((), pin_memory=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copy.copy_(loss, non_blocking=True)
    event.record()

    def found() -> float:
        event.synchronize()
        return copy.item()

    return found


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
    with TemporaryDirectory() as folder, observed(job, model, optimizer, folder):
        for _ in range(WARM_UP + EVERY * job.probe):  # the second measured step is the first without detail
            next(running)
        warmed = time.perf_counter() - started
        rounds = rounds if not job.probe else -(-rounds // EVERY) * EVERY
        seconds, losses = zip(*(next(running) for _ in range(rounds)), strict=True)
        profiles = {"profile": kernels(running)} if profiled else {}
    step_s = statistics.mean(seconds) if job.probe else statistics.median(seconds)
    speed = batch * config.context / step_s
    used = mfu(speed, flops_per_token(config), device_peak(device))
    plan = Plan(states=job.states or "fp32", precision="fp8" if job.fp8 else "bf16",
                tokens=batch * config.context)
    return {
        "tokens_per_second": round(speed), "step_ms": round(1e3 * step_s, 1),
        "step_ms_min": round(1e3 * min(seconds), 1), "step_ms_max": round(1e3 * max(seconds), 1),
        "mfu": None if used is None else round(used, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None,
        "estimate_gb": round(estimate(size_of(config), plan).bytes_per_gpu / 1e9, 2),
        "loss": round(losses[-1], 4), "build_and_warm_up_s": round(warmed, 1),
    } | profiles


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
    parser.add_argument("--limit-s", type=float, default=260.0, help="no job begins after this")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write each job's longest kernels to it")
    parser.add_argument("--jobs", nargs="+", metavar="NAME", help="these and the yardstick alone")
    options = parser.parse_args()
    if not torch.cuda.is_available() and options.preset != "demo":
        print("benchmarks/train.py needs a CUDA device; --preset demo runs on a CPU", file=sys.stderr)
        return CANNOT_RUN
    config, started = SHAPES[options.preset](), time.perf_counter()
    results: dict[str, dict[str, Any]] = {}
    profiles: dict[str, Any] = {}
    longest = 0.0
    wanted = [job for job in JOBS if not options.jobs or job is JOBS[0] or job.name in options.jobs]
    with joined(1) as world:
        for job in wanted:
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
