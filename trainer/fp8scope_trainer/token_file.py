"""Tokens on disk, read where they lie: a file is mapped, and only the windows that are trained on are read.

With a header of ours, little-endian, then the tokens:

    bytes 0-7    FP8STOK1
    bytes 8-11   uint32: bytes of a token, 2 or 4
    bytes 12-15  uint32: vocabulary; every token is below it
    bytes 16-23  uint64: number of tokens
    bytes 24-31  zero; checked, so that another version can mean something by them

Without one (raw), the caller says what the file holds: uint8, uint16 or uint32, little-endian, and for the
latter two the vocabulary. A file of text read as uint8 is a text of bytes. Nothing is guessed: a guess that
is wrong trains on noise, and the loss falls a little anyway.

The size is checked when the file is opened; each window's tokens when it is read. A check of all of them at
the start would read the whole file, which may be larger than memory.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.errors import Invalid

MAGIC = b"FP8STOK1"
HEADER = struct.Struct("<8sIIQ8x")
DTYPES: dict[str, "np.dtype[np.unsignedinteger]"] = {
    "uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
MOST_VOCABULARY = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenFile:
    """Tokens `first` to `end` of a mapped file; slices are int64 tensors, checked as they are read."""

    path: Path
    tokens: "np.memmap[tuple[int, ...], np.dtype[np.unsignedinteger]]"
    vocabulary: int
    first: int
    end: int

    def numel(self) -> int:
        """How many there are."""
        return self.end - self.first

    def __getitem__(self, window: slice) -> Tensor:
        """int64 [window]. Raises `Invalid` at a token that is not below the vocabulary."""
        start, stop, step = window.indices(self.numel())
        read = np.asarray(self.tokens[self.first + start : self.first + stop : step]).astype(np.int64)
        wrong = np.flatnonzero(read >= self.vocabulary)
        if wrong.size:
            at = self.first + start + int(wrong[0]) * step
            raise Invalid(f"token {at} of {self.path.name}", int(read[wrong[0]]),
                          f"must be below the vocabulary of {self.vocabulary}")
        return torch.from_numpy(read)

    def part(self, first: int, end: int) -> "TokenFile":
        """Tokens `first` to `end` of this, sharing the map."""
        return TokenFile(path=self.path, tokens=self.tokens, vocabulary=self.vocabulary,
                         first=self.first + first, end=self.first + end)


def open_tokens(path: str | Path, *, dtype: str | None = None, vocabulary: int | None = None) -> TokenFile:
    """The tokens of `path`. dtype and vocabulary: of a raw file; one with a header says both itself.

    Raises `Invalid` for a file that cannot be read, is empty, cut off, or not what it is said to be.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        size = path.stat().st_size
    except OSError as error:
        raise Invalid("data", str(path), f"cannot be read ({error.strerror})") from error
    if not size:
        raise Invalid("data", str(path), "is empty")
    if head.startswith(MAGIC):
        return _with_header(path, head, size, dtype, vocabulary)
    return _raw(path, size, dtype, vocabulary)


def write_tokens(
    path: str | Path, tokens: "np.ndarray[tuple[int, ...], np.dtype[np.integer]]", *, vocabulary: int
) -> None:
    """Writes integers `tokens` [N] with a header, two bytes each if the vocabulary allows it, else four."""
    check_whole("vocabulary", vocabulary, least=1, most=MOST_VOCABULARY)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise Invalid("tokens", f"{tokens.dtype}{list(tokens.shape)}", "must be integers in one dimension")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise Invalid("tokens", (int(tokens.min()), int(tokens.max())),
                      f"must be 0 to {vocabulary - 1}, below the vocabulary")
    width = 2 if vocabulary <= 2**16 else 4
    with Path(path).open("wb") as file:
        file.write(HEADER.pack(MAGIC, width, vocabulary, tokens.size))
        tokens.astype(DTYPES[f"uint{8 * width}"]).tofile(file)


def _with_header(path: Path, head: bytes, size: int, dtype: str | None, vocabulary: int | None) -> TokenFile:
    if len(head) < HEADER.size:
        raise Invalid("data", str(path), "is cut off inside its header")
    _, width, own, count = HEADER.unpack(head)
    if any(reserved := head[24:HEADER.size]):
        raise Invalid("data", str(path), f"has {reserved.hex(' ')} in bytes 24 to 31 of its header, which "
                      "must be zero: another version wrote it, or it is damaged")
    if width not in (2, 4) or not 1 <= own <= MOST_VOCABULARY:
        raise Invalid("data", str(path), f"has a broken header: tokens of {width} bytes, vocabulary {own}")
    name = f"uint{8 * width}"
    for option, given, said in (("data_dtype", dtype, name), ("vocabulary", vocabulary, own)):
        if given is not None and given != said:
            raise Invalid(option, given, f"the header of {path} says {said}; leave the option out")
    if size != HEADER.size + count * width:
        raise Invalid("data", str(path), f"has {size} bytes where its header announces {count} tokens, "
                      f"{HEADER.size + count * width} bytes")
    return _mapped(path, name, own, count, HEADER.size)


def _raw(path: Path, size: int, dtype: str | None, vocabulary: int | None) -> TokenFile:
    if dtype not in DTYPES:
        raise Invalid("data_dtype", dtype,
                      f"must be one of {', '.join(DTYPES)} for a file without our header")
    width = DTYPES[dtype].itemsize
    if size % width:
        raise Invalid("data", str(path), f"has {size} bytes, which are no whole number of {dtype}")
    if vocabulary is None and dtype != "uint8":
        raise Invalid("vocabulary", None, f"must be given with tokens of raw {dtype}")
    most = 256 if vocabulary is None else vocabulary
    check_whole("vocabulary", most, least=1, most=MOST_VOCABULARY)
    return _mapped(path, dtype, most, size // width, 0)


def _mapped(path: Path, dtype: str, vocabulary: int, count: int, offset: int) -> TokenFile:
    if not count:
        raise Invalid("data", str(path), "holds no tokens")
    tokens = np.memmap(path, dtype=DTYPES[dtype], mode="r", offset=offset, shape=(count,))
    return TokenFile(path=path, tokens=tokens, vocabulary=vocabulary, first=0, end=count)
