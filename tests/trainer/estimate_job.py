"""One rank of test_estimate.py: `python estimate_job.py RANK RANKS STORE OUTPUT`; counts real bytes."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.decoder import Decoder, DecoderConfig
from fp8scope_trainer.processes import leave
from fp8scope_trainer.shard import shard
from fp8scope_trainer.state_block import FORMATS

CONFIG = DecoderConfig(width=256, layers=2, heads=4, kv_heads=2, head_width=64, hidden=512, context=64)
BATCH = 2


def measured(states: str, *, precision: str, ranks: int) -> dict[str, int]:
    """Bytes of this rank after one step's backward and after the step."""
    torch.manual_seed(0)
    model: nn.Module = Decoder(CONFIG)
    if precision != "fp32":
        convert(model, Conversion(precision="fp8" if precision == "fp8" else "bf16"))
    compute = None if precision == "fp32" else torch.bfloat16
    shard(model, stage=2 if ranks > 1 else 0, compute=compute if ranks > 1 else None)
    optimizer = AdamW(parameter_groups(model, states=states))
    tokens = torch.randint(256, (BATCH, CONFIG.context))
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    gathered = [one for module in model.modules() for one in outputs(module)]
    weights = {one.untyped_storage().data_ptr() for one in (*gathered, *map(local, model.parameters()))}
    saved = [one for pointer, one in kept.items() if pointer not in weights]
    torch.autograd.backward(loss)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = {"weights": size(model.parameters()), "gradients": size(gradients),
             "gathered weights": size(gathered),
             "saved": sum(one.untyped_storage().nbytes() for one in saved)}
    optimizer.step()
    held = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return found | {"states": size(held)}


def outputs(module: nn.Module) -> list[Tensor]:
    """What FSDP2 has gathered for `module`, if it is one of its units."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [one for p in group.fsdp_params for one in p.all_gather_outputs]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size(tensors: Iterable[Tensor]) -> int:
    return sum(local(one).nbytes for one in tensors)


def main(rank: int, ranks: int, store: str, output: str) -> None:
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = {f"{states} {precision}": measured(states, precision=precision, ranks=ranks)
             for states in FORMATS for precision in ("fp32", "bf16", "fp8")
             if states == "fp32" or precision == "fp32"}
    Path(f"{output}.{rank}").write_text(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    leave(0)
