"""Answers that are no collector's: endless, inflating, nested without end, drop by drop."""

import gzip
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from fp8scope.line import ANSWER_BYTES, QUESTION_BYTES, Line
from fp8scope.settings import ProbeSettings

HEAD = b"HTTP/1.1 %d x\r\ncontent-type: application/json\r\n"
SPACES = b" " * 2**20


def endless(line: socket.socket, status: int) -> None:
    """400 MiB of spaces, of a length that is not told."""
    line.sendall(HEAD % status + b"\r\n")
    for _ in range(400):
        line.sendall(SPACES)


def inflating(line: socket.socket, status: int) -> None:
    """400 MiB of spaces in 400 KiB."""
    body = gzip.compress(SPACES * 400, 1)
    line.sendall(HEAD % status + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def nested(line: socket.socket, status: int) -> None:
    """A list in a list in a list."""
    body = b"[" * 60_000
    line.sendall(HEAD % status + b"content-length: %d\r\n\r\n" % len(body) + body)


def nested_object(line: socket.socket, status: int) -> None:
    """The same with objects."""
    body = b'{"a":' * 10_000
    line.sendall(HEAD % status + b"content-length: %d\r\n\r\n" % len(body) + body)


def dripping(line: socket.socket, status: int) -> None:
    """A byte now and then, before any time-out for a single one."""
    line.sendall(HEAD % status + b"\r\n")
    while True:
        line.sendall(b" ")
        time.sleep(0.1)


Answer = Callable[[socket.socket, int], None]


@pytest.fixture
def wrong() -> Iterator[Callable[[Answer, int], str]]:
    """Starts a server that answers everything alike; its address."""
    with ExitStack() as stack:
        def start(answer: Answer, status: int) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def talk(line: socket.socket) -> None:
                with line, suppress(OSError):
                    line.recv(2**16)
                    answer(line, status)

            def accept() -> None:
                with suppress(OSError):
                    while True:
                        threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

            threading.Thread(target=accept, daemon=True).start()
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


JOB = """
import resource, sys, time, torch, fp8scope
from torch import nn
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = nn.Sequential(nn.Linear(128, 128))
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.ones(4, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
with fp8scope.attach(model, optimizer, run="warm", every=1, collector="offline"):
    step()
before = peak()
scope = fp8scope.attach(model, optimizer, run="r", every=1, remote_control=True)
for _ in range(20):
    step()
    time.sleep(0.05)
scope.close()
print((peak() - before) // 1024)
"""


@pytest.mark.parametrize(("answer", "status"), [
    (endless, 200), (endless, 503), (inflating, 422), (nested, 200), (nested_object, 409), (dripping, 200)])
def test_an_answer_that_is_no_collectors_costs_no_memory(
    wrong: Callable[[Answer, int], str], tmp_path: Path, answer: Answer, status: int
) -> None:
    """The job ends as it would have, and its memory grew by less than a tenth of the answer; its batches
    wait in the spool, and its sender has not stopped."""
    environment = {"FP8SCOPE_COLLECTOR": wrong(answer, status), "FP8SCOPE_SPOOL": str(tmp_path),
                   "FP8SCOPE_POLL_SECONDS": "0.2", "FP8SCOPE_RETRY_SECONDS": "0.1",
                   "FP8SCOPE_EXIT_SECONDS": "0.5", "FP8SCOPE_REQUEST_SECONDS": "0.5"}
    done = subprocess.run([sys.executable, "-c", JOB], env=os.environ | environment, capture_output=True,
                          text=True, timeout=120, check=True)
    assert int(done.stdout) < 40
    assert "the sender stopped" not in done.stderr
    assert "Traceback" not in done.stderr
    assert [path for path in tmp_path.rglob("*.f8s*") if not path.is_relative_to(tmp_path / "warm")]


@pytest.mark.parametrize("answer", [endless, inflating])
def test_sync_reads_no_such_answer_either(
    wrong: Callable[[Answer, int], str], tmp_path: Path, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither of a request nor of a question; each is a failed try, said once with what is wrong."""
    settings = ProbeSettings(collector=wrong(answer, 200), request_seconds=30.0, retry_seconds=0.05)
    with Line(settings, token=None, where=tmp_path) as line:
        for _ in range(2):
            assert line.request("POST", "r/batches", b"x") is None
        assert line.ask("r/commands") is None
    (said,) = [entry.getMessage() for entry in caplog.records if entry.name == "fp8scope"]
    assert ("longer than" if answer is endless else "encoded as gzip") in said


def test_the_longest_answer_is_read(wrong: Callable[[Answer, int], str], tmp_path: Path) -> None:
    """To its last byte; one more is too many."""
    length = 0

    def exactly(line: socket.socket, status: int) -> None:
        line.sendall(HEAD % status + b"content-length: %d\r\n\r\n" % length + b" " * length)

    settings = ProbeSettings(collector=wrong(exactly, 200), request_seconds=30.0, retry_seconds=0.05)
    with Line(settings, token=None, where=tmp_path) as line:
        calls: tuple[tuple[int, Callable[[], httpx.Response | None]], ...] = (
            (ANSWER_BYTES, lambda: line.request("POST", "r")), (QUESTION_BYTES, lambda: line.ask("r")))
        for most, call in calls:
            length = most
            response = call()
            assert response is not None
            assert len(response.content) == most
            length += 1
            assert call() is None
