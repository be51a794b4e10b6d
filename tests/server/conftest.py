"""A real PostgreSQL for the session, a real collector per test module, and a job that talks to it."""

import asyncio
import shutil
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import psycopg
import pytest
import uvicorn
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine

from fp8scope_protocol.commands import CommandReport
from fp8scope_protocol.series import Layout, Series, encode_layout
from fp8scope_protocol.wire import (
    Batch,
    BatchHeader,
    Hello,
    ModulePrecision,
    ProbeEvent,
    encode_batch,
    encode_hello,
    planes_of,
)
from fp8scope_server.app import create_app
from fp8scope_server.database import migrate
from fp8scope_server.postgres import EmbeddedPostgres
from fp8scope_server.settings import ServerSettings

TOKEN = "f8s_token-of-the-tests"

Plane = npt.NDArray[np.generic]


@pytest.fixture(scope="module", autouse=True)  # the tests of other folders must not see it
def _environment(home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8SCOPE_TOKEN", TOKEN)
        patch.setenv("FP8SCOPE_HOME", str(home))
        patch.delenv("FP8SCOPE_DATABASE_URL", raising=False)
        yield


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """A data home that an unprivileged user can enter, which pytest's tmp_path is not for root."""
    folder = Path(tempfile.mkdtemp(prefix="fp8scope-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres(home: Path) -> Iterator[EmbeddedPostgres]:
    """The server that all test modules share."""
    with EmbeddedPostgres(home) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(home: Path) -> Path:
    """A data home with a migrated database, to copy: making one is most of a first start."""
    path = home / "template"
    with EmbeddedPostgres(path) as server:
        assert server.owner
        engine = create_async_engine(server.url(), poolclass=NullPool)
        asyncio.run(migrate(engine))
    return path


@pytest.fixture
def empty(home: Path) -> Iterator[Path]:
    """A data home for one test, not yet there, with a path short enough for its socket."""
    path = home / uuid.uuid4().hex[:8]
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def folder(empty: Path, cluster: Path) -> Path:
    """A data home for one test, with a migrated database."""
    subprocess.run(["cp", "-a", str(cluster), str(empty)], check=True)
    return empty


@pytest.fixture(scope="module")
def settings(postgres: EmbeddedPostgres) -> ServerSettings:
    """Settings for a collector on an empty database of its own."""
    name = "test_" + uuid.uuid4().hex[:12]
    url = postgres.url()
    with psycopg.connect(host=str(url.query["host"]), user=url.username, dbname="postgres",
                         autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return ServerSettings(database_url=postgres.url(name))


class RunningCollector:
    """A collector behind a real socket, in a thread."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.app = create_app(settings)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"http://{self.host}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, lifespan="on"))
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([self._listener])), daemon=True)

    def __enter__(self) -> "RunningCollector":
        self._thread.start()
        with httpx.Client(timeout=60, trust_env=False) as client:
            client.get(self.url + "/healthz").raise_for_status()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def client(self) -> httpx.Client:
        """A client with the token, at the API's root."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        return httpx.Client(base_url=self.url + "/api/v1", headers=headers, timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def collector(settings: ServerSettings) -> Iterator[RunningCollector]:
    """A collector on `settings`."""
    with RunningCollector(settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(collector: RunningCollector) -> Iterator[httpx.Client]:
    """An HTTP client of the collector with the token."""
    with collector.client() as client:
        yield client


def linear_series(module: str, depth: int, *, live: bool = True) -> list[Series]:
    """The three GEMM inputs of a linear layer in E4M3."""
    return [
        Series(name=module if role != "weight" else f"{module}.weight", role=role, format="e4m3",
               scaling="block 128x128" if role == "weight" else "tile 1x128", live=live, module=module,
               depth=depth)
        for role in ("activation", "weight", "gradient")
    ]


@dataclass(kw_only=True)
class Job:
    """A training job as the collector sees it: one producer of one attempt."""

    client: httpx.Client
    run: str
    modules: tuple[str, ...] = ("layers.0", "layers.1")
    attempt: str = field(default_factory=lambda: str(uuid.uuid4()))
    producer: str = "0"
    every: int = 1
    remote_control: bool = True
    resume: bool = False
    live: bool = True
    seq: int = 0
    last: bytes = b""

    @property
    def layout(self) -> Layout:
        return Layout(series=tuple(
            one for depth, module in enumerate(self.modules)
            for one in linear_series(module, depth, live=self.live)))

    def hello(self, **changes: Any) -> httpx.Response:
        precision = tuple(
            ModulePrecision(name=module, precision="fp8", switchable=True) for module in self.modules)
        fields: dict[str, Any] = {
            "run": self.run, "attempt": self.attempt, "producer": self.producer, "resume": self.resume,
            "every": self.every, "remote_control": self.remote_control,
            "precision": (*precision, ModulePrecision(name="head", precision="bf16", reason="kept in bf16")),
        }
        return self.client.post(f"/runs/{self.run}/attempts", content=encode_hello(Hello(**fields | changes)))

    def put_layout(self) -> httpx.Response:
        address = f"/runs/{self.run}/layouts/{self.layout.id}"
        return self.client.put(address, params={"attempt": self.attempt}, content=encode_layout(self.layout))

    def start(self) -> str:
        """Hello and layout; the run's id."""
        answer = self.hello()
        assert answer.status_code == 200, answer.text
        assert self.put_layout().status_code == 200
        run = answer.json()["run"]
        assert isinstance(run, str)
        return run

    def encode(self, step: int, arrays: Mapping[str, Plane] | None = None, *,
               sentinels: Mapping[str, float] | None = None, lost: Mapping[str, int] | None = None,
               events: tuple[ProbeEvent, ...] = (), reports: tuple[CommandReport, ...] = (),
               skipped: bool = False, sent_ns: int = 0) -> bytes:
        """The bytes of the next batch."""
        arrays = dict(arrays or {})
        header = BatchHeader(
            run=self.run, attempt=self.attempt, producer=self.producer, seq=self.seq, step=step,
            skipped=skipped, sent_ns=sent_ns, sentinels=dict(sentinels or {}), lost=dict(lost or {}),
            events=events, reports=reports, layout=self.layout.id if arrays else None,
            columns=len(self.layout.series) if arrays else 0, planes=planes_of(arrays))
        self.seq += 1
        return encode_batch(Batch(header=header, arrays=arrays))

    def post(self, body: bytes) -> httpx.Response:
        return self.client.post(f"/runs/{self.run}/batches", content=body)

    def send(self, step: int, arrays: Mapping[str, Plane] | None = None, **more: Any) -> dict[str, Any]:
        """Store the next batch; the collector's reply."""
        self.last = self.encode(step, arrays, **more)
        answer = self.post(self.last)
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        assert isinstance(reply, dict)
        return reply

    def values(self, **by_module: float) -> dict[str, Plane]:
        """An underflow_ratio plane: 0.001, and for `layers_0=0.5` that on all series of layers.0."""
        plane = np.full(len(self.layout.series), 0.001, dtype="<f4")
        for i, one in enumerate(self.layout.series):
            plane[i] = by_module.get(one.module.replace(".", "_"), plane[i])
        return {"underflow_ratio": plane}


@pytest.fixture
def job(client: httpx.Client) -> Callable[..., Job]:
    """Makes jobs; each run has a name of its own unless one is given."""
    def make(**fields: Any) -> Job:
        fields.setdefault("run", "run-" + uuid.uuid4().hex[:8])
        return Job(client=client, **fields)

    return make


@pytest.fixture
def rows(settings: ServerSettings) -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
    """Runs a query against the collector's database."""
    url = settings.database_url
    assert url is not None
    with psycopg.connect(host=str(url.query["host"]), user=url.username, dbname=url.database,
                         autocommit=True) as connection:
        yield lambda query, *values: list(connection.execute(query, values))
