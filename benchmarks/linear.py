"""An FP8 linear against BF16: forward and backward, quantization included, and what its quantizers reach.

    python benchmarks/linear.py [--quick] [--json]

First the kernels beside a device copy of the same tensor: the share of the copy's bandwidth that each
reaches with the bytes it must move. `tensor` is one scale a tensor: current scaling must read x twice,
delayed once; `(64, 2)` and so on are columns and warps of a program.

Then whole layers, of bf16 parameters and without a bias: `nn.Linear`, ours, and torchao's where it is
installed. The calls alternate, so that clocks and temperature fall on all; a figure is the median, a ratio
the time of `nn.Linear` over that of the layer. The GEMMs alone are ours without quantization: the ceiling.

Last, the host: microseconds that a forward and backward keep the Python thread busy, of 128 tokens, where the
device has next to nothing to do; and of the parts of it, a call each. Compiled layers are there too.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope import backend
from fp8scope.quantize import Quantized
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer import gemm, tensor_kernel
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.tensor import TensorCodes, quantize_tensor
from fp8scope_trainer.transpose import transposed

SIZES = ((16384, 8192, 8192), (16384, 4096, 4096))
"""Tokens, in features, out features."""
RECIPES = {
    "block": Recipe(),
    "block, wgrad of blocks": Recipe(wgrad_activation="block"),
    "tensorwise": Recipe(scaling="tensorwise"),
    "tensorwise, e5m2 gradients": Recipe(scaling="tensorwise", gradient_format="e5m2"),
    "tensorwise, delayed": Recipe(scaling="tensorwise", policy="delayed"),
}
"""Ours."""


def time_us(call: Callable[[], object]) -> float:
    """One call, on the device, the host ahead of it by an empty kernel of its own."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def alternating_us(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median of each, in turns."""
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(time_us(call))
    return {name: statistics.median(found) for name, found in times.items()}


def quantizers(tokens: int, width: int, rounds: int) -> dict[str, Any]:
    """Share of the bandwidth of a copy by kernel, of x [tokens, width] in bf16."""
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    target, codes = torch.empty_like(x), torch.randint(0, 256, x.shape, dtype=torch.uint8, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(x),
        "tiles": lambda: backend.quantize_tiles(x, E4M3),
        "tiles of x.t()": lambda: backend.quantize_tiles(x.t(), E4M3),
        "tiles, both": lambda: backend.quantize_both(x, E4M3),
        "blocks": lambda: backend.quantize_blocks(x, E4M3),
        "blocks of x.t()": lambda: backend.quantize_blocks(x.t(), E4M3),
        "transpose of codes": lambda: transposed(codes),
        "t().contiguous() of codes": lambda: codes.t().contiguous(),
    }
    scale = torch.ones(1, 1, device="cuda")
    bytes_of = {"copy": 4, "tiles, both": 4, "transpose of codes": 2, "t().contiguous() of codes": 2}
    for given, turned in product((None, scale), (False, True)):
        name = f"tensor, {'current' if given is None else 'delayed'}{', both' if turned else ''}"
        bytes_of[name] = (4 if given is None else 2) + 1 + turned
        calls[name] = partial(tensor_kernel.quantize_tensor, x, E4M3, scale=given, turned=turned)
    us = alternating_us(calls, rounds)
    moved = {name: x.numel() * bytes_of.get(name, 3) for name in us}
    copied = moved["copy"] / us["copy"]
    return {name: {"us": round(us[name], 1), "of copy": round(moved[name] / us[name] / copied, 3)}
            for name in us}


def layers(width: int, out: int) -> dict[str, nn.Module]:
    """By name; each has parameters of its own."""
    def bare() -> nn.Linear:
        return nn.Linear(width, out, bias=False, device="cuda", dtype=torch.bfloat16)

    found: dict[str, nn.Module] = {
        "BF16": bare(),
    }
    for name, recipe in RECIPES.items():
        found[f"ours, {name}"] = Fp8Linear.from_linear(bare(), recipe=recipe)
    return found | peers(bare)


