"""The collector as a process: it starts, says why it cannot, stops clean, and keeps what it acknowledged."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.server.conftest import TOKEN, Job

from fp8scope_server.postgres import EmbeddedPostgres


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


def command(folder: Path, port: int, **more: str) -> subprocess.Popen[str]:
    environment = os.environ | {"FP8SCOPE_HOME": str(folder), "FP8SCOPE_PORT": str(port), **more}
    return subprocess.Popen([sys.executable, "-m", "fp8scope_server.serve"], env=environment, text=True,
                            stderr=subprocess.PIPE)


@contextmanager
def serving(folder: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A collector process that answers, and a client of it."""
    with (command(folder, port) as process,
          httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30, trust_env=False,
                       headers={"authorization": f"Bearer {TOKEN}"}) as client):
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    client.get(f"http://127.0.0.1:{port}/healthz").raise_for_status()
                    break
                except httpx.TransportError:
                    assert process.poll() is None, process.stderr and process.stderr.read()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield process, client
        finally:
            if process.poll() is None:
                process.kill()


def test_acknowledged_batches_outlive_sigkill_and_a_clean_stop(folder: Path) -> None:
    """SIGKILL between two batches, SIGTERM after them: a restarted collector has both, once."""
    port = free_port()
    with serving(folder, port) as (process, client):
        job = Job(client=client, run="kept")
        job.start()
        job.send(0, job.values())
        process.kill()
    with serving(folder, port) as (process, client):
        job.client = client
        assert job.post(job.last).json()["duplicate"] is True
        job.send(1, job.values())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    log = EmbeddedPostgres(folder).log.read_text()
    assert log.rstrip().endswith("database system is shut down")
    with serving(folder, port) as (_, client):
        assert client.get("/runs/kept").json()["batches"] == 2


def test_a_killed_database_is_started_again_and_keeps_what_was_acknowledged(folder: Path) -> None:
    """SIGKILL of PostgreSQL under a running collector: a refusal for a moment, then everything is there."""
    with serving(folder, free_port()) as (process, client):
        job = Job(client=client, run="kept")
        job.start()
        job.send(0, job.values())
        pid = int((folder / "postgres" / "data" / "postmaster.pid").read_text().split("\n")[0])
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        answers = []
        while (reply := job.post(job.last)).status_code != 200:
            answers.append(reply.status_code)
            assert time.monotonic() < deadline, answers
            time.sleep(0.1)
        assert set(answers) <= {503}
        assert reply.json()["duplicate"] is True
        job.send(1, job.values())
        assert client.get("/runs/kept").json()["batches"] == 2
        assert process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_collector_takes_over_the_database_of_one_that_ends(folder: Path, number: int) -> None:
    """Two collectors on one data home, and the one that runs PostgreSQL ends, cleanly or killed: the other
    runs it from then on, and keeps what either acknowledged."""
    with serving(folder, free_port()) as (owner, first), serving(folder, free_port()) as (heir, second):
        job = Job(client=first, run="kept")
        job.start()
        job.send(0, job.values())
        job.client = second
        job.send(1, job.values())
        owner.send_signal(number)
        owner.wait(60)
        deadline = time.monotonic() + 60
        answers = []
        while (reply := job.post(job.last)).status_code != 200:
            answers.append(reply.status_code)
            assert time.monotonic() < deadline, answers
            time.sleep(0.1)
        assert set(answers) <= {503}
        assert reply.json()["duplicate"] is True
        job.send(2, job.values())
        assert second.get("/runs/kept").json()["batches"] == 3
        heir.send_signal(signal.SIGTERM)
        assert heir.wait(60) == 0
    assert EmbeddedPostgres(folder).log.read_text().rstrip().endswith("database system is shut down")


def test_a_used_port_is_one_line_and_exit_code_2(empty: Path) -> None:
    """The line names the variable and the port; no database is started for it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with command(empty, port) as process:
            _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.startswith(f"fp8scope collector: FP8SCOPE_PORT = {port}: cannot listen on 127.0.0.1")
    assert len(said.splitlines()) == 1
    assert not (empty / "postgres").exists()


def test_no_database_is_one_line_and_exit_code_2(empty: Path) -> None:
    """A database that does not answer is named; there is no traceback."""
    url = "postgresql://user:secret@127.0.0.1:1/nothing"
    with command(empty, free_port(), FP8SCOPE_DATABASE_URL=url) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "fp8scope collector: no database at postgresql+psycopg://user:***@127.0.0.1:1/nothing" in said
    assert "Traceback" not in said
    assert "secret" not in said


def test_ctrl_c_ends_it_clean(folder: Path) -> None:
    """SIGINT: exit code 0 and a database that was shut down."""
    with serving(folder, free_port()) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert "database system is shut down" in EmbeddedPostgres(folder).log.read_text()
