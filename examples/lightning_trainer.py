"""A small language model in Lightning's Trainer, watched by fp8scope.

    pip install fp8scope lightning
    fp8scope up &                  # or: export FP8SCOPE_COLLECTOR=offline
    python examples/lightning_trainer.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fp8scope.lightning import ScopeCallback

VOCABULARY, CONTEXT, WIDTH = 256, 8, 64


class NextToken(LightningModule):
    """Predicts a token from the CONTEXT tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(CONTEXT * WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, target = batch
        hidden = self.down(nn.functional.gelu(self.up(self.embedding(tokens).flatten(1))))
        return nn.functional.cross_entropy(self.head(hidden), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (4096, CONTEXT))
    data = DataLoader(TensorDataset(tokens, tokens[:, 0]), batch_size=64)
    trainer = Trainer(
        max_steps=30, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ScopeCallback(run="example-lightning", every=5)],
    )
    trainer.fit(NextToken(), data)


if __name__ == "__main__":
    main()
