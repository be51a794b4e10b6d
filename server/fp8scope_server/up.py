"""`fp8scope up`: the collector and the dashboard on this machine, until Ctrl-C."""

import argparse
import importlib.util
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx

from fp8scope_protocol.access import data_home, ensure_token, token_path
from fp8scope_protocol.command_line import Parser
from fp8scope_protocol.errors import Fp8scopeError, Invalid
from fp8scope_server.children import Child, check_running
from fp8scope_server.interrupt import raise_on_terminate

START_SECONDS = 120.0
"""Longest wait for a service: a first start creates a database cluster, a start after a crash replays one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """Where the two services listen, and how to talk to them."""

    collector: str
    dashboard: str
    token: str
    children: tuple[Child, ...] = ()

    def login(self, *, with_token: bool) -> str:
        """The login page, for a terminal with the token in the fragment, which no browser sends to a server;
        for what may be a log file with the way to the token."""
        if with_token:
            return f"{self.dashboard}/login#{self.token}"
        where = "FP8SCOPE_TOKEN" if os.environ.get("FP8SCOPE_TOKEN") else token_path()
        return f"{self.dashboard}/login (token: {where})"

    def client(self) -> httpx.Client:
        """An HTTP client of the collector with the local token."""
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.collector + "/api/v1", headers=headers, timeout=30, trust_env=False)


@contextmanager
def services(*, port: int, dashboard_port: int) -> Iterator[Services]:
    """Start both services and wait until they answer; end both on leaving."""
    if importlib.util.find_spec("dash") is None:
        raise Fp8scopeError("the dashboard is not installed; pip install 'fp8scope[dashboard]'")
    for name, number in (("port", port), ("dashboard-port", dashboard_port)):
        _check_free(name, number)
    if port == dashboard_port:
        raise Invalid("dashboard-port", dashboard_port, "must not be the port of the collector")
    found = Services(collector=f"http://127.0.0.1:{port}", dashboard=f"http://127.0.0.1:{dashboard_port}",
                     token=ensure_token())
    logs = data_home() / "logs"
    with Child("collector", "fp8scope_server.serve", log=logs / "collector.log",
               environment={"FP8SCOPE_HOST": "127.0.0.1", "FP8SCOPE_PORT": str(port)}) as collector:
        _wait(collector, found.collector)
        with Child("dashboard", "fp8scope_dashboard.serve", log=logs / "dashboard.log",
                   environment={"FP8SCOPE_DASHBOARD_HOST": "127.0.0.1",
                                "FP8SCOPE_DASHBOARD_PORT": str(dashboard_port),
                                "FP8SCOPE_COLLECTOR": found.collector}) as dashboard:
            _wait(dashboard, found.dashboard)
            yield replace(found, children=(collector, dashboard))


def wait_for_interrupt(children: Sequence[Child]) -> None:
    """Return at the first SIGINT or SIGTERM; raise when one of `children` ends by itself."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.wait(1):
        if not stopped.is_set():
            check_running(children)


def add_ports(parser: argparse.ArgumentParser) -> None:
    """The options for where the services listen, on loopback."""
    parser.add_argument("--port", type=int, help="of the collector (FP8SCOPE_PORT, 8050)")
    parser.add_argument("--dashboard-port", type=int, help="of the dashboard (FP8SCOPE_DASHBOARD_PORT, 8051)")


def ports(options: argparse.Namespace) -> dict[str, int]:
    """What `services` takes of those options."""
    return {"port": port_of(options.port, "FP8SCOPE_PORT", 8050),
            "dashboard_port": port_of(options.dashboard_port, "FP8SCOPE_DASHBOARD_PORT", 8051)}


def port_of(given: int | None, variable: str, default: int) -> int:
    """The port that an option gives, else an environment variable, else `default`."""
    text = os.environ.get(variable, "")
    if given is not None or not text:
        return default if given is None else given
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise Invalid(variable, text, "must be 1 to 65535")
    return int(text)


def _check_free(name: str, port: int) -> None:
    if not 0 < port < 65536:
        raise Invalid(name, port, "must be 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            rule = f"cannot listen there ({error.strerror}); name another with --{name}"
            raise Invalid(name, port, rule) from None


def _wait(child: Child, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if not child.running:
            raise Fp8scopeError(f"the {child.name} ended at its start; its log {child.log} ends with:\n"
                                + child.last_lines())
        try:
            if httpx.get(url + "/healthz", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise Fp8scopeError(f"the {child.name} did not answer within {START_SECONDS:g} s; see {child.log}")


def main(argv: list[str]) -> int:
    """Entry of `fp8scope up`."""
    parser = Parser(prog="fp8scope up", description=__doc__)
    add_ports(parser)
    options = parser.parse_args(argv)
    raise_on_terminate()
    with services(**ports(options)) as found:
        login = found.login(with_token=sys.stdout.isatty())
        print(f"dashboard  {login}\ncollector  {found.collector}\nCtrl-C ends both", flush=True)
        wait_for_interrupt(found.children)
    return 0
