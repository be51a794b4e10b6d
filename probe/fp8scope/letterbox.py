"""A letterbox: commands for an offline job, left in its spool by whoever forwards it.

`fp8scope sync` writes what the collector says still waits; the job's probe looks after spooling a step, at
most every few seconds. Reports go back as they always do, in batches.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from fp8scope.claim import COMMANDS
from fp8scope_protocol.commands import Command

LOG = logging.getLogger("fp8scope")


class Letterbox:
    """One folder's. `add` and `known` are for the process that forwards, `read` for the job."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / COMMANDS
        self._seen: tuple[int, int] | None = None  # inode and time of what was read last
        self._known = max((command.id for command in self.read()), default=0)
        self._seen = None

    @property
    def known(self) -> int:
        """Highest id that was left."""
        return self._known

    def add(self, commands: Iterable[Command]) -> None:
        """Leave `commands`, if one of them is new, instead of those before."""
        waiting = list(commands)
        newest = max((command.id for command in waiting), default=0)
        if newest <= self._known:
            return
        draft = self._path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(waiting))
        draft.chmod(0o600)
        os.replace(draft, self._path)
        self._known = newest

    def read(self) -> list[Command]:
        """What was left since the last call; all of it, again, when anything changed."""
        try:
            status = self._path.stat()
            if self._seen == (seen := (status.st_ino, status.st_mtime_ns)):
                return []
            commands = decode_commands(self._path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            LOG.warning("fp8scope: commands in %s cannot be read: %s", self._path, error)
            return []
        self._seen = seen
        return commands


def reader(box: Letterbox, deliver: Callable[[list[Command]], None], *, seconds: float) -> Callable[[], None]:
    """A call that hands new commands to `deliver`, looking at most every `seconds`."""
    due = time.monotonic()

    def look() -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + seconds
            deliver(box.read())

    return look


def decode_commands(data: bytes) -> list[Command]:
    """Commands in the collector's answer, without those of a kind this probe does not know."""
    commands, unknown, why = [], 0, ""
    try:
        found = msgspec.json.decode(data, type=list[msgspec.Raw])
    except RecursionError as error:
        raise msgspec.DecodeError(str(error)) from None
    for raw in found:
        try:
            commands.append(msgspec.json.decode(raw, type=Command))
        except (msgspec.ValidationError, RecursionError) as error:
            unknown, why = unknown + 1, str(error)
    if unknown:
        LOG.warning("fp8scope: %d command(s) ignored, this probe does not understand them: %s", unknown, why)
    return commands
