"""An optimizer's step against the memory floor, torch's fused AdamW and other eight-bit optimizers.

    python benchmarks/optimizer.py [--quick] [--json] [--shapes] [--host]

1.07 B fp32 parameters with fp32 gradients. The floor is the bytes that a step must move, each once, at the
bandwidth of a device copy, measured in the same run; a ratio is time over that of the floor, or of torch's
fused AdamW with fp32 states over ours. Calls alternate; figures are medians of time on the device. Then 2,000
parameters of 256 x 256: the whole step, host included.

torchao and bitsandbytes take part where they are installed; --shapes adds what the shape of a program does.

--host needs no GPU: of 2,000 parameters of 64 x 64 on the CPU the time of a step without its launches, which
do nothing there, and with gradients at other addresses than before; beside it torch's fused AdamW, its own
launch left out alike. The least time of the thread in all rounds, in turns.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fp8scope_trainer import optimizer, step_table
from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.moments import new_state, slots
from fp8scope_trainer.rules import ADAMW, scalars
from fp8scope_trainer.state_format import StateFormat
from fp8scope_trainer.step import StepTensors
from fp8scope_trainer.step_table import Shape, StepTable, kind_of

LARGE = [(8192, 8192)] * 16
SMALL = [(256, 256)] * 2000
STATE_BYTES = {"fp32": 8, "bf16": 4, "int16": 4, "fp8": 2, "int8": 2, "int4": 1}
"""Both moments of a parameter, without scales."""
SHAPES = (Shape(128, 0, 8), Shape(256, 0, 8), Shape(256, 80, 16), Shape(512, 112, 8), Shape(1024, 168, 8))
OPTIONS = {"lr": 1e-6, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": 3.0, "seed": 0}


def floor_bytes(format: str) -> float:
    """A parameter: weight, both states and scales read and written, gradient read."""
    block = StateFormat.of(format).block
    return 12 + 2 * STATE_BYTES[format] + (16 / block if block else 0)


def tensors_of(weights: list[Tensor], gradients: list[Tensor], format: str) -> list[StepTensors]:
    """Parameters with zero states in `format`."""
    found = []
    for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        state = new_state(weight, ADAMW, StateFormat.of(format), exact=False, master=False)
        found.append(StepTensors(weight=weight, gradient=gradient, slots=slots(state, ADAMW), master=None,
                                 stream=number, first=0))
    return found


def ours(tensors: list[StepTensors], format: str, **shape: Any) -> Callable[[], object]:
    """A step of AdamW, statistics and clipping included."""
    by = scalars(ADAMW, OPTIONS, 5)
    kind = kind_of(tensors[0], ADAMW, StateFormat.of(format), by)
    assert kind is not None
    table = StepTable(tensors, kind, **shape)
    return lambda: table.step(tensors, by)


def fused(weights: list[Tensor], gradients: list[Tensor]) -> Callable[[], object]:
    """torch's, fp32 states."""
    return stepping(torch.optim.AdamW, weights, gradients, fused=True)


