"""A small Llama in the Trainer of transformers, watched by fp8scope.

    pip install fp8scope transformers accelerate
    fp8scope up &                  # or: export FP8SCOPE_COLLECTOR=offline
    python examples/huggingface_trainer.py
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fp8scope.huggingface import ScopeCallback


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences in which every other token repeats the one before it."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        half = torch.randint(vocabulary, (rows, length // 2), generator=torch.Generator().manual_seed(0))
        self.tokens = half.repeat_interleave(2, dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                         num_attention_heads=4, max_position_embeddings=64, use_cache=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        )
        Trainer(
            LlamaForCausalLM(config), arguments, train_dataset=Tokens(256, 64, config.vocab_size),
            callbacks=[ScopeCallback(run="example-huggingface", every=5)],
        ).train()


if __name__ == "__main__":
    main()
