"""An offline job, `fp8scope sync --follow` and a real collector that is killed: steps out, a command in."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.probe.training import TrainingJob

PATIENCE = 120.0


@pytest.fixture
def home() -> Iterator[Path]:
    """A data home that the database server can enter."""
    folder = Path(tempfile.mkdtemp(prefix="fp8scope-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def run(home: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts commands in that home; ends them after the test."""
    with ExitStack() as stack:

        def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, "-m", *arguments],
                                       env=os.environ | {"FP8SCOPE_HOME": str(home)} | environment)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        yield start


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.timeout(400)
def test_steps_come_out_and_a_command_goes_in(
    home: Path, run: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The collector is killed and started again while the job runs: every step is stored once, nothing counts
    as lost, and a command given to the collector is applied in the job and reported back."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def serve() -> subprocess.Popen[bytes]:
        process = run("fp8scope_server.serve", FP8SCOPE_PORT=str(port))
        until(lambda: _answers(url + "/healthz"))
        return process

    collector = serve()
    spool = home / "spool"
    follower = run("fp8scope.cli", "sync", "--follow", str(spool), "--collector", url,
                   FP8SCOPE_POLL_SECONDS="0.2", FP8SCOPE_RETRY_SECONDS="0.5")
    job = TrainingJob(tmp_path / "job", FP8SCOPE_COLLECTOR="offline", FP8SCOPE_HOME=str(home),
                      FP8SCOPE_POLL_SECONDS="0.2")
    headers = {"authorization": f"Bearer {(home / 'token').read_text().strip()}"}
    with httpx.Client(base_url=url + "/api/v1", headers=headers, timeout=30, trust_env=False) as client:
        try:
            until(lambda: client.get("/runs/run").status_code == 200)
            job.advance(30)
            collector.kill()
            collector.wait()
            job.advance(30)
            serve()
            action = {"kind": "set_precision", "modules": ["0"], "precision": "bf16"}
            assert client.post("/runs/run/commands", json={"action": action}).status_code == 201
            until(job.switches)
            job.advance(10)
            steps = job.end()
        finally:
            job.kill()
        until(lambda: not any(name.endswith(".f8ss") for _, _, names in os.walk(spool) for name in names))
        follower.send_signal(signal.SIGTERM)
        assert follower.wait(PATIENCE) == 0
        assert client.get("/runs/run/steps").json()["steps"] == list(range(steps))
        assert client.get("/runs/run").json()["lost"] == {}
        [command] = client.get("/runs/run/commands").json()
        assert (command["state"], command["applied_step"]) == ("applied", job.switches()[0]["step"])
        kinds = {event["kind"] for event in client.get("/runs/run/events?limit=1000").json()}
        assert not kinds & {"gap", "lost"}


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
