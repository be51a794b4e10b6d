"""How near does a sample of a matrix come to what twins of the whole matrix say?

    python benchmarks/twin_sample.py [--quick] [--json] [--steps 150]

A 2.5 M-parameter decoder on the sources of Python's standard library, once for each way to store moments.
Every element has an exact fp32 twin. Each 50th step the step from the stored moments is compared with the
exact one, over whole matrices of 65,536 elements or more and over samples of them, from 40 first blocks each:
how far, root mean square, update_error is from that of the whole, relative to it, and update_norm_ratio.
"""

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from fp8scope.adam import steps_of
from fp8scope.layers import parameter_places
from fp8scope.rows import Rows
from fp8scope.sample import Sample, stride_of
from fp8scope.stored import Moments, read_moments
from fp8scope.updates import Samples, state_of
from fp8scope.watch import Watch
from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.data import batch_at, standard_library
from fp8scope_trainer.decoder import Decoder, DecoderConfig

CONFIG = DecoderConfig(width=256, layers=3, heads=4, kv_heads=4, head_width=64, hidden=768, context=96)
EVERY = 50
FIRSTS = 40
LEAST = 2**16
SCHEMES = ((128, 128), (128, 16), (128, 8), (128, 4), (8, 128), (8, 96), (8, 64), (1, 1024), (1, 256))
"""Elements in a block, and blocks."""
KINDS: dict[str, tuple[torch.dtype, Callable[..., Optimizer]]] = {
    "bf16, torch, beta2 0.95": (torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.95))),
    "bf16, torch, beta2 0.999": (torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "fp8, ours, beta2 0.999": (torch.float32, lambda p: AdamW(
        p, lr=1e-3, betas=(0.9, 0.999), states="fp8")),
    "int8, ours, beta2 0.999": (torch.float32, lambda p: AdamW(
        p, lr=1e-3, betas=(0.9, 0.999), states="int8")),
    "int4, ours, beta2 0.95": (torch.float32, lambda p: AdamW(
        p, lr=1e-3, betas=(0.9, 0.95), states="int4", block=64)),
}


def compared(kind: str, steps: int) -> Iterator[tuple[torch.Size, Tensor, Tensor]]:
    """Shape, exact step and step from the stored moments, fp64, of each matrix in each EVERYth step."""
    torch.manual_seed(0)
    dtype, make = KINDS[kind]
    model, text = Decoder(CONFIG).to(dtype), standard_library(limit=2**20).train
    optimizer = make(model.parameters())
    watch = Watch(Rows(torch.device("cpu")), recipes=(), rank=0, world=1)
    samples = Samples(watch, parameter_places(model), most=2**40)  # everything
    exact: dict[int, Moments] = {}
    for step in range(1, steps + 1):
        tokens, targets = batch_at(text, step=step, batch=8, length=CONFIG.context)
        loss = cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        for number, (form, sample) in enumerate(samples.of(optimizer)):
            states = [state_of(optimizer, part.parameter) for part in sample.parts]
            gradients = [part.parameter.grad for part in sample.parts if part.parameter.grad is not None]
            gradient, stored = sample.gather(gradients).float(), read_moments(sample, states)
            mine = exact.setdefault(number, Moments(*(torch.zeros_like(x) for x in stored)))
            count, sizes, found = steps_of(states, sample.device, ahead=1), sizes_of(sample), []
            for moments in (mine, stored):
                moments.m.lerp_(gradient, 1 - float(form.betas[0]))
                moments.v.lerp_(gradient.square(), 1 - float(form.betas[1]))
                direction = form.direction(sample, moments.m, moments.v, count).double()
                found.append(torch.split(direction, sizes))
            for part, wanted, got in zip(sample.parts, *found, strict=True):
                if step % EVERY == 0 and part.parameter.dim() == 2 and part.elements >= LEAST:
                    yield part.parameter.shape, wanted, got
        optimizer.step()


def sizes_of(sample: Sample) -> list[int]:
    """Elements of each part."""
    return [part.elements for part in sample.parts]


def error_and_ratio(exact: Tensor, got: Tensor) -> tuple[float, float]:
    """update_error and update_norm_ratio."""
    size = exact.norm().item()
    return (got - exact).norm().item() / size, got.norm().item() / size


def deviations(kind: str, steps: int) -> dict[str, dict[str, float]]:
    """Per scheme, over all matrices and first blocks."""
    far: dict[str, list[tuple[float, float]]] = {f"{count} x {block}": [] for block, count in SCHEMES}
    whole = []
    for shape, exact, got in compared(kind, steps):
        error, ratio = error_and_ratio(exact, got)
        whole.append((error, ratio))
        for block, count in SCHEMES:
            stride = stride_of(shape, block=block, most=block * count)
            for first in torch.randperm(stride)[:FIRSTS].tolist():
                pair = (x.view(-1, block)[first::stride] for x in (exact, got))
                one = error_and_ratio(*pair)
                far[f"{count} x {block}"].append((one[0] / error - 1, one[1] - ratio))
    found = {"whole": {"least error": min(e for e, _ in whole), "largest error": max(e for e, _ in whole),
                       "least ratio": min(r for _, r in whole), "largest ratio": max(r for _, r in whole)}}
    for name, many in far.items():
        mean = [math.fsum(one[i] ** 2 for one in many) / len(many) for i in range(2)]
        found[name] = {"error, relative": mean[0] ** 0.5, "ratio": mean[1] ** 0.5}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="How near a sample of a matrix comes to the whole.")
    parser.add_argument("--quick", action="store_true", help="two ways to store moments, 50 steps")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for kind in list(KINDS)[1:3] if options.quick else KINDS:
        results[kind] = deviations(kind, EVERY if options.quick else options.steps)
        print(kind, {key: round(value, 4) for key, value in results[kind]["whole"].items()})
        for name, numbers in results[kind].items():
            if name != "whole":
                print(f"  {name:10}", {key: round(value, 4) for key, value in numbers.items()}, flush=True)
    if options.json:
        print(json.dumps({"benchmark": "twin_sample", "machine": f"CPU, torch {torch.__version__}, "
                          f"{platform.machine()}", "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
