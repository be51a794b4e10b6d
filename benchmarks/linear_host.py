"""What the Python of an FP8 linear costs the host, without quantizers and products; runs anywhere.

    python benchmarks/linear_host.py [--quick] [--json]

Quantizers and GEMMs give back tensors that are there, so what is left is ours and autograd's: microseconds
of a forward and backward of 128 x 128, the median. `floor` is a bare `autograd.Function` that saves as many
tensors. Compiled layers are those of the backend `aot_eager`, where torch takes some time for each graph. The
last row is in milliseconds: a step's end for the 192 histories of a delayed tensorwise model of 96 linears,
with the scales of the next step.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fp8scope import backend
from fp8scope.quantize import Quantized
from fp8scope_trainer import bodies, gemm, tensorwise
from fp8scope_trainer.history import AmaxHistory, advance_histories
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.tensor import TensorCodes

SIZE = 128
HISTORIES = 192


class Bare(torch.autograd.Function):
    """Keeps four tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, *_ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class Floor(nn.Linear):
    """The least that a product of one's own takes."""

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = Bare.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return y


def stand_ins() -> list[Any]:
    """Patches that give what is there already."""
    codes, other = (torch.zeros(SIZE, SIZE).to(torch.float8_e4m3fn) for _ in range(2))
    one, rows, amax = torch.ones(1, 1), torch.ones(SIZE, 1), torch.ones(1)

    def tensor(*_: object, turned: bool = False, **__: object) -> TensorCodes:
        return TensorCodes(codes, other if turned else None, one, amax)

    def product(*_: object, **__: object) -> Tensor:
        return torch.empty(SIZE, SIZE)

    def tiles(*_: object, **__: object) -> Quantized:
        return Quantized(codes, rows, "tile 1x128")

    def blocks(*_: object, **__: object) -> Quantized:
        return Quantized(codes, one, "block 128x128")

    return [
        patch.object(backend, "quantize_tiles", tiles), patch.object(backend, "quantize_blocks", blocks),
        patch.object(tensorwise, "quantize_tensor", tensor), patch.object(bodies, "quantize_tensor", tensor),
        patch.object(tensorwise, "transposed", lambda codes: codes),
        *(patch.object(gemm, name, product) for name in ("fprop", "dgrad", "wgrad", "tensorwise")),
    ]


def median_us(call: Callable[[], object], rounds: int) -> float:
    """Of one call."""
    spent = []
    for _ in range(rounds + rounds // 10):
        began = perf_counter_ns()
        call()
        spent.append(1e-3 * (perf_counter_ns() - began))
    return round(statistics.median(spent[rounds // 10:]), 1)


def layers() -> dict[str, nn.Linear]:
    """By name."""
    recipes = {"block": Recipe(), "tensorwise": Recipe(scaling="tensorwise"),
               "tensorwise, delayed": Recipe(scaling="tensorwise", policy="delayed")}
    found: dict[str, nn.Linear] = {"floor": Floor(SIZE, SIZE, bias=False)}
    for name, recipe in recipes.items():
        found[name] = Fp8Linear(SIZE, SIZE, bias=False, recipe=recipe)
        found[f"{name}, compiled"] = Fp8Linear(SIZE, SIZE, bias=False, recipe=recipe)
        found[f"{name}, compiled"].compile(backend="aot_eager", dynamic=False)
    return found


def train(layer: nn.Linear, x: Tensor, dy: Tensor) -> None:
    """Forward and backward."""
    x.grad = layer.weight.grad = None
    layer(x).backward(dy)


def step_end_ms(rounds: int) -> float:
    """All histories go on, and say the scale of the next step."""
    histories = [AmaxHistory() for _ in range(HISTORIES)]
    model = nn.ModuleList(histories)

    def end() -> None:
        advance_histories(model)
        for history in histories:
            history.scale()

    return round(1e-3 * median_us(end, rounds), 2)


def main() -> int:
    """Prints a line a layer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="500 rounds instead of 3000")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    options = parser.parse_args()
    rounds = 500 if options.quick else 3000
    x, dy = torch.randn(SIZE, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    patches, results = stand_ins(), dict[str, float]()
    for one in patches:
        one.start()
    for name, layer in layers().items():
        results[name] = median_us(lambda layer=layer: train(layer, x, dy), rounds)  # type: ignore[misc]
        print(f"{name:30} {results[name]:7.1f} us")
    for one in patches:
        one.stop()
    ended = step_end_ms(max(10, rounds // 100))
    print(f"{f'step end of {HISTORIES} histories':30} {ended:7.2f} ms")
    if options.json:
        print(json.dumps({"benchmark": "linear_host", "torch": torch.__version__, "results": results,
                          "machine": platform.machine(), "step_end_ms": ended}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
