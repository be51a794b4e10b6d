"""The demo's way to ask its collector: patient with one that is busy, clear about one that is gone."""

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_server import reader as reader_module
from fp8scope_server.children import Child
from fp8scope_server.reader import Reader


@contextmanager
def answering(*statuses: int) -> Iterator[httpx.Client]:
    """A client of a server that gives these statuses, then 200; 0 closes the connection without a word."""
    script = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            status = script.pop(0) if script else 200
            if status:
                body = json.dumps([status]).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}", trust_env=False) as client:
        yield client
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_busy_collector_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection, 429 and 503 are no reason to give up."""
    monkeypatch.setattr(reader_module, "PAUSE_SECONDS", 0.01)
    with answering(0, 429, 503) as client:
        assert Reader(client).get("/runs", list[int]) == [200]


def test_a_refusal_is_said_at_once() -> None:
    """What will not change is not asked again."""
    with answering(404) as client, pytest.raises(Fp8scopeError, match="GET /runs: the collector answers 404"):
        Reader(client).get("/runs", list[int])


def test_a_collector_that_stays_silent_is_one_clear_error() -> None:
    """Nobody listens: the address's own words, no traceback of the HTTP client."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with (httpx.Client(base_url=url, trust_env=False) as client,
          pytest.raises(Fp8scopeError, match="the collector does not answer")):
        Reader(client, silence_seconds=0.0).get("/runs", list[int])


def test_a_collector_that_ended_is_named_with_its_log(tmp_path: Path) -> None:
    """No waiting for one that will not come back."""
    (tmp_path / "ends.py").write_text("print('out of luck'); raise SystemExit(3)")
    path = ":".join([str(tmp_path), *sys.path])
    with Child("collector", "ends", log=tmp_path / "log", environment={"PYTHONPATH": path}) as child:
        child.process.wait()
        with (httpx.Client(base_url="http://127.0.0.1:9", trust_env=False) as client,
              pytest.raises(Fp8scopeError, match=r"(?s)the collector ended with code 3.*out of luck")):
            Reader(client, [child]).get("/runs", list[int])
