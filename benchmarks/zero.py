"""What a ZeRO stage holds and sends: measured on real ranks, beside the theory.

    python benchmarks/zero.py [--quick] [--json]                          2, 4 and 8 ranks of the CPU
    torchrun --nproc-per-node 2 benchmarks/zero.py [--quick] [--json]     one rank a GPU, over NCCL

The reference decoder, one optimizer step of two micro-batches after a first one. Without torchrun the ranks
are started here, on GPUs where there are two. Held: bytes of a rank in parameters, gradients (the most
between two backward passes) and fp32 moments, by their storages, beside the estimator's. Sent: bytes of a
rank in a step by kind of collective, by the ring (see communication.py). N is the number of parameters; x is
measured / theory. "FP8 weights" gathers codes and scales of the layers whose rows divide into 128 for each
rank, all else in BF16.

On a GPU also what torch.cuda.memory_allocated has grown by since before the model, beside the estimator's
sum: after the last backward, when activations are gone, and after the first of the two, when stages 0 to 2
also hold the gathered copy. "Others" is what is neither parameter, gradient, state nor that copy: the caching
allocator's rounding, tables of the optimizer, a unit's gather that FSDP2 frees with the next forward.

A rank that hangs writes where, and ends after --limit-s seconds; rows are printed as they are found.
"""

import argparse
import faulthandler
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from fp8scope_protocol.formats import TILE
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.communication import Traffic, expected_traffic
from fp8scope_trainer.convert import convert
from fp8scope_trainer.decoder import Decoder, DecoderConfig, billion, hundred_million
from fp8scope_trainer.decoder_size import size_of
from fp8scope_trainer.estimate import Plan, estimate
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.memory import model_state
from fp8scope_trainer.mesh import training_mesh
from fp8scope_trainer.processes import launched, leave
from fp8scope_trainer.shard import micro_batch, shard

