"""The live websocket: news of a run, at most four times a second."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

Jobs = Callable[..., Any]


@pytest.fixture
def listen(collector: Any, client: Any) -> Callable[[str], Any]:
    """Opens the live websocket of a run."""
    @contextmanager
    def opened(run: str) -> Iterator[ClientConnection]:
        headers = {"authorization": client.headers["authorization"]}
        address = f"ws://{collector.host}/api/v1/runs/{run}/live"
        with connect(address, additional_headers=headers, proxy=None) as socket:
            yield socket

    return opened


def test_each_change_is_pushed(job: Jobs, listen: Any) -> None:
    """One message at once, another after the next batch; the version differs and the step is its step."""
    one = job()
    run = one.start()
    with listen(run) as socket:
        first = json.loads(socket.recv(timeout=5))
        assert first["last_step"] is None
        one.send(3, sentinels={"loss": 1.0})
        second = json.loads(socket.recv(timeout=5))
        assert second["version"] != first["version"]
        assert second["last_step"] == 3


def test_a_quiet_run_pushes_nothing_more(job: Jobs, listen: Any) -> None:
    """A change of another run is none of this one."""
    one, other = job(), job()
    run = one.start()
    other.start()
    with listen(run) as socket:
        socket.recv(timeout=5)
        other.send(0)
        with pytest.raises(TimeoutError):
            socket.recv(timeout=0.6)


def test_fast_batches_are_put_together(job: Jobs, listen: Any) -> None:
    """As many batches as go into a second make few messages, and the last one has the newest step."""
    one = job()
    run = one.start()
    began = time.monotonic()
    sent = 0
    received: list[dict[str, Any]] = []
    with listen(run) as socket:
        while time.monotonic() - began < 1:
            sent += 1
            one.send(sent)
        while not received or received[-1]["last_step"] != sent:
            received.append(json.loads(socket.recv(timeout=10)))
        seconds = time.monotonic() - began
    assert len(received) <= seconds / 0.25 + 1  # one at once, then one every 0.25 s


def test_unknown_run_and_missing_token_are_refused(job: Jobs, listen: Any, collector: Any) -> None:
    """404 for a run that does not exist; 403 without a token, before anything is said."""
    with pytest.raises(InvalidStatus) as unknown, listen("no-such-run"):
        pass
    assert unknown.value.response.status_code == 404
    one = job()
    run = one.start()
    address = f"ws://{collector.host}/api/v1/runs/{run}/live"
    with pytest.raises(InvalidStatus) as stranger, connect(address, proxy=None):
        pass
    assert stranger.value.response.status_code == 403


def test_a_client_that_leaves_is_forgotten(job: Jobs, listen: Any, collector: Any) -> None:
    """After many visits nobody waits for the run any more, and batches are still stored."""
    one = job()
    run = one.start()
    for _ in range(5):
        with listen(run) as socket:
            socket.recv(timeout=5)
    one.send(0)
    with listen(run) as socket:
        assert json.loads(socket.recv(timeout=5))["last_step"] == 0
