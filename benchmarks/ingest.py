"""How many steps a second the collector takes, against one row per value; its memory, and many producers.

    python benchmarks/ingest.py [--quick] [--json] [--seconds 600]

A collector with its own PostgreSQL, clients and all on this machine, over loopback, one run. A step is 3,000
series x 12 metrics (two of them counts), 36,000 values; a client sends the next one when the last is
acknowledged, that is committed. Values are noise and hardly compress.

    8 clients        steps and values a second, latency; memory of the collector's process, once a second:
                     growth is the mean of its last tenth over that of the tenth after the first
    64 clients       latency, refusals (429, sent again as told) and errors (anything else but 200)
    128 producers    of one run, at the rate of the 8 clients, each with a 16th of the series
    naive            one row per value by COPY into the same PostgreSQL, with the key that reading needs

A client is a thread of this process that sends bytes made beforehand, so that clients cost little; they share
the machine with what they measure.
"""

import argparse
import json
import os
import platform
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import psycopg

from fp8scope_protocol.access import ensure_token
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.series import Layout, Series, encode_layout
from fp8scope_protocol.wire import MAGIC, Batch, BatchHeader, Hello, encode_batch, encode_hello, planes_of
from fp8scope_server.children import Child
from fp8scope_server.postgres import EmbeddedPostgres

SERIES, BODIES = 3000, 16
KEYS = ("elements", "nan_count", "underflow_ratio", "distortion", "sqnr_db", "saturation_ratio", "amax",
        "rms", "kurtosis", "scale_min", "scale_max", "bad_block_ratio")
RUN = "ingest"


def layout_of(size: int, first: int = 0) -> Layout:
    """`size` series, of layers from `first` on."""
    return Layout(series=tuple(
        Series(name=f"layers.{i}", role="activation", format="e4m3", scaling="tile 1x128",
               module=f"layers.{i}", depth=i) for i in range(first, first + size)))


@dataclass(kw_only=True)
class Client:
    """One producer, and what became of its requests."""

    port: int
    token: str
    attempt: str
    producer: str
    size: int = SERIES
    first: int = 0
    seq: int = 0
    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    errors: list[str] = field(default_factory=list)

    def open(self) -> None:
        """Hello and layout; bodies of steps."""
        self.connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        self.layout = layout_of(self.size, self.first)
        rng = np.random.default_rng(self.first)
        self.heads, self.bodies = [], []
        for _ in range(BODIES):
            arrays: dict[str, Any] = {
                key: rng.integers(0, 2**40, self.size).astype("<u8") if METRICS[key].kind == "count"
                else rng.normal(size=self.size).astype("<f4") for key in KEYS}
            header = BatchHeader(run=RUN, attempt=self.attempt, producer=self.producer, seq=0, step=0,
                                 layout=self.layout.id, columns=self.size, planes=planes_of(arrays))
            whole = encode_batch(Batch(header=header, arrays=arrays))
            self.heads.append(header)
            self.bodies.append(whole[8 + struct.unpack_from("<I", whole, 4)[0]:])
        hello = Hello(run=RUN, attempt=self.attempt, producer=self.producer, resume=True)
        self._expect(self._ask("POST", f"/api/v1/runs/{RUN}/attempts", encode_hello(hello)))
        self._expect(self._ask("PUT", f"/api/v1/runs/{RUN}/layouts/{self.layout.id}?attempt={self.attempt}",
                               encode_layout(self.layout)))

    def step(self) -> None:
        """One step, until it is acknowledged or failed."""
        i = self.seq % BODIES
        head = msgspec.msgpack.encode(msgspec.structs.replace(self.heads[i], seq=self.seq, step=self.seq))
        body = MAGIC + struct.pack("<I", len(head)) + head + self.bodies[i]
        self.seq += 1
        began = time.perf_counter()
        while True:
            status, wait = self._ask("POST", f"/api/v1/runs/{RUN}/batches", body)
            if status != 429:
                break
            self.refused += 1
            time.sleep(wait)
        self.latencies.append(time.perf_counter() - began)
        if status != 200:
            self.errors.append(str(status))

    def run(self, until: float, pause_s: float = 0.0) -> None:
        """Steps until then, `pause_s` from begin to begin if it has so much time."""
        following = time.perf_counter() + pause_s * np.random.default_rng(self.first).random()
        while time.perf_counter() < until:
            try:
                self.step()
            except OSError as error:
                self.errors.append(repr(error))
                self.connection.close()
            following += pause_s
            time.sleep(max(0.0, following - time.perf_counter()) if pause_s else 0.0)

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, float]:
        """The status, and for how long one is asked to wait. Once more if the connection had been closed, as
        the collector does after five idle seconds."""
        headers = {"authorization": f"Bearer {self.token}"}
        try:
            self.connection.request(method, path, body, headers)
            answer = self.connection.getresponse()
        except (BrokenPipeError, ConnectionResetError, RemoteDisconnected):
            self.connection.close()
            self.connection.request(method, path, body, headers)
            answer = self.connection.getresponse()
        self.said = answer.read()
        return answer.status, float(answer.headers.get("retry-after", 0))

    def _expect(self, answer: tuple[int, float]) -> None:
        if answer[0] not in (200, 201):
            raise SystemExit(f"ingest: the collector answers {answer[0]}: {self.said[:300]!r}")