ACCUMULATE, LENGTH, GROUP = 2, 16, 2
WORLDS = (2, 4, 8)
SMALL = DecoderConfig(width=128, layers=2, heads=2, kv_heads=2, head_width=64, hidden=128, context=LENGTH)
EVEN = DecoderConfig(width=1024, layers=1, heads=8, kv_heads=4, head_width=64, hidden=512, context=LENGTH)
"""Rows of all its linears are multiples of 128 for each of eight ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    stage: int | str
    fp8: bool = False
    codes: bool = False


BF16 = Case(name="3, gathered in BF16", stage=3, fp8=True)
CODES = Case(name="3, FP8 weights", stage=3, fp8=True, codes=True)
CASES = (*(Case(name=str(stage), stage=stage) for stage in (0, 1, 2, 3, "HYBRID_SHARD")), BF16, CODES)


def measured(case: Case, config: DecoderConfig, device: torch.device) -> dict[str, Any]:
    """One rank: bytes held and sent in the second step, and what they should be."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = Decoder(config)
    if case.fp8:
        convert(model)
    n = sum(p.numel() for p in model.parameters())
    mesh = training_mesh(device.type, case.stage, group=GROUP if case.stage == "HYBRID_SHARD" else None)
    shards = mesh["shard"].size()
    codes = sum(m.weight.numel() for m in model.modules() if isinstance(m, Fp8Linear)
                and m.weight.shape[0] % (TILE * shards) == 0) if case.fp8 else 0
    shard(model, stage=case.stage, mesh=mesh, compute=torch.bfloat16 if case.fp8 else None,
          fp8_gather=case.codes)
    optimizer = AdamW(parameter_groups(model, states="fp32"))
    step(model, optimizer, case, device)
    with Traffic() as traffic:
        held = step(model, optimizer, case, device, before)
    width, taken = 2 if case.fp8 else 4, codes if case.codes else 0
    theory = expected_traffic(
        case.stage, gathered_bytes=width * (n - taken) + taken * (1 + 4 / TILE**2), reduced_bytes=4 * n,
        shard=shards, replicate=dist.get_world_size() // shards, accumulate=ACCUMULATE)
    sent = {kind: volume.sent_bytes for kind, volume in traffic.volumes.items()}
    return {"n": n, "codes": codes, **held, **expected_memory(case, config), "sent": sent,
            "sent_theory": theory}


def step(
    model: nn.Module, optimizer: AdamW, case: Case, device: torch.device, before: int = 0
) -> dict[str, dict[str, float]]:
    """One optimizer step; what was held in it, and allocated beyond `before`."""
    gradients = 0
    allocated: dict[str, float] = {}
    for i in range(ACCUMULATE):
        micro_batch(model, stage=case.stage, last=i == ACCUMULATE - 1)
        tokens = torch.randint(256, (1, LENGTH), device=device)
        torch.autograd.backward(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        gradients = max(gradients, model_state(model, optimizer).gradients)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            state = model_state(model, optimizer)
            whole = gathered(model) if i < ACCUMULATE - 1 else 0
            total = torch.cuda.memory_allocated(device) - before
            when = "after backward" if i == ACCUMULATE - 1 else "between"
            parts = sharded(model) + state.gradients + state.states + whole
            allocated |= {when: total, f"{when}, others": total - parts}
    optimizer.step()
    held = model_state(model, optimizer)
    optimizer.zero_grad()
    return {"held": {"parameters": held.parameters, "gradients": gradients, "states": held.states},
            "allocated": allocated}


def expected_memory(case: Case, config: DecoderConfig) -> dict[str, dict[str, float]]:
    """The estimator's bytes of what is held, and of what is allocated while nothing computes."""
    plan = Plan(stage=str(case.stage), ranks=dist.get_world_size(), accumulate=ACCUMULATE,
                precision="fp8" if case.fp8 else "fp32", fp8_gather=case.codes,
                shard_ranks=GROUP if case.stage == "HYBRID_SHARD" else None)
    found = estimate(size_of(config), plan)
    weights, gradients, states = (found.of(name) for name in ("weights", "gradients", "states"))
    kept = found.of("gathered weights") if plan.zero.keeps_parameters else 0.0
    return {
        "held_theory": {"parameters": weights, "gradients": gradients, "states": states},
        "allocated_theory": {"between": weights + gradients + states + kept,
                             "after backward": weights + 4 * found.parameters / plan.shards + states},
    }


def units(model: nn.Module) -> list[Any]:
    """FSDP2's records of parameters; it has no public way to them."""
    states: list[Any] = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    groups = (getattr(one, "_fsdp_param_groups", None) or [one._fsdp_param_group] for one in states)
    return [parameter for some in groups for group in some if group for parameter in group.fsdp_params]


def gathered(model: nn.Module) -> int:
    """Bytes of the copies that are gathered now."""
    return sum(one.untyped_storage().nbytes() for unit in units(model) for one in unit.all_gather_outputs)


def sharded(model: nn.Module) -> int:
    """Bytes of the fp32 shards, which stay where a whole copy computes."""
    parts: list[Tensor] = [unit._sharded_param_data for unit in units(model)]
    return sum({(s := part.untyped_storage())._cdata: s.nbytes() for part in parts}.values())


def attempted(case: Case, config: DecoderConfig, device: torch.device) -> dict[str, Any]:
    """`measured`, or why it failed. Nothing of the case stays."""
    try:
        return measured(case, config, device)
    except Exception as error:  # the other rows are still worth their time
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def rank_main(rank: int, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One rank of one world: its rows, printed by rank 0 as they come."""
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
        torch.ones(TILE, TILE, device=device).mm(torch.ones(TILE, TILE, device=device))  # cuBLAS' workspace
    store = f"file://{options.folder}/store" if options.folder else "env://"
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus >= ranks else "gloo", init_method=store, rank=rank,
                            world_size=ranks, timeout=timedelta(seconds=60))
    config = (hundred_million if options.quick else billion)() if gpus else SMALL if options.quick else EVEN
    found: dict[str, Any] = {}
    for case in CASES:
        if case.stage == "HYBRID_SHARD" and ranks == GROUP:
            continue
        begun = time.perf_counter()
        row = found[case.name] = attempted(case, config, device)
        row["seconds"] = round(time.perf_counter() - begun, 1)
        if rank == 0:
            print(line(ranks, case.name, row), flush=True)
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    return {f"{name} on {ranks}": row for name, row in found.items()}


def world(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 of `ranks` processes found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, "--ranks", str(ranks), "--device",
                   options.device, "--limit-s", str(options.limit_s), *(["--quick"] if options.quick else [])]
        jobs = [subprocess.Popen([*command, "--rank", str(rank)], env=os.environ | {"OMP_NUM_THREADS": "1"})
                for rank in range(ranks)]
        try:
            while any(job.poll() is None for job in jobs):
                if any(job.returncode for job in jobs):
                    break
                time.sleep(0.1)
        finally:
            for job in jobs:
                job.kill()
        if any(job.wait() for job in jobs):
            raise SystemExit(f"a rank of {ranks} failed")
        found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
        return found


def line(ranks: int, name: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in row:
        return f"| {ranks} | {name} | {row['error']} | | |"
    parts = (cells(row[kind], row[f"{kind}_theory"], row["n"]) for kind in ("held", "allocated", "sent"))
    return f"| {ranks} | {name} | {' | '.join(parts)} |"


def cells(found: dict[str, float], theory: dict[str, float], n: int) -> str:
    """`name 4.00N (x1.000)`, for each name that was found, and of theory where anything was."""
    return ", ".join(
        f"{name} {found.get(name, 0) / n:.2f}N"
        + (f" (x{found.get(name, 0) / theory[name]:.3f})" if name in theory else "")
        for name in sorted({*found, *theory} if found else ()))


def gathers(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Bytes of the gathers with FP8 weights over those in BF16, by ranks: in all, and of these weights."""
    found = {}
    for ranks in WORLDS:
        bf16, fp8 = (results.get(f"{case.name} on {ranks}", {}) for case in (BF16, CODES))
        if "sent" not in bf16 or "sent" not in fp8 or not bf16["codes"]:
            continue
        others = 2 * ACCUMULATE * 2 * (bf16["n"] - bf16["codes"]) * (ranks - 1) / ranks
        both = [one["sent"]["all_gather"] for one in (fp8, bf16)]
        found[str(ranks)] = {"all": both[0] / both[1], "weights": (both[0] - others) / (both[1] - others)}
    return found


def report(results: dict[str, Any], options: argparse.Namespace) -> None:
    """What follows from the rows, and the summary."""
    for ranks, ratio in gathers(results).items():
        print(f"{ranks} ranks: FP8 weights gather {ratio['all']:.3f} of BF16's bytes, of the weights that go "
              f"as codes {ratio['weights']:.4f}")
    if options.json:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
        print(json.dumps({"benchmark": "zero", "machine": machine, "torch": torch.__version__,
                          "results": results | {"gathers": gathers(results)}}))


def parsed() -> argparse.Namespace:
    """The options; those without help are for the ranks that are started here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--json", action="store_true", help="print a summary as the last line")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there are two",
                        default="cuda" if torch.cuda.device_count() >= GROUP else "cpu")
    parser.add_argument("--limit-s", type=float, help="of one world: 110 on GPUs, 300 on the CPU")
    for name, kind in (("--rank", int), ("--ranks", int), ("--folder", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.limit_s = options.limit_s or (110.0 if options.device == "cuda" else 300.0)
    return options


def main() -> NoReturn:
    """Prints one row a stage and world size."""
    options = parsed()
    if options.rank is not None:
        rows = rank_main(options.rank, options.ranks, options)
        if options.rank == 0:
            Path(options.folder, "found").write_text(json.dumps(rows))
        leave(0)
    rank, results = int(os.environ.get("RANK", "0")), {}
    if rank == 0:
        print("| ranks | stage | a rank holds | allocated | a rank sends in a step |\n|---|---|---|---|---|",
              flush=True)
    if launched():
        results = rank_main(rank, int(os.environ["WORLD_SIZE"]), options)
    else:
        for ranks in WORLDS:
            if options.device == "cpu" or ranks <= max(GROUP, torch.cuda.device_count()):
                results |= world(ranks, options)
    if rank == 0:
        report(results, options)
    leave(int(any("error" in row for row in results.values())))


if __name__ == "__main__":
    main()
