"""What is trained on: a token file, or the Python standard library's own sources.

The latter are bytes: real, always there, no download. Every file is used in the order of its path; every 20th
is held out. Of a token file the last 20th is.

A window of the training text is found from the number of the sample alone: the position in the data is a
function of the step, a run resumes at its exact place without a state to save, and two ranks with two samples
each read what one rank with four would.
"""

import os
import sysconfig
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.token_file import TokenFile

HELD_OUT_EVERY = 20
SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"})


class Text(Protocol):
    """Tokens in one dimension: a tensor, or a file that is read where it lies."""

    def numel(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, window: slice, /) -> Tensor:
        """Integers [window]."""
        ...


Some = TypeVar("Some", bound=Text, covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corpus(Generic[Some]):
    """Two texts."""

    train: Some
    held_out: Some


def token_corpus(tokens: TokenFile) -> Corpus[TokenFile]:
    """All but the last 20th of `tokens`, and that."""
    cut = tokens.numel() - max(1, tokens.numel() // HELD_OUT_EVERY)
    return Corpus(train=tokens.part(0, cut), held_out=tokens.part(cut, tokens.numel()))


def standard_library(*, limit: int | None = None) -> Corpus[Tensor]:
    """The sources under the interpreter's `stdlib` path as uint8, at most `limit` bytes to train on."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out, size = [], [], 0
    for number, path in enumerate(_sources(root)):
        text = path.read_bytes()
        if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1:
            held_out.append(text)
            continue
        train.append(text)
        size += len(text)
        if limit is not None and size >= limit and held_out:
            break
    if not train or not held_out:
        raise Invalid("stdlib", str(root), f"needs at least {HELD_OUT_EVERY} .py files to read text from")
    return Corpus(train=_bytes(b"".join(train)[:limit]), held_out=_bytes(b"".join(held_out)))


def batch_at(
    text: Text, *, step: int, batch: int, length: int, rank: int = 0, ranks: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs and next-token targets, both int64 [batch, length], of `rank` at `step`.

    Samples are numbered over all ranks and steps. Sample i reads window (i stride + seed) mod windows, with
    a stride near the golden section of the count and coprime to it: each window once before any twice, and
    neighbours in time far apart in the text.
    """
    windows = (text.numel() - 1) // length
    if windows < 1:
        raise Invalid("length", length, f"must be below the text's {text.numel()} tokens")
    stride = _coprime_stride(windows)
    first = (step * ranks + rank) * batch
    starts = [((first + i) * stride + seed * 7919) % windows * length for i in range(batch)]
    chunks = torch.stack([text[s : s + length + 1] for s in starts]).long()
    return chunks[:, :-1], chunks[:, 1:]


def _sources(root: Path) -> list[Path]:
    """Every .py file below `root`, sorted by its path in POSIX form, so the order is the same anywhere."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _coprime_stride(windows: int) -> int:
    stride = max(1, round(windows * 0.6180339887))
    while gcd(stride, windows) != 1:
        stride += 1
    return stride


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
