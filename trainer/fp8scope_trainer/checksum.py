"""A checksum of every file of a checkpoint: taken as the file is written, compared before anything is loaded.

CRC-32, of zlib: it finds each change of up to 32 bits in a row, and of other damage all but one in 4 billion.
It is no protection from somebody who changes a file on purpose. The rank that writes a file sums the bytes
that it hands over, so saving reads nothing back; loading reads each file once more, the ranks in turns.

Rejected: what zip archives hold of their own (DCP's files are many in a row; torch writes their CRC-32 and
does not look at it, and nothing covers what lies between); BLAKE2 (a fifth of the speed).
"""

import io
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.checkpoint_progress import Meter

CHUNK = 2**22
"""Bytes that are read at a time."""


class SummedFile(io.BufferedWriter):
    """A new file that is written from its start to its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.crc32 = 0
        """Of all bytes so far."""

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)


class SummedFiles(FileSystem):
    """What DCP writes through; `checksums` has the name and the checksum of each file that is finished."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with SummedFile(Path(path)) as written:
            yield cast(io.IOBase, written)
        self.checksums[Path(path).name] = _shown(written.crc32)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


def check(folder: Path, checksums: dict[str, str], *, name: str, rank: int = 0, ranks: int = 1) -> None:
    """Reads this rank's share of the files in `folder`; `Invalid` for one that is not as it was written.

    checksums: of each file that has one. name: of what is being done, where it takes long.
    """
    own = sorted(checksums)[rank::ranks]
    with Meter(name) as meter:
        meter.total = sum((folder / one).stat().st_size for one in own)
        for one in own:
            if (found := _of_file(folder / one, meter)) != checksums[one]:
                raise Invalid("checkpoint", str(folder), f"its file {one} has CRC-32 {found} and should have "
                              f"{checksums[one]}: it has changed since it was written; copy it again, or "
                              "load an older checkpoint")


def _of_file(path: Path, meter: Meter) -> str:
    total, buffer = 0, memoryview(bytearray(CHUNK))
    try:
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                total = zlib.crc32(buffer[:size], total)
                meter.add(size)
    except OSError as error:
        raise Invalid("checkpoint", str(path), f"cannot be read: {error.strerror}") from error
    return _shown(total)


def _shown(crc32: int) -> str:
    return f"{crc32:08x}"