@contextmanager
def collector(home: Path) -> Iterator[tuple[Child, int]]:
    """A collector on a free port, with a PostgreSQL of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Child("collector", "fp8scope_server.serve", log=home / "collector.log",
               environment={"FP8SCOPE_PORT": str(port)}) as child:
        for _ in range(1200):
            try:
                connection = HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/healthz")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                time.sleep(0.1)
        else:
            raise SystemExit(f"ingest: no collector:\n{child.last_lines()}")
        yield child, port


def rss_mb(pid: int) -> float:
    """Resident memory of a process, by Linux."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def together(clients: list[Client], seconds: float, each_second: Callable[[], None] = lambda: None,
             pause_s: float = 0.0) -> float:
    """All of them for so long; how long it took until the last answer."""
    began = time.perf_counter()
    threads = [threading.Thread(target=one.run, args=(began + seconds, pause_s)) for one in clients]
    for thread in threads:
        thread.start()
    while time.perf_counter() < began + seconds:
        time.sleep(1.0)
        each_second()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def figures(clients: list[Client], seconds: float) -> dict[str, Any]:
    """Rate, latency, refusals, errors."""
    latencies = sorted(1e3 * one for client in clients for one in client.latencies)
    errors = [error for client in clients for error in client.errors]
    stored = len(latencies) - len(errors)
    return {
        "steps_per_second": round(stored / seconds, 1),
        "values_per_second": round(sum((len(c.latencies) - len(c.errors)) * c.size for c in clients)
                                   * len(KEYS) / seconds),
        "p50_ms": round(latencies[len(latencies) // 2], 1),
        "p99_ms": round(latencies[int(0.99 * len(latencies))], 1),
        "refused": sum(client.refused for client in clients), "errors": len(errors),
        "kinds of errors": sorted(set(errors)),
    }


def naive(home: Path, seconds: float) -> float:
    """Values a second, a row each, by COPY, committed a step."""
    with EmbeddedPostgres(home) as server:
        url = server.url()
        with psycopg.connect(host=str(url.query["host"]), user=url.username, dbname=url.database) as database:
            database.execute("DROP TABLE IF EXISTS naive")
            database.execute("CREATE TABLE naive (run text, series int, metric text, step bigint, "
                             "value double precision, PRIMARY KEY (run, series, metric, step))")
            values = np.random.default_rng(0).normal(size=(len(KEYS), SERIES)).tolist()
            began, step = time.perf_counter(), 0
            while time.perf_counter() < began + seconds:
                with database.cursor() as cursor, cursor.copy("COPY naive FROM STDIN") as copy:
                    for key, row in zip(KEYS, values, strict=True):
                        for series, value in enumerate(row):
                            copy.write_row((RUN, series, key, step, value))
                database.commit()
                step += 1
            spent = time.perf_counter() - began
            database.execute("DROP TABLE naive")
    return step * len(KEYS) * SERIES / spent


def measure(home: Path, seconds: float) -> dict[str, Any]:
    """Everything."""
    token, attempt = ensure_token(), str(uuid.uuid4())
    results: dict[str, Any] = {}
    with collector(home) as (child, port):
        def opened(count: int, name: str, size: int = SERIES) -> list[Client]:
            found = [Client(port=port, token=token, attempt=attempt, producer=f"{name}{i}", size=size,
                            first=i * size if size < SERIES else 0) for i in range(count)]
            for one in found:
                one.open()
            return found

        memory: list[float] = []
        clients = opened(8, "a")
        spent = together(clients, seconds, lambda: memory.append(rss_mb(child.process.pid)))
        eight = results["8 clients"] = figures(clients, spent)
        tenth = max(1, len(memory) // 10)
        results["memory"] = {"rss_mb_max": round(max(memory), 1),
                             "growth": round(fmean(memory[-tenth:]) / fmean(memory[tenth:2 * tenth]), 3)}
        clients = opened(64, "b")
        results["64 clients"] = figures(clients, together(clients, min(seconds, 60.0)))
        clients = opened(128, "c", SERIES // 16)
        pause_s = 128 / (16 * eight["steps_per_second"])
        results["128 producers"] = figures(clients, together(clients, min(seconds, 60.0), pause_s=pause_s))
        if any(row.get("errors") for row in results.values()):
            print(child.last_lines(60), file=sys.stderr)
        results["naive"] = {"values_per_second": round(naive(home, min(seconds, 20.0)))}
    return results


def main() -> int:
    """Prints a line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 seconds in place of 10 minutes")
    parser.add_argument("--json", action="store_true", help="print a summary as the last line")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the 8 clients (600)")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="fp8scope-ingest-"))
    home.chmod(0o755)  # an unprivileged user runs PostgreSQL
    os.environ["FP8SCOPE_HOME"] = str(home)
    os.environ.pop("FP8SCOPE_DATABASE_URL", None)
    try:
        found = measure(home, 20.0 if options.quick else options.seconds)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    for name, row in found.items():
        print(f"{name:14} {row}")
    eight, many, memory = found["8 clients"], found["64 clients"], found["memory"]
    results = {
        "steps_per_second_8": eight["steps_per_second"], "p99_ms_8": eight["p99_ms"],
        "errors_8": eight["errors"], "errors_64": many["errors"], "p99_ms_64": many["p99_ms"],
        "naive_ratio": round(eight["values_per_second"] / found["naive"]["values_per_second"], 1),
        "rss_mb_max": memory["rss_mb_max"], "rss_growth_ratio": memory["growth"], "details": found,
    }
    if options.json:
        print(json.dumps({"benchmark": "ingest", "machine": f"{os.cpu_count()} x {platform.machine()}",
                          "results": results}))
    return 1 if eight["errors"] or many["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
