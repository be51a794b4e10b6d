"""Admission: how many bodies may be inside at once."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection

import pytest
from tests.server.conftest import TOKEN, Job, RunningCollector

from fp8scope_server.settings import ServerSettings


@pytest.fixture(scope="module")
def collector(settings: ServerSettings) -> Iterator[RunningCollector]:
    """A collector with one place for a body."""
    with RunningCollector(replace(settings, queue=1, writers=1)) as running:
        yield running


def test_one_more_than_the_queue_is_told_to_come_back(collector: RunningCollector) -> None:
    """While one body is still arriving the next gets 429 with Retry-After; then there is room again."""
    host, port = collector.host.split(":")
    with collector.client() as client, socket.create_connection((host, int(port))) as slow:
        job = Job(client=client, run="busy")
        job.start()
        body = job.encode(0, job.values())
        head = (f"POST /api/v1/runs/busy/batches HTTP/1.1\r\nHost: {collector.host}\r\nConnection: close\r\n"
                f"Authorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n")
        slow.sendall(head.encode() + body[:10])
        next_body = job.encode(1, job.values())
        while (answer := job.post(next_body)).status_code == 200:
            pass  # the slow one has not come in yet
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        slow.sendall(body[10:])
        assert b" 200 " in slow.makefile("rb").readline()
        assert job.post(next_body).status_code == 200


@pytest.mark.parametrize("status", [429, 413])
def test_a_refusal_reaches_a_client_that_is_still_writing(collector: RunningCollector, status: int) -> None:
    """4 MB, more than sockets hold, at a time when there is no place or over the limit: the answer comes, and
    the connection goes on."""
    host, port = collector.host.split(":")
    limit = collector.app.state.intake.max_body_bytes
    collector.app.state.intake.max_body_bytes = 2**20 if status == 413 else limit
    collector.app.state.intake.inside += status == 429
    try:
        connection = HTTPConnection(host, int(port), timeout=30)
        for _ in range(2):
            connection.request("POST", "/api/v1/runs/x/batches", bytes(2**22),
                               {"authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            assert answer.status == status
            assert b"try again" in (text := answer.read()) or b"limit of 1048576" in text
    finally:
        collector.app.state.intake.inside -= status == 429
        collector.app.state.intake.max_body_bytes = limit
        connection.close()


def test_a_body_that_breaks_off_gives_its_place_back(collector: RunningCollector) -> None:
    """A connection that ends within a body stores nothing and blocks nobody."""
    host, port = collector.host.split(":")
    with collector.client() as client:
        job = Job(client=client, run="broken")
        job.start()
        for _ in range(3):
            with socket.create_connection((host, int(port))) as slow:
                slow.sendall((f"POST /api/v1/runs/broken/batches HTTP/1.1\r\nHost: {collector.host}\r\n"
                              f"Authorization: Bearer {TOKEN}\r\nContent-Length: 1000\r\n\r\nabc").encode())
        body = job.encode(0, job.values())
        while (answer := job.post(body)).status_code == 429:
            pass
        assert answer.json()["duplicate"] is False
