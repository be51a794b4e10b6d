"""One rank of the jobs of test_mesh.py: `python mesh_job.py RANK RANKS STORE OUTPUT`.

Also imported by the test, for the same work in one process.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.lion import Lion
from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.state_block import FORMATS

SHAPES = ((33, 200), (3, 2048), (5, 7, 130), (9, 16, 5, 6), (7,))
"""Four ranks hold 9, 9, 9 and 6 of 33 rows; one has none of 3 rows, one of 5 experts, one of 7 elements."""
OPTIMIZERS = {"adamw": AdamW, "lion": Lion}
JOBS = [("adamw", states) for states in FORMATS] + [("lion", "int8")]


def stepped(*, ranks: int, rule: str, states: str) -> dict[str, Tensor]:
    """Four steps with the same gradients on any mesh; half of the weights are bf16 and warm up in two steps.

    This rank's states and weights, flattened, by shape, dtype and key.
    """
    generator = torch.Generator().manual_seed(1)
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = torch.randn(shape, generator=generator).to(dtype)
        return whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])

    kinds = [(shape, dtype) for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES]
    parameters = [nn.Parameter(random(*kind)) for kind in kinds]
    groups = [{"params": parameters[:len(SHAPES)]},
              {"params": parameters[len(SHAPES):], "warmup_steps": 2}]
    optimizer: StateOptimizer = OPTIMIZERS[rule](groups, lr=1e-2, states=states)
    for _ in range(4):
        for parameter, kind in zip(parameters, kinds, strict=True):
            parameter.grad = random(*kind)
        optimizer.step()
    found = {}
    for parameter, kind in zip(parameters, kinds, strict=True):
        state = optimizer.state[parameter]
        for key, value in (*state.items(), ("weight", parameter.detach())):
            if key != "step":
                assert mesh is None or value.placements == (Shard(0),)
                found[f"{kind} {key}"] = local(value).reshape(-1).view(torch.uint8)
    return found


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(rank: int, ranks: int, store: str, output: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    results = {f"{rule} {states}": stepped(ranks=ranks, rule=rule, states=states)
               for rule, states in JOBS}
    torch.save(results, f"{output}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
