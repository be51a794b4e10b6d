"""What a ZeRO stage holds and sends: measured on real ranks, beside the theory.

    python benchmarks/zero.py [--quick] [--json]

The reference decoder on 2 and on 4 gloo ranks of the CPU, one optimizer step of two micro-batches after a
first one. Held: bytes of a rank in parameters, gradients (the most between two backward passes) and fp32
moments. Sent: bytes of a rank in a step by kind of collective, by the ring (see communication.py). N is the
number of parameters; theory is 4N for each of parameters, gradients and the two moments, over the ranks
where a stage shards them. The ratios are measured / theory. "FP8 weights" gathers codes and scales of the
layers whose rows divide into 128 for each rank, all else in BF16.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fp8scope_protocol.formats import TILE
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.communication import Traffic, expected_traffic
from fp8scope_trainer.convert import convert
from fp8scope_trainer.decoder import Decoder, DecoderConfig, demo
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.memory import model_state
from fp8scope_trainer.mesh import training_mesh
from fp8scope_trainer.shard import micro_batch, shard

ACCUMULATE, LENGTH = 2, 16
STAGES: tuple[int | str, ...] = (0, 1, 2, 3, "HYBRID_SHARD")
BF16, CODES = "3, gathered in BF16", "3, FP8 weights"
"""Rows of stage 3 with FP8 layers, and what their weights are gathered as."""
SMALL = DecoderConfig(width=128, layers=2, heads=2, kv_heads=2, head_width=64, hidden=128, context=LENGTH)


def measured(name: int | str, ranks: int, config: DecoderConfig) -> dict[str, Any]:
    """One rank: bytes held and sent in the second step, and what they should be."""
    torch.manual_seed(0)
    stage, low = (3, True) if name in (BF16, CODES) else (name, False)
    model: nn.Module = Decoder(config)
    if low:
        convert(model)
    n = sum(p.numel() for p in model.parameters())
    mesh = training_mesh("cpu", stage, group=2 if stage == "HYBRID_SHARD" else None)
    shards = mesh["shard"].size()
    codes = sum(m.weight.numel() for m in model.modules() if isinstance(m, Fp8Linear)
                and m.weight.shape[0] % (TILE * shards) == 0) if name == CODES else 0
    shard(model, stage=stage, mesh=mesh, compute=torch.bfloat16 if low else None, fp8_gather=name == CODES)
    optimizer = AdamW(parameter_groups(model, states="fp32"))
    for _ in range(2):
        gradients = 0
        with Traffic() as traffic:
            for i in range(ACCUMULATE):
                micro_batch(model, stage=stage, last=i == ACCUMULATE - 1)
                tokens = torch.randint(256, (1, LENGTH))
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                torch.autograd.backward(loss)
                gradients = max(gradients, model_state(model, optimizer).gradients)
            optimizer.step()
        held = model_state(model, optimizer)
        optimizer.zero_grad()
    gathered = 2 * (n - codes) + codes * (1 + 4 / TILE**2) if low else 4 * n
    theory = expected_traffic(stage, gathered_bytes=gathered, reduced_bytes=4 * n, shard=shards,
                              replicate=ranks // shards, accumulate=ACCUMULATE)
    return {
        "n": n,
        "held": {"parameters": held.parameters, "gradients": gradients, "states": held.states},
        "held_theory": {"parameters": 4 * n / shards, "states": 8 * n / shards,
                        "gradients": 4 * n / (1 if stage == 1 else shards)},
        "sent": {kind: volume.sent_bytes for kind, volume in traffic.volumes.items()},
        "sent_theory": theory,
    }


def rank_main(rank: int, ranks: int, folder: str, quick: bool) -> None:
    """One rank of one world; rank 0 writes what it found."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    config = SMALL if quick else demo()
    found = {str(stage): measured(stage, ranks, config) for stage in (*STAGES, BF16, CODES)
             if stage != "HYBRID_SHARD" or ranks > 2}
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo's threads outlive the interpreter's teardown


def world(ranks: int, quick: bool) -> dict[str, Any]:
    """What rank 0 of `ranks` processes found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, "--ranks", str(ranks)]
        jobs = [subprocess.Popen([*command, "--rank", str(rank), *(["--quick"] if quick else [])],
                                 env=os.environ | {"OMP_NUM_THREADS": "1"}) for rank in range(ranks)]
        codes = [job.wait() for job in jobs]
        if any(codes):
            raise SystemExit(f"a rank of {ranks} failed")
        found: dict[str, Any] = json.loads(Path(folder, "found").read_text())
        return found


def cells(found: dict[str, float], theory: dict[str, float], n: int) -> str:
    """`name 4.00N (x1.000)`, for each name of either."""
    return ", ".join(
        f"{name} {found.get(name, 0) / n:.2f}N"
        + (f" (x{found.get(name, 0) / theory[name]:.3f})" if name in theory else "")
        for name in sorted({*found, *theory}))


def main() -> int:
    """Prints one row a stage and world size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--json", action="store_true", help="print a summary as the last line")
    for name, kind in (("--rank", int), ("--ranks", int), ("--folder", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.ranks, options.folder, options.quick)
    results: dict[str, Any] = {}
    print("| ranks | stage | a rank holds | a rank sends in a step |\n|---|---|---|---|")
    for ranks in (2, 4):
        for stage, row in world(ranks, options.quick).items():
            results[f"{stage} on {ranks}"] = row
            print(f"| {ranks} | {stage} | {cells(row['held'], row['held_theory'], row['n'])} "
                  f"| {cells(row['sent'], row['sent_theory'], row['n'])} |", flush=True)
    if options.json:
        print(json.dumps({"benchmark": "zero", "machine": platform.processor() or platform.machine(),
                          "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
