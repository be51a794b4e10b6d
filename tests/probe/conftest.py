"""A scripted collector in a process of its own (peer.py), for tests of the probe's transport."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fp8scope.spool import adopt
from fp8scope_protocol.series import Series, decode_layout
from fp8scope_protocol.wire import Batch, BatchHeader, Hello, decode_batch, decode_hello, is_missing

PATIENCE = 30.0
"""Seconds until a test gives up waiting for something that must happen."""


def wait_until(true: Callable[[], bool]) -> None:
    """Return as soon as `true()`; fail after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


class Peer:
    """Starts and stops peer.py, and reads what it wrote down."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def write(self, name: str, content: Any) -> None:
        """Put a script, a rule or commands where the peer reads them."""
        temporary = self.folder / (name + ".new")
        temporary.write_text(json.dumps(content))
        temporary.rename(self.folder / name)

    def start(self) -> None:
        """Run the peer; returns when it accepts connections."""
        command = [sys.executable, str(Path(__file__).parent / "peer.py"), str(self.folder), str(self.port)]
        self.process = subprocess.Popen(command)
        wait_until(self._accepts)

    def stop(self) -> None:
        """Kill the peer; its journal stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def journal(self, **wanted: Any) -> list[dict[str, Any]]:
        """Requests so far that agree with `wanted`, in order."""
        path = self.folder / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [one for one in entries if all(one.get(key) == value for key, value in wanted.items())]

    def stored(self) -> list[int]:
        """Sequence numbers of stored batches, in the order they were stored first."""
        return [one["seq"] for one in self.journal(status=200, duplicate=False)]

    def batches(self) -> list[Batch]:
        """Stored batches by sequence number."""
        found = [decode_batch(path.read_bytes()) for path in self.folder.glob("*-*-*")]
        return sorted(found, key=lambda batch: batch.header.seq)

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """Not started yet, so that a test can write its script first."""
    one = Peer(tmp_path / "peer")
    yield one
    one.stop()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """`wait_until`, for test modules."""
    return wait_until


@dataclass(frozen=True)
class SpooledStep:
    """One batch that waits in a spool."""

    hello: Hello
    header: BatchHeader
    series: tuple[Series, ...]
    metrics: dict[tuple[str, str, str], dict[str, float]]
    """(name, role, orientation) -> what was measured."""


def spooled_steps(folder: Path, run: str) -> list[SpooledStep]:
    """Everything of `run` in a spool, the oldest attempt first."""
    found = []
    for spool in adopt(folder, run, limit=2**30):
        while (record := spool.peek()) is not None:
            batch = decode_batch(record.payload)
            layout = batch.header.layout
            series = decode_layout(spool.layouts[layout]).series if layout is not None else ()
            metrics: dict[tuple[str, str, str], dict[str, float]] = {
                (one.name, one.role, one.orientation): {
                    key: values[0, i].item() for key, values in batch.arrays.items()
                    if not is_missing(values)[0, i]
                } for i, one in enumerate(series)
            }
            found.append(SpooledStep(decode_hello(spool.hello), batch.header, series, metrics))
            spool.ack(record)
        spool.close()
    return found


@pytest.fixture
def spooled() -> Callable[[Path, str], list[SpooledStep]]:
    """`spooled_steps`, for test modules."""
    return spooled_steps
