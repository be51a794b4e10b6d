"""A real collector and a real dashboard, each in its process, a job that plays the probe, and Chromium."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from fp8scope_protocol.access import COOKIE
from fp8scope_protocol.commands import Command, CommandReport
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

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
START_SECONDS = 60.0
PATIENCE_MS = 20_000
"""How long a browser waits for what must appear."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running process with an HTTP address."""

    url: str
    token: str
    log: Path


class Services:
    """Starts services in a data home and ends them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, port: int, **environment: str) -> Service:
        log = self.home / f"{module}-{port}.log"
        known = {key: value for key, value in os.environ.items() if not key.startswith("FP8SCOPE_")}
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", module], stdout=output, stderr=subprocess.STDOUT,
                env=known | {"FP8SCOPE_HOME": str(self.home), "OMP_NUM_THREADS": "1"} | environment)
        self._children.append(child)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while child.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(url + "/healthz", trust_env=False).status_code == 200:
                    return Service(url=url, token=(self.home / "token").read_text().strip(), log=log)
            except httpx.HTTPError:
                time.sleep(0.1)
        raise AssertionError(f"{module} did not start:\n{log.read_text()}")

    def dashboard(self, collector: str) -> Service:
        port = free_port()
        return self.start("fp8scope_dashboard.serve", port, FP8SCOPE_DASHBOARD_PORT=str(port),
                          FP8SCOPE_COLLECTOR=collector)

    def stop(self) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in reversed(self._children):
            child.wait(30)


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    """In a data home that an unprivileged database server can enter, which pytest's own is not for root."""
    home = Path(tempfile.mkdtemp(prefix="fp8scope-test-", dir="/tmp"))
    home.chmod(0o755)
    running = Services(home)
    yield running
    running.stop()
    shutil.rmtree(home)


@pytest.fixture(scope="session")
def collector(services: Services) -> Service:
    port = free_port()
    return services.start("fp8scope_server.serve", port, FP8SCOPE_PORT=str(port))


@pytest.fixture(scope="session")
def dashboard(services: Services, collector: Service) -> Service:
    return services.dashboard(collector.url)


@pytest.fixture(scope="session")
def start_dashboard(services: Services) -> Callable[[str], Service]:
    """Starts another dashboard, of the collector at an address."""
    return services.dashboard


@pytest.fixture(scope="session")
def client(collector: Service) -> Iterator[httpx.Client]:
    """A client of the collector with the token, at the API's root."""
    headers = {"authorization": f"Bearer {collector.token}"}
    address = collector.url + "/api/v1"
    with httpx.Client(base_url=address, headers=headers, timeout=30, trust_env=False) as one:
        yield one


@dataclass(kw_only=True)
class Job:
    """A training job as the collector sees it: every layer has an activation, a weight and a gradient."""

    client: httpx.Client
    modules: tuple[str, ...] = ("layers.0", "layers.1")
    run: str = field(default_factory=lambda: "run-" + uuid.uuid4().hex[:8])
    attempt: str = field(default_factory=lambda: str(uuid.uuid4()))
    remote_control: bool = True
    seq: int = 0

    @property
    def layout(self) -> Layout:
        return Layout(series=tuple(
            Series(name=module if role != "weight" else module + ".weight", role=role, format="e4m3",
                   scaling="tile 1x128", live=True, module=module, depth=depth)
            for depth, module in enumerate(self.modules) for role in ("activation", "weight", "gradient")))

    def start(self) -> "Job":
        precision = tuple(ModulePrecision(name=one, precision="fp8", switchable=True) for one in self.modules)
        hello = Hello(run=self.run, attempt=self.attempt, producer="0", remote_control=self.remote_control,
                      precision=precision)
        self._post("attempts", encode_hello(hello))
        address = f"/runs/{self.run}/layouts/{self.layout.id}"
        body = encode_layout(self.layout)
        answer = self.client.put(address, content=body, params={"attempt": self.attempt})
        assert answer.status_code == 200, answer.text
        return self

    def send(self, step: int, values: npt.NDArray[np.float32] | None = None, *, loss: float = 2.0,
             reports: tuple[CommandReport, ...] = (), events: tuple[ProbeEvent, ...] = (),
             ranks: npt.NDArray[np.float32] | None = None, sent_ns: int = 0, **sentinels: float) -> None:
        """One step; `values` [series] is its underflow_ratio, `ranks` [series] its worst_rank."""
        arrays: dict[str, npt.NDArray[np.generic]] = {}
        if values is not None:
            arrays = {"underflow_ratio": values.astype("<f4"),
                      "nan_count": np.isnan(values).astype("<u8") * np.uint64(3)}
        if ranks is not None:
            arrays["worst_rank"] = ranks.astype("<f4")
        header = BatchHeader(
            run=self.run, attempt=self.attempt, producer="0", seq=self.seq, step=step, sent_ns=sent_ns,
            sentinels={"loss": loss, **sentinels}, reports=reports, events=events, planes=planes_of(arrays),
            layout=self.layout.id if arrays else None,
            columns=len(self.layout.series) if arrays else 0)
        self.seq += 1
        self._post("batches", encode_batch(Batch(header=header, arrays=arrays)))

    def wave(self, step: int) -> npt.NDArray[np.float32]:
        """Values that differ between series and steps: (series + 1) / 1000 + step / 100000."""
        return ((np.arange(len(self.layout.series)) + 1) / 1000 + step / 100_000).astype(np.float32)

    def fetch(self) -> list[Command]:
        """Commands for this attempt; that they are asked for makes them delivered."""
        answer = self.client.get(f"/runs/{self.run}/commands", params={"attempt": self.attempt})
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=list[Command])

    def _post(self, what: str, body: bytes) -> None:
        answer = self.client.post(f"/runs/{self.run}/{what}", content=body)
        assert answer.status_code == 200, answer.text


@pytest.fixture
def job(client: httpx.Client) -> Callable[..., Job]:
    """Makes jobs, each with a run of its own."""
    def make(**fields: Any) -> Job:
        return Job(client=client, **fields)

    return make


@pytest.fixture(scope="module")  # playwright keeps an event loop in this thread, which others would meet
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.fail("no Chromium on this machine; `make chromium` installs it or says what to do")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=[
            "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"])
        yield chromium
        chromium.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser without any cookie."""
    fresh = browser.new_context(viewport={"width": 1400, "height": 1000}, color_scheme="dark")
    fresh.set_default_timeout(PATIENCE_MS)
    yield fresh
    fresh.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser's console said that is an error, and requests that left this machine."""
    return []


@pytest.fixture
def page(context: BrowserContext, dashboard: Service, complaints: list[str]) -> Iterator[Page]:
    """A page that is logged in; the test fails when its console shows an error."""
    log_in(context, dashboard)
    tab = context.new_page()
    watch(tab, complaints)
    yield tab
    assert complaints == []


def watch(page: Page, complaints: list[str]) -> None:
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("http://127.0.0.1:", "blob:", "data:"))
            else complaints.append("foreign address " + request.url))


def log_in(context: BrowserContext, dashboard: Service) -> None:
    """Give the browser the cookie that the login page would get it."""
    answer = httpx.post(dashboard.url + "/login", headers={"authorization": f"Bearer {dashboard.token}"},
                        trust_env=False)
    context.add_cookies([{"name": COOKIE, "value": answer.cookies[COOKIE], "url": dashboard.url}])