def peers(bare: Callable[[], nn.Linear]) -> dict[str, nn.Module]:
    """torchao's float8 linear, compiled, where it is installed: tensorwise and rowwise."""
    try:
        from torchao.float8 import (  # type: ignore[import-untyped]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError:
        return {}
    found: dict[str, nn.Module] = {}
    for recipe in ("tensorwise", "rowwise"):
        whole = nn.Sequential(bare())
        convert_to_float8_training(whole, config=Float8LinearConfig.from_recipe_name(recipe))
        found[f"torchao, {recipe}, compiled"] = torch.compile(whole)  # type: ignore[assignment]
    return found


def train(layer: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Forward and backward."""
    x.grad = None
    layer.zero_grad()
    layer(x).backward(dy)


def gemms(x: Quantized, w: Quantized, dy: Quantized, x_t: Quantized, dy_t: Quantized, turned: Tensor) -> None:
    """The three products of operands that are there; the transpose of the weight is, too."""
    gemm.fprop(x, w, dtype=torch.bfloat16)
    gemm._by_block(dy, turned.t(), w.scales.t(), torch.bfloat16)
    gemm.wgrad(dy_t, x_t, dtype=torch.bfloat16)


def tensorwise_gemms(x: TensorCodes, w: TensorCodes, dy: TensorCodes, turned: Tensor) -> None:
    """The same under one scale a tensor."""
    assert x.turned is not None
    assert dy.turned is not None
    gemm.tensorwise(x.codes, x.scale, w.codes, w.scale, dtype=torch.bfloat16, fast=True)
    gemm.tensorwise(dy.codes, dy.scale, turned, w.scale, dtype=torch.bfloat16)
    gemm.tensorwise(dy.turned, dy.scale, x.turned, x.scale, dtype=torch.bfloat16)


def host(width: int, out: int, rounds: int) -> dict[str, Any]:
    """Median microseconds of the host, forward and backward of 128 tokens."""
    x = torch.randn(128, width, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(128, out, device="cuda").bfloat16()
    every = layers(width, out)
    for name in RECIPES:
        graph = Fp8Linear(width, out, bias=False, recipe=RECIPES[name], device="cuda", dtype=torch.bfloat16)
        graph.compile(dynamic=False)
        every[f"ours, {name}, compiled"] = graph
    return {name: {"us": round(busy_us(partial(train, layer, x, dy), rounds), 1)}
            for name, layer in every.items()}


def host_parts(width: int, out: int, rounds: int) -> dict[str, Any]:
    """Median microseconds of the host for a call of what a layer is made of, of 128 tokens."""
    x, w = (torch.randn(rows, width, device="cuda").bfloat16() for rows in (128, out))
    tiles, columns = backend.quantize_tiles(x, E4M3), backend.quantize_tiles(x.t(), E4M3)
    blocks, a, b = backend.quantize_blocks(w, E4M3), quantize_tensor(x, E4M3), quantize_tensor(w, E4M3)
    y = torch.empty(128, out, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "tiles": lambda: backend.quantize_tiles(x, E4M3),
        "tiles of x.t()": lambda: backend.quantize_tiles(x.t(), E4M3),
        "tiles, both": lambda: backend.quantize_both(x, E4M3),
        "blocks": lambda: backend.quantize_blocks(w, E4M3),
        "tensor, both": lambda: quantize_tensor(x, E4M3, turned=True),
        "transpose of codes": lambda: transposed(blocks.codes),
        "fprop by blocks": lambda: gemm.fprop(tiles, blocks, dtype=torch.bfloat16),
        "wgrad by tiles": lambda: gemm.wgrad(columns, columns, dtype=torch.bfloat16),
        "tensorwise GEMM": lambda: gemm.tensorwise(a.codes, a.scale, b.codes, b.scale, dtype=torch.bfloat16),
        "BF16 GEMM": lambda: torch.mm(x, w.t(), out=y),
    }
    return {name: {"us": round(busy_us(call, rounds), 1)} for name, call in calls.items()}


def busy_us(call: Callable[[], object], rounds: int) -> float:
    """Median microseconds that a call keeps the host."""
    spent = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        began = perf_counter_ns()
        call()
        spent.append(1e-3 * (perf_counter_ns() - began))
    return statistics.median(spent[3:])


def linear(tokens: int, width: int, out: int, rounds: int) -> dict[str, Any]:
    """Median times in microseconds, and how many times quicker than BF16."""
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(tokens, out, device="cuda").bfloat16()
    calls: dict[str, Callable[[], object]] = {
        name: partial(train, layer, x, dy) for name, layer in layers(width, out).items()}
    with torch.no_grad():
        w_bf16 = torch.randn(out, width, device="cuda").bfloat16()
        w = backend.quantize_blocks(w_bf16, E4M3)
        tiles = [backend.quantize_tiles(one, E4M3) for one in (x, dy, x.t(), dy.t())]
        whole = [quantize_tensor(one, E4M3, turned=True) for one in (x, w_bf16, dy)]
    calls["the three GEMMs alone"] = partial(
        gemms, tiles[0], w, tiles[1], tiles[2], tiles[3], transposed(w.codes))
    assert whole[1].turned is not None
    calls["the three tensorwise GEMMs alone"] = partial(
        tensorwise_gemms, whole[0], whole[1], whole[2], whole[1].turned)
    us = alternating_us(calls, rounds)
    return {name: {"us": round(one, 1), "times BF16": round(us["BF16"] / one, 3)} for name, one in us.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="11 rounds instead of 41")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        print("linear: needs a CUDA device of compute capability 9.0", file=sys.stderr)
        return 2
    rounds = 11 if arguments.quick else 41
    results: dict[str, Any] = {}
    for tokens, width, out in SIZES:
        results[f"kernels {tokens}x{width}"] = quantizers(tokens, width, rounds)
        results[f"linear {tokens}x{width}x{out}"] = linear(tokens, width, out, rounds)
    results["host"] = host(1024, 1024, 10 * rounds)
    results["host, parts"] = host_parts(1024, 1024, 10 * rounds)
    for title, rows in results.items():
        print(title)
        for name, row in rows.items():
            print(f"  {name:32} {row}")
    if arguments.json:
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.machine()}"
        print(json.dumps({"benchmark": "linear", "machine": machine, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