def stepping(kind: Any, weights: list[Tensor], gradients: list[Tensor],
             **options: Any) -> Callable[[], object]:
    """A step of an optimizer of somebody else's."""
    parameters = [nn.Parameter(w) for w in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    step: Callable[[], object] = kind(parameters, lr=1e-6, **options).step
    return step


def peers() -> dict[str, Any]:
    """Optimizers with eight-bit states that are installed here."""
    found: dict[str, Any] = {}
    try:
        from torchao.optim import AdamW8bit, AdamWFp8  # type: ignore[import-untyped]
        found |= {"torchao AdamW8bit": AdamW8bit, "torchao AdamWFp8": AdamWFp8}
    except ImportError:
        pass
    try:
        from bitsandbytes.optim import AdamW8bit as Blockwise  # type: ignore[import-not-found]
        found["bitsandbytes AdamW8bit"] = Blockwise
    except ImportError:
        pass
    return found


def device_ms(call: Callable[[], object]) -> float:
    """One call, on the device, the host ahead of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def wall_ms(call: Callable[[], object]) -> float:
    """One of ten calls in a row, host included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    return 100 * (time.perf_counter() - start)


def alternating(calls: dict[str, Callable[[], object]], rounds: int,
                clock: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """The median of each, in turns."""
    for call in calls.values():
        for _ in range(2):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clock(call))
    return {name: statistics.median(found) for name, found in times.items()}


def given(shapes: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and gradients."""
    return ([0.02 * torch.randn(shape, device="cuda") for shape in shapes],
            [1e-3 * torch.randn(shape, device="cuda") for shape in shapes])


def large(rounds: int, *, shapes: bool, others: bool) -> dict[str, dict[str, float]]:
    """By name: ms, and how it compares."""
    weights, gradients = given(LARGE)
    count = sum(w.numel() for w in weights)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    calls["torch fused, fp32"] = fused(weights, gradients)
    names = {}
    for format in ("fp8", "int8", "int4", "bf16", "int16", "fp32"):
        states = tensors_of(weights, gradients, format)
        calls[f"ours, {format}"], names[f"ours, {format}"] = ours(states, format), format
        for shape in SHAPES if shapes and format in ("fp8", "int8") else ():
            name = f"ours, {format}, {shape.elements} x {shape.turns}, {shape.registers} registers"
            calls[name], names[name] = ours(states, format, shape=shape), format
    for name, kind in peers().items() if others else ():
        calls[name] = stepping(kind, weights, gradients)
    ms = alternating(calls, rounds, device_ms)
    per_byte = ms["copy"] / (2 * source.nbytes)
    found: dict[str, dict[str, float]] = {}
    for name, took in ms.items():
        found[name] = {"ms": round(took, 3), "torch fused over it": round(ms["torch fused, fp32"] / took, 2)}
        if name in names or "fused" in name:
            floor = per_byte * count * floor_bytes(names.get(name, "fp32"))
            found[name] |= {"floor ms": round(floor, 3), "of floor": round(took / floor, 3)}
    return found


def small(rounds: int) -> dict[str, dict[str, float]]:
    """By name: ms a step with the host, and on the device."""
    weights, gradients = given(SMALL)
    calls = {"torch fused, fp32": fused(weights, gradients)}
    calls |= {f"ours, {format}": stepping(AdamW, weights, gradients, states=format)
              for format in ("fp8", "fp32")}
    wall, device = alternating(calls, rounds, wall_ms), alternating(calls, rounds, device_ms)
    return {name: {"ms": round(wall[name], 3), "device ms": round(device[name], 3),
                   "torch fused over it": round(wall["torch fused, fp32"] / wall[name], 2)} for name in calls}


def host(rounds: int) -> dict[str, dict[str, float]]:
    """By name: microseconds a parameter on the host, without the launches."""
    parameters = [nn.Parameter(torch.zeros(64, 64)) for _ in SMALL]
    theirs, ours, uneven = torch.optim.AdamW(parameters, fused=True), AdamW(parameters), AdamW(parameters)
    turn = itertools.count()

    def missing() -> None:
        parameters[next(turn) % 2].grad = None
        uneven.step()

    return _least({
        "torch fused, fp32": theirs.step, "ours, fp8": ours.step,
        "ours, fp32": AdamW(parameters, states="fp32").step,
        "ours, fp8, another gradient missing each time": missing,
        "torch, clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        "ours, clip_gradients": lambda: ours.clip_gradients(1.0),
        "torch, zero_grad": theirs.zero_grad, "ours, zero_grad": ours.zero_grad,
    }, parameters, [[torch.zeros(64, 64) for _ in SMALL] for _ in range(2)], rounds)


def sharded(rounds: int) -> dict[str, dict[str, float]]:
    """The same of 500 DTensors, on a mesh of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        *gradients, weights = ([distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0)]) for _ in range(500)]
                               for _ in range(3))
        parameters = [nn.Parameter(weight) for weight in weights]
        ours = AdamW(parameters)
        found = _least({"ours, fp8": ours.step,
                        "torch, clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
                        "ours, clip_gradients": lambda: ours.clip_gradients(1.0)},
                       parameters, gradients, rounds)
        dist.destroy_process_group()
    return found


def _least(calls: dict[str, Callable[[], object]], parameters: list[nn.Parameter],
           gradients: Sequence[Sequence[Tensor]], rounds: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    with (patch.object(torch, "_fused_adamw_", _nothing), patch.object(step_table, "_step", _nothing),
          patch.object(optimizer, "update_all", step_table.update_all)):
        for turn in range(rounds + 2):
            for name, call in calls.items():
                for parameter, gradient in zip(parameters, gradients[turn % 2], strict=True):
                    parameter.grad = gradient
                start = time.thread_time()
                call()
                times[name].append(time.thread_time() - start)
    return {name: {"us a parameter": round(1e6 * min(found[2:]) / len(parameters), 2)}
            for name, found in times.items()}


def _nothing(*args: object, **options: object) -> None:
    """In place of a launch."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 21, without the peers")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    parser.add_argument("--shapes", action="store_true", help="other shapes of a program, too")
    parser.add_argument("--host", action="store_true", help="only the host's part, without a GPU")
    arguments = parser.parse_args()
    rounds = 5 if arguments.quick else 21
    if arguments.host:
        machine = f"{platform.machine()}, torch {torch.__version__}"
        return told({"2,000 parameters, host": host(rounds), "500 DTensors, host": sharded(rounds)}, machine,
                    json_too=arguments.json)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        print("optimizer: needs a CUDA device of compute capability 8.9", file=sys.stderr)
        return 2
    results: dict[str, Any] = {}
    results["1.07 B parameters"] = large(rounds, shapes=arguments.shapes, others=not arguments.quick)
    results["2,000 parameters of 256 x 256"] = small(rounds)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.machine()}"
    return told(results, machine, json_too=arguments.json)


def told(results: dict[str, Any], machine: str, *, json_too: bool) -> int:
    """Prints tables, and as the last line JSON."""
    for title, rows in results.items():
        print(title)
        for name, row in rows.items():
            print(f"  {name:44} {row}")
    if json_too:
        print(json.dumps({"benchmark": "optimizer", "machine": machine, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
