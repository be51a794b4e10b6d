"""Token files: what is written is read, what is wrong is said, and a position follows from the step alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.data import batch_at, token_corpus
from fp8scope_trainer.token_file import HEADER, MAGIC, open_tokens, write_tokens

VOCABULARY = 50_000
TOKENS = np.arange(4000) * 7919 % VOCABULARY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """4,000 tokens of two bytes with a header."""
    write_tokens(tmp_path / "tokens", TOKENS, vocabulary=VOCABULARY)
    return tmp_path / "tokens"


@pytest.mark.parametrize(("vocabulary", "width"), [(50_000, 2), (65_536, 2), (65_537, 4), (200_000, 4)])
def test_what_is_written_is_read(vocabulary: int, width: int, tmp_path: Path) -> None:
    """Every token, up to the largest of the vocabulary, in as few bytes as it needs."""
    tokens = np.append(TOKENS, vocabulary - 1)
    write_tokens(tmp_path / "tokens", tokens, vocabulary=vocabulary)
    found = open_tokens(tmp_path / "tokens")
    assert (tmp_path / "tokens").stat().st_size == HEADER.size + width * tokens.size
    assert found.vocabulary == vocabulary
    assert torch.equal(found[0 : found.numel()], torch.from_numpy(tokens))


@pytest.mark.parametrize(("dtype", "largest"), [("uint8", 255), ("uint16", 40_000), ("uint32", 100_000)])
def test_a_raw_file_is_what_the_caller_says(dtype: str, largest: int, tmp_path: Path) -> None:
    """Little-endian, from its first byte on."""
    tokens = np.arange(0, largest + 1, max(1, largest // 200))
    tokens.astype(np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / "raw")
    found = open_tokens(tmp_path / "raw", dtype=dtype, vocabulary=None if dtype == "uint8" else largest + 1)
    assert torch.equal(found[0 : found.numel()], torch.from_numpy(tokens))


def test_a_token_beyond_the_vocabulary_is_named_when_it_is_read(tmp_path: Path) -> None:
    """With its place in the file, through a part of it too; windows that lack it are read."""
    TOKENS.astype("<u2").tofile(tmp_path / "raw")
    part = open_tokens(tmp_path / "raw", dtype="uint16", vocabulary=49_000).part(100, 4000)
    first = int(np.flatnonzero(TOKENS[100:] >= 49_000)[0]) + 100
    assert part[0 : first - 100].numel() == first - 100
    with pytest.raises(Invalid, match=f"token {first} of raw = {TOKENS[first]}: must be below the vocab"):
        part[0:3000]


@pytest.mark.parametrize(("content", "options", "said"), [
    (b"", {}, "is empty"),
    (b"some text", {}, "must be one of uint8, uint16, uint32 for a file without our header"),
    (b"odd", {"dtype": "uint16", "vocabulary": 9}, "has 3 bytes, which are no whole number of uint16"),
    (b"even", {"dtype": "uint16"}, "vocabulary = None: must be given with tokens of raw uint16"),
    (MAGIC, {}, "is cut off inside its header"),
    (HEADER.pack(MAGIC, 3, 9, 2), {}, "has a broken header: tokens of 3 bytes"),
    (HEADER.pack(MAGIC, 2, 9, 2) + b"abc", {}, "has 35 bytes where its header announces 2 tokens, 36 bytes"),
    (HEADER.pack(MAGIC, 2, 9, 0), {}, "holds no tokens"),
    (HEADER.pack(MAGIC, 2, 9, 1)[:-1] + b"\x07ab", {}, "00 07 in bytes 24 to 31 of its header"),
    (HEADER.pack(MAGIC, 2, 9, 1) + b"ab", {"vocabulary": 8}, "says 9; leave the option out"),
    (HEADER.pack(MAGIC, 2, 9, 1) + b"ab", {"dtype": "uint32"}, "says uint16; leave the option out"),
])
def test_a_file_that_is_not_what_it_should_be_is_refused(
    content: bytes, options: dict[str, object], said: str, tmp_path: Path
) -> None:
    """When it is opened, by what is wrong with it."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(Invalid, match=said):
        open_tokens(tmp_path / "file", **options)  # type: ignore[arg-type]


def test_what_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    """Nor can a folder."""
    with pytest.raises(Invalid, match="No such file"):
        open_tokens(tmp_path / "missing")
    with pytest.raises(Invalid, match="Is a directory"):
        open_tokens(tmp_path)


@pytest.mark.parametrize("tokens", [np.array([3, 9]), np.array([-1, 3]), np.array([[1, 2]]), np.array([0.5])])
def test_what_is_no_token_is_not_written(tokens: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
                                         tmp_path: Path) -> None:
    """And no file is left."""
    with pytest.raises(Invalid):
        write_tokens(tmp_path / "tokens", tokens, vocabulary=9)
    assert not (tmp_path / "tokens").exists()


def test_the_held_out_part_is_never_trained_on(file: Path) -> None:
    """An epoch reads the first 19 of 20 parts and nothing else."""
    corpus = token_corpus(open_tokens(file))
    read = [int(batch_at(corpus.train, step=s, batch=1, length=16)[0][0, 0]) for s in range(237)]
    assert sorted(read) == sorted(TOKENS[: 3800 - 16 : 16].tolist())
    assert torch.equal(corpus.held_out[0:200], torch.from_numpy(TOKENS[3800:]))


def test_a_new_process_reads_at_a_step_what_the_old_one_would_have_read(file: Path) -> None:
    """The position is a function of the step: nothing has to be saved or skipped to resume."""
    corpus = token_corpus(open_tokens(file))
    unbroken = [batch_at(corpus.train, step=s, batch=2, length=16, seed=5)[0].tolist() for s in range(9)]
    code = (
        "import json, sys; from fp8scope_trainer.data import batch_at, token_corpus; "
        "from fp8scope_trainer.token_file import open_tokens; "
        "text = token_corpus(open_tokens(sys.argv[1])).train; "
        "print(json.dumps([batch_at(text, step=s, batch=2, length=16, seed=5)[0].tolist() "
        "for s in range(6, 9)]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True,
                          timeout=120)
    assert json.loads(done.stdout) == unbroken[6:]
