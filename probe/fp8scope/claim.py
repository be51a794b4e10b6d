"""Claims on a spool's folder: one process writes it, one sends it. A claim ends with its process.

An attempt's folder also has a place in the order in which the run's attempts began. It is counted, not read
from a clock, which may have been set back in between.
"""

import fcntl
import os
from pathlib import Path

WRITER = "lock"
"""Held by the job whose probe fills the folder; its content is the attempt's place in the order."""
SENDER = "sending"
"""Held by whoever brings the folder's batches to the collector."""
COMMANDS = "commands.json"
"""What the sender of an offline job's batches leaves for it (letterbox.py)."""


def claim(folder: Path, role: str) -> int:
    """Take `role` in `folder`; the descriptor to close. `BlockingIOError` while a living process has it."""
    descriptor = os.open(folder / role, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError as error:
        os.close(descriptor)
        why = f"its file system gives no locks (flock: {error.strerror}); choose another with FP8SCOPE_SPOOL"
        raise OSError(error.errno, why) from None
    return descriptor


def claimed(folder: Path, *roles: str) -> bool:
    """True while a living process, this one included, has one of `roles` in `folder`."""
    for role in roles:
        try:
            os.close(claim(folder, role))
        except BlockingIOError:
            return True
    return False


def in_use(path: Path) -> bool:
    """True while another process sends from the file at `path`."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def enter_order(folder: Path, descriptor: int) -> None:
    """Put a new attempt's folder, claimed by `descriptor`, behind those of its run."""
    if os.fstat(descriptor).st_size == 0:
        siblings = (path.parent for path in folder.parent.parent.glob(f"*/*/{WRITER}"))
        os.pwrite(descriptor, b"%d" % (1 + max(map(place, siblings), default=0)), 0)


def place(folder: Path) -> int:
    """The place of `folder` in the order of its run's attempts; 0 where it has none."""
    try:
        return int((folder / WRITER).read_bytes() or b"0")
    except (OSError, ValueError):
        return 0


def remove_folder(folder: Path, *, levels: int = 3) -> None:
    """Remove an empty spool and what it leaves empty above it; stops at the first that is in use."""
    for name in (WRITER, SENDER, COMMANDS):
        (folder / name).unlink(missing_ok=True)
    try:
        for path in (folder, *folder.parents)[:levels]:
            path.rmdir()
    except OSError:
        return  # rejected batches, or another attempt
