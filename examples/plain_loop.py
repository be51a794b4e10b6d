"""A training loop of one's own: FSDP2, gradient accumulation, clipping; watched by fp8scope.

    pip install fp8scope
    fp8scope up &                  # or: export FP8SCOPE_COLLECTOR=offline
    python examples/plain_loop.py
    torchrun --nproc-per-node 2 examples/plain_loop.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

import fp8scope

STEPS, MICRO_BATCHES, CLIP = 20, 2, 1.0
VOCABULARY, WIDTH, HEADS, LENGTH = 256, 128, 4, 64


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + y


def sharded_model(device: torch.device) -> nn.Sequential:
    """A decoder with every block sharded by itself."""
    blocks = [Block() for _ in range(2)]
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, head).to(device)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def main() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():  # without torchrun
        os.environ.setdefault(name, value)
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = sharded_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    with fp8scope.attach(model, optimizer, run="example-plain-loop", every=5) as scope:  # after sharding
        for step in range(STEPS):
            for micro in range(MICRO_BATCHES):
                assert isinstance(model, FSDPModule)
                model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
                half = torch.randint(VOCABULARY, (4, LENGTH // 2), device=device)
                tokens = half.repeat_interleave(2, dim=1)
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
                scope.log(loss=loss.detach())  # a mean over the micro-batches; nothing waits for the device
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            scope.step(step, grad_norm=norm)  # the norm before clipping
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
