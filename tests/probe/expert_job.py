"""One rank of a small expert-parallel job, and the same job in one process; run by test_experts.py."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8scope
from fp8scope_protocol.commands import Precision

WIDTH, EXPERTS, TOKENS, STEPS = 32, 4, 64, 3
IDLE = 3
"""An expert that no token reaches."""


class Switched(nn.Linear):
    """Says that it can be switched; what it computes does not matter here."""

    precision: Precision = "fp8"

    def set_precision(self, precision: Precision) -> None:
        self.precision = precision


class Gathered(torch.autograd.Function):
    """Every rank's tokens [n, WIDTH] on every rank; the gradients of all of them come back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (dy,) = gradients
        dy = dy.contiguous().clone()
        dist.all_reduce(dy)
        return dy.chunk(dist.get_world_size())[dist.get_rank()]


class Experts(nn.Module):
    """`dense` on the rank's own tokens, then the experts `mine` on all ranks' tokens that are theirs."""

    def __init__(self, mine: range, *, dense: bool = True, local_names: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        everywhere = Switched(WIDTH, WIDTH)
        whole = [Switched(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.mine = mine
        if dense:
            self.dense = everywhere
        self.experts = nn.ModuleDict({
            str(i - mine.start if local_names else i): whole[i] for i in mine})

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "dense"):
            x = torch.tanh(self.dense(x))
        if dist.is_initialized():
            x = Gathered.apply(x)  # type: ignore[no-untyped-call]
        owner = torch.arange(len(x)) % (EXPERTS - 1)
        outputs = [expert(x[owner == i]) for i, expert in zip(self.mine, self.experts.values(), strict=True)]
        return torch.cat(outputs).square().sum() / TOKENS


@dataclass(frozen=True)
class Job:
    """What both ranks do. `folder` is where they meet."""

    folder: str
    dense: bool = True
    local_names: bool = False
    collector: str = "offline"
    steps: int = STEPS
    until_switched: bool = False
    """Run until a layer is in bf16, instead of `steps`."""


def train_expert_rank(rank: int, job: Job) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=rank, world_size=2)
    mine = range(2 * rank, 2 * rank + 2)
    model = Experts(mine, dense=job.dense, local_names=job.local_names)
    rename = None
    if job.local_names:
        def rename(name: str) -> str:
            head, _, tail = name.partition("experts.")
            number, _, rest = tail.partition(".")
            return f"experts.{mine[int(number)]}.{rest}".removesuffix(".") if tail else head
    train(model, job, rename)
    dist.destroy_process_group()


def train(model: Experts, job: Job, rename: Any = None) -> None:
    """Gradients of what both ranks hold are summed, as their losses are parts of one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alone = not dist.is_initialized()
    with fp8scope.attach(model, optimizer, run="experts", every=1, detail_every=1, collector=job.collector,
                         remote_control=True, budget=None, rename=rename) as scope:
        for step in range(job.steps):
            tokens = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = model(tokens if alone else tokens.chunk(2)[dist.get_rank()])
            loss.backward()
            if not alone and hasattr(model, "dense"):
                for parameter in model.dense.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            scope.log(loss=loss.detach() * (1 if alone else 2))
            if job.until_switched and _switched(model):
                break


def _switched(model: nn.Module) -> bool:
    """Whether a layer is in bf16, on any rank."""
    found = torch.tensor(float(any(
        one.precision != "fp8" for one in model.modules() if isinstance(one, Switched))))
    dist.all_reduce(found)
    return bool(found)
