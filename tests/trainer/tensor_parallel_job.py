"""One rank of the jobs of test_tensor_parallel_states.py: `python tensor_parallel_job.py RANK RANKS FOLDER`.

The same steps on whole parameters and on parts; each rank compares what it holds with that part of the whole.
Prints what differs, and ends with 1. In FOLDER a checkpoint of the parts is left, in fp8. Also imported by
the test, for the same steps on whole parameters.
"""

import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.checkpoint import load, save
from fp8scope_trainer.lion import Lion
from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.sgd import SGD

JOBS: tuple[tuple[Any, str, int | None], ...] = (
    (AdamW, "fp8", None), (AdamW, "int8", 256), (AdamW, "int4", 64), (AdamW, "int16", 256),
    (AdamW, "bf16", None), (AdamW, "fp32", None), (Lion, "int8", 256), (SGD, "fp8", None))


class Case(NamedTuple):
    """One parameter: its shape, and how it is cut over `tensor` and by FSDP (None: not) over `shard`."""

    shape: tuple[int, ...]
    tensor: int
    shard: int | None = None
    reason: str = ""
    """Part of the one why states in the formats `refused` stay fp32."""
    refused: tuple[str, ...] = ()


INT = ("int8", "int16")
TWO: tuple[Case, ...] = (
       Case((32, 512), 1), Case((33, 512), 0), Case((4, 16, 512), 1), Case((4, 16, 512), 2),
       Case((16, 64, 4, 4), 1),
       Case((32, 300), 1, None, "has 300 columns, cut into 2 parts", ("fp8", *INT, "int4")),
       Case((16, 64, 4, 4), 3, None, "more than one run of columns", ("fp8", *INT, "int4", "bf16")))
FOUR: tuple[Case, ...] = (
        Case((36, 512), 1, 0), Case((36, 512), 0, 0), Case((4, 16, 512), 1, 0), Case((4, 16, 512), 2, 1),
        Case((6, 2048), 1, 1), Case((36, 640), 1, 0, "has 640 columns, cut into 2 parts", ("fp8", *INT)))


class Holder(nn.Module):
    """One parameter, for FSDP."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def cut(whole: Tensor, case: Case, mesh: DeviceMesh) -> nn.Parameter:
    """As tensor parallelism and then FSDP do."""
    if case.shard is None:
        return nn.Parameter(distribute_tensor(whole, mesh, [Shard(case.tensor)]))
    module = Holder(distribute_tensor(whole, mesh["tensor"], [Shard(case.tensor)]))
    dimension = case.shard
    fully_shard(module, mesh=mesh["shard"], shard_placement_fn=lambda one: Shard(dimension))
    return module.weight


def mine(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a tensor that is cut as `like` is."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)
    for dimension, (size, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dimension, start, size)
    return whole.contiguous()


def parted(whole: Tensor, like: DTensor) -> DTensor:
    """`whole`, cut as `like` is."""
    return DTensor.from_local(mine(whole, like), like.device_mesh, like.placements, run_check=False,
                              shape=whole.shape, stride=whole.stride())


class Run:
    """Four steps, of which two are a warm-up for half of the parameters; of parts if there is a mesh."""

    def __init__(self, cases: tuple[Case, ...], job: tuple[Any, str, int | None],
                 mesh: DeviceMesh | None = None) -> None:
        make, states, block = job
        self.kinds = [(case, dtype) for dtype in (torch.float32, torch.bfloat16) for case in cases
                      if not case.reason or dtype == torch.float32]
        generator = torch.Generator().manual_seed(3)
        starts = [torch.randn(case.shape, generator=generator).to(dtype) for case, dtype in self.kinds]
        self.parameters = [nn.Parameter(start) if mesh is None else cut(start, case, mesh)
                           for start, (case, _) in zip(starts, self.kinds, strict=True)]
        self.model = nn.ParameterList(self.parameters)
        groups = [{"params": self.parameters[:len(cases)]},
                  {"params": self.parameters[len(cases):], "warmup_steps": 2}]
        self.optimizer: StateOptimizer = make(groups, lr=1e-2, states=states, block=block)
        self.generator = generator

    def train(self) -> None:
        for _ in range(4):
            for parameter, (case, dtype) in zip(self.parameters, self.kinds, strict=True):
                gradient = torch.randn(case.shape, generator=self.generator).to(dtype)
                like = parameter.detach()
                parameter.grad = parted(gradient, like) if isinstance(like, DTensor) else gradient
            self.optimizer.step()


def compared(whole: Run, part: Run, states: str) -> list[str]:
    """What this rank holds that is not that part of the whole."""
    found = []
    reasons = {int(one.name): one.reason for one in part.optimizer.exceptions}
    for number, (case, dtype) in enumerate(whole.kinds):
        title = f"{type(whole.optimizer).__name__} {states} {case} {dtype}"
        refused = states in case.refused
        if (number in reasons) != refused or (refused and case.reason not in reasons[number]):
            found.append(f"{title}: {reasons.get(number)}")
        if not refused:
            pair = [run.parameters[number] for run in (whole, part)]
            found += [f"{title}: {key}" for key in
                      differences([whole.optimizer, part.optimizer], pair[0], pair[1])]
    return found


def differences(both: list[StateOptimizer], whole: Tensor, part: Tensor) -> list[str]:
    """Names of what is not that part of the whole, to the bit."""
    wanted, state = both[0].state[whole], both[1].state[part]
    if wanted.keys() != state.keys():
        return [f"{sorted(state)} for {sorted(wanted)}"]
    pairs = {key: (wanted[key], state[key]) for key in wanted if key != "step"}
    pairs["weight"] = whole.detach(), part.detach()
    return [key for key, (a, b) in pairs.items() if not isinstance(b, DTensor)
            or a.shape != b.shape or not torch.equal(raw(mine(a, b)), raw(b.to_local()))]


def saved_and_loaded(folder: str, cases: tuple[Case, ...], mesh: DeviceMesh) -> list[str]:
    """What differs after a checkpoint of trained parts was loaded into others."""
    whole, part, other = Run(cases, JOBS[0]), Run(cases, JOBS[0], mesh), Run(cases, JOBS[0], mesh)
    whole.train()
    part.train()
    save(folder, part.model, part.optimizer, step=4)
    load(folder, other.model, other.optimizer)
    return [f"loaded: {one}" for one in compared(whole, other, "fp8")]


def possible(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Those that can have states in any format."""
    return tuple(case for case in cases if not case.refused)


def raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def main(rank: int, ranks: int, folder: str) -> int:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    if ranks == 2:
        cases, mesh = TWO, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    else:
        cases, mesh = FOUR, init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    found = []
    for job in JOBS:
        whole, part = Run(cases, job), Run(cases, job, mesh)
        whole.train()
        part.train()
        found += compared(whole, part, job[1])
    norms = [run.optimizer.clip_gradients(1.0) for run in (whole, part)]
    if abs(norms[0] / norms[1] - 1) > 1e-6:
        found.append(f"norms of gradients: {norms}")
    found += saved_and_loaded(f"{folder}/saved", possible(cases), mesh)
    print("\n".join(found))
    dist.destroy_process_group()
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
