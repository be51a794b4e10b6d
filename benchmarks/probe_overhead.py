"""What the probe costs a training step: its time with and without it, on one GPU or, by torchrun, on more.

    python benchmarks/probe_overhead.py [--quick] [--json] [--hooks | --memory] [--layers 12] [--width 2048]
        [--tokens 16384]

Twelve layers of attention and a GELU mlp (48 linears), d = 2048, 16,384 tokens, BF16, fused AdamW, no head:
the model that TransformerEngine's monitor was timed on. Each case is measured in blocks of steps that
alternate with blocks without a probe, so that clocks and temperature fall on both; a figure is the ratio of
medians. The first step of a case (compilation) is in no figure. `plain torch` computes the statistics that
TransformerEngine logs (underflows, scale range, mse) of the same 144 tensors with torch calls.

`light` steps are those between detailed ones, and the usual mixture of both is computed from what each
takes. Also counted, of detailed steps: waits of the training thread for the GPU (under
`torch.cuda.set_sync_debug_mode("error")`, and by name in a profiler trace), GPU memory per watched tensor,
and the price of a hooked call off cadence beside an empty forward hook.
"""

import argparse
import gc
import json
import logging
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import fp8scope
from fp8scope.quantize import decode, quantize_blocks, quantize_tiles
from fp8scope_protocol.formats import E4M3

SEQUENCE = 2048
HEAD = 128
DETAIL_EVERY = 32  # as `attach` does it unless told otherwise
NEVER = 10**9
ROUNDS = 10
SPEEDS = (
    ("every step, light", 1, NEVER), ("every step, detailed", 1, 1), ("every tenth step, light", 10, NEVER),
    ("off cadence", NEVER, NEVER))
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


class Block(nn.Module):
    """Attention and mlp, four linears."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, d // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, d))
        up: Tensor = self.up(self.norms[1](x))
        down: Tensor = self.down(gelu(up))
        return x + down


class Job:
    """A model, its optimizer and data; `step` trains once."""

    def __init__(self, options: argparse.Namespace, *, fp8: bool = False, sharding: str = "none") -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model: nn.Module = nn.Sequential(*(Block(options.width) for _ in range(options.layers)))
            self.x = torch.randn(max(1, options.tokens // SEQUENCE), SEQUENCE, options.width)
        self.model.bfloat16()
        self.x = self.x.bfloat16()
        if fp8:
            from fp8scope_trainer.convert import convert
            convert(self.model, filter=None)
        self.model = self._shard(sharding)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def _shard(self, sharding: str) -> nn.Module:
        if sharding == "ddp":
            return nn.parallel.DistributedDataParallel(self.model)
        if sharding == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for block in self.model:  # type: ignore[attr-defined]
                fully_shard(block)
            fully_shard(self.model)
        return self.model

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainStatistics:
    """What TransformerEngine's LogFp8TensorStats computes of the operands of a linear, in plain torch."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: list[Tensor] = []
        self.handles = [module.register_forward_hook(self._forward) for module in model.modules()
                        if isinstance(module, nn.Linear)]

    def _forward(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        with torch.no_grad():
            self._measure(args[0], blocks=False)
            self._measure(module.weight, blocks=True)
        output.register_hook(lambda gradient: self._measure(gradient, blocks=False))  # type: ignore[no-untyped-call]

    def _measure(self, x: Tensor, *, blocks: bool) -> None:
        with torch.no_grad():
            x = x.detach().flatten(0, -2)
            quantized = quantize_blocks(x, E4M3) if blocks else quantize_tiles(x, E4M3)
            codes = decode(quantized.codes)
            scales = quantized.scales
            spread = scales.repeat_interleave(128, 1)[:, :x.shape[1]]
            spread = spread.repeat_interleave(128, 0)[:x.shape[0]] if blocks else spread
            lost = torch.count_nonzero((codes == 0) & (x != 0)) / x.numel()
            mse = (codes * spread - x).square().mean()
            self.kept += [lost, mse, 1 / scales.amax(), 1 / scales.amin()]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.kept.clear()


@contextmanager
def probed(job: Job, folder: str, **arguments: Any) -> Iterator[fp8scope.Scope]:
    """The job with a probe that keeps everything on disk."""
    scope = fp8scope.attach(job.model, job.optimizer, run="overhead", collector="offline", spool=folder,
                            budget=None, **arguments)
    try:
        yield scope
    finally:
        scope.close()


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds a step, over a block of steps."""
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def compared(job: Job, attached: Callable[[], Any], *, steps: int, blocks: int) -> tuple[float, float]:
    """Median seconds a step, without and with what `attached` puts on the job, in alternating blocks."""
    bare: list[float] = []
    measured: list[float] = []
    for index in range(blocks + 1):
        without = timed(job.step, steps)
        with attached():
            job.step()  # the first step opens rows, and in the first block it compiles kernels
            found = timed(job.step, steps)
        if index:
            bare.append(without)
            measured.append(found)
    return statistics.median(bare), statistics.median(measured)


@contextmanager
def plain(job: Job) -> Iterator[None]:
    statistics_of = PlainStatistics(job.model)

    def emptied() -> None:
        statistics_of.kept.clear()

    handle = job.optimizer.register_step_post_hook(lambda *_: emptied())
    try:
        yield
    finally:
        handle.remove()
        statistics_of.close()


def waits(job: Job, folder: str) -> dict[str, float]:
    """Waits of the training thread in two steps, bare and measured; an error if torch itself sees one."""
    for _ in range(12):  # DDP times its first ten steps, and waits for that
        job.step()
    bare = traced(job)
    with probed(job, folder, every=1, detail_every=1):
        for _ in range(3):
            job.step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            job.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        measured = traced(job)
    return {"waits in the trace, bare": bare, "measured": measured}


def traced(job: Job) -> int:
    """Waits in a profiler's trace of two steps."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        job.step()
        job.step()
    torch.cuda.synchronize()
    return waits_in(trace)


def waits_in(trace: Any) -> int:
    """Waits and blocking copies of the threads that launch kernels, between their first and last launch."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        trace.export_chrome_trace(file.name)
        with open(file.name) as text:
            events = json.load(text)["traceEvents"]
    spans: dict[Any, list[float]] = {}
    for event in events:
        if event.get("name") == "cudaLaunchKernel":
            spans.setdefault(event["tid"], []).append(event["ts"])
    return sum(
        min(spans[event["tid"]]) <= event["ts"] <= max(spans[event["tid"]])
        for event in events if event.get("name") in WAITS and event.get("tid") in spans
    )


def memory(job: Job, folder: str) -> dict[str, float]:
    """Bytes of GPU memory at the peak of a step, more than without the probe, a watched tensor."""
    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        job.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    gc.collect()  # what an earlier probe has left
    job.step()
    before = peak()
    with probed(job, folder, every=1, detail_every=2) as scope:
        job.step()
        job.step()
        detailed = peak()
        light = peak()
        series = scope.series
    return {"series": series, "bytes a series, light step": (min(light, detailed) - before) / series,
            "bytes a series, detailed step": (max(light, detailed) - before) / series}


def hook_cost(folder: str) -> dict[str, float]:
    """Microseconds that a call of a linear costs more under an empty forward hook, and under the probe off
    cadence; `own forward`: of a subclass that has one. The layers lie on the CPU, the probe's sums on a GPU
    if there is one, where each hook also asks whether a CUDA graph is being captured."""
    class Bare(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    found: dict[str, float] = {}
    for kind, layer in (("", nn.Linear(1, 1, bias=False)), (", own forward", Bare(1, 1))):
        here = nn.Parameter(torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu"))
        model = nn.Sequential(layer)
        model.register_parameter("here", here)
        found |= {f"{name}{kind}": value for name, value in _hook_cost(model, layer, folder).items()}
    return found


def _hook_cost(model: nn.Module, layer: nn.Module, folder: str) -> dict[str, float]:
    """In rounds of each in turn; the least of them, in time of this thread: others may be busy."""
    x = torch.ones(1, 1)

    def call(blocks: int = 20, calls: int = 500) -> float:
        least = math.inf
        for _ in range(blocks):
            start = time.thread_time()
            for _ in range(calls):
                layer(x)
            least = min(least, time.thread_time() - start)
        return least / calls * 1e6

    bare, hooked, ours = [], [], []
    for _ in range(ROUNDS):
        bare.append(call())
        handle = layer.register_forward_hook(lambda module, args, output: None)
        hooked.append(call())
        handle.remove()
        with fp8scope.attach(model, run="hook", every=1000, start_step=1, collector="offline", spool=folder,
                             budget=None):
            ours.append(call())
    empty, probe = min(hooked) - min(bare), min(ours) - min(bare)
    return {"empty hook us": empty, "probe off cadence us": probe, "ratio": probe / empty}


def cases(options: argparse.Namespace, folder: str) -> dict[str, dict[str, float]]:
    """Every case by name: step time without and with, in ms, and the overhead in percent."""
    found: dict[str, dict[str, float]] = {}
    steps, blocks = (10, 3) if options.quick else (20, 5)

    def case(name: str, job: Job, attached: Callable[[], Any]) -> None:
        without, with_ = compared(job, attached, steps=steps, blocks=blocks)
        dearer = (with_ / without - 1) * 100
        found[name] = {"without ms": without * 1e3, "with ms": with_ * 1e3, "overhead %": dearer}
        if leads():
            print(f"{name:60} {without * 1e3:8.2f} {with_ * 1e3:8.2f} {dearer:+8.2f} %", flush=True)

    def speeds(name: str, job: Job) -> None:
        for speed, every, detail in SPEEDS:
            case(f"{name}, {speed}", job, partial(probed, job, folder, every=every, detail_every=detail))
        light, detailed, tenth, _ = (found[f"{name}, {speed}"]["overhead %"] for speed, *_ in SPEEDS)
        extra = (detailed - light) / DETAIL_EVERY
        for steps, mixed in (("every step", light + extra), ("every tenth step", tenth + extra / 10)):
            count(f"{name}, {steps}, one in {DETAIL_EVERY} detailed", {"overhead %, computed": mixed})

    def count(name: str, numbers: dict[str, float]) -> None:
        found[name] = numbers
        if leads():
            print(f"{name:60}", {key: round(value, 2) for key, value in numbers.items()}, flush=True)

    if options.memory:
        count("memory", memory(Job(options), folder))
        return found
    if leads():
        count("off cadence", hook_cost(folder))
    for sharding in () if options.hooks else options.sharding:
        kind = "" if sharding == "none" else f", {sharding}"
        if "bf16" in options.models:
            job = Job(options, sharding=sharding)
            count(f"waits{kind}", waits(job, folder))
            if sharding == "none":
                count("memory", memory(job, folder))
            speeds(f"BF16 what-if{kind}", job)
            if sharding == "none":
                case("BF16, statistics of TE in plain torch, every step", job, partial(plain, job))
            del job
            torch.cuda.empty_cache()
        if "fp8" in options.models:
            job = Job(options, fp8=True, sharding=sharding)
            speeds(f"FP8 in situ{kind}", job)
            del job
            torch.cuda.empty_cache()
    return found


def is_news(record: logging.LogRecord) -> bool:
    """Not that batches wait on disk: here they are thrown away, after each case. Losses are."""
    return "are unsent" not in str(record.msg)


def leads() -> bool:
    """Whether this rank prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the probe costs a training step.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    parser.add_argument("--hooks", action="store_true", help="hooks off cadence alone, which needs no GPU")
    parser.add_argument("--memory", action="store_true", help="memory of the GPU alone")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--models", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--sharding", nargs="+", default=["none"], choices=["none", "ddp", "fsdp"])
    return parser.parse_args()


def main() -> int:
    options = read_options()
    if not (torch.cuda.is_available() or options.hooks):
        print("probe_overhead needs a GPU, but for --hooks", file=sys.stderr)
        return 2
    logging.getLogger("fp8scope").addFilter(is_news)
    os.environ["FP8SCOPE_CLOSE_STEPS"] = "0"  # the cadence that is timed is the one that was asked for
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    with tempfile.TemporaryDirectory() as folder:
        results = cases(options, folder)
    if options.json and leads():
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        machine = f"{device}, torch {torch.__version__}, {platform.machine()}"
        print(json.dumps({"benchmark": "probe_overhead", "machine": machine, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
