"""Every route and websocket of the collector stands behind the guard."""

import re
import socket
from collections.abc import Iterator

import httpx
import pytest
from fastapi.routing import APIRoute, APIWebSocketRoute, iter_route_contexts
from starlette.routing import Route
from tests.server.conftest import TOKEN, RunningCollector
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect


def routes(collector: RunningCollector) -> Iterator[tuple[str, str]]:
    """(method, path) of every HTTP route, with something in place of each parameter."""
    for found in iter_route_contexts(collector.app.routes):
        if not isinstance(found.original_route, APIWebSocketRoute):
            for method in sorted(found.methods or ()):
                yield method, re.sub(r"{[^}]*}", "x", found.path or "")


def websockets(collector: RunningCollector) -> list[str]:
    return [re.sub(r"{[^}]*}", "x", found.path or "") for found in iter_route_contexts(collector.app.routes)
            if isinstance(found.original_route, APIWebSocketRoute)]


@pytest.fixture(scope="module")
def anyone(collector: RunningCollector) -> Iterator[httpx.Client]:
    """A client without a token."""
    with httpx.Client(base_url=collector.url, timeout=30, trust_env=False) as client:
        yield client


def test_the_walk_sees_the_whole_api(collector: RunningCollector) -> None:
    """The routes of ingest, reading, control, metrics and the schema are among those walked."""
    paths = {path for _, path in routes(collector)}
    assert {"/api/v1/runs/x/batches", "/api/v1/runs", "/api/v1/runs/x/commands", "/api/v1/runs/x/rules/x",
            "/metrics", "/openapi.json", "/healthz"} <= paths
    assert websockets(collector) == ["/api/v1/runs/x/live"]
    known = (APIRoute, Route, APIWebSocketRoute)
    unknown = [found.original_route for found in iter_route_contexts(collector.app.routes)
               if not isinstance(found.original_route, known)]
    assert not unknown, "a mounted app or another kind of route is not walked"


def test_no_route_answers_without_a_token(collector: RunningCollector, anyone: httpx.Client) -> None:
    """401 everywhere but at /healthz, with no, a wrong, and an empty token, and for unknown addresses."""
    unknown = [("GET", path) for path in ("/nowhere", "/healthz/", "/healthz/x")]
    for method, path in [*routes(collector), *unknown]:
        wanted = 200 if (method, path) == ("GET", "/healthz") else 401
        if path == "/healthz" and method != "GET":
            continue
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"},
                        {"authorization": f"Basic {TOKEN}"}, {"cookie": "fp8scope_session=wrong"}):
            answer = anyone.request(method, path, headers=headers)
            assert answer.status_code == wanted, (method, path, headers)


def test_tokens_in_the_address_do_not_count(anyone: httpx.Client) -> None:
    """An address ends up in logs: it is no place for a token."""
    assert anyone.get("/api/v1/runs", params={"token": TOKEN, "access_token": TOKEN}).status_code == 401


def test_unknown_hosts_are_refused_everywhere(collector: RunningCollector, anyone: httpx.Client) -> None:
    """DNS rebinding: a request for another name is refused, token or not, at /healthz too."""
    for method, path in routes(collector):
        for host in ("evil.example", "evil.example:8050", "127.0.0.1.evil.example", ""):
            headers = {"host": host, "authorization": f"Bearer {TOKEN}"}
            answer = anyone.request(method, path, headers=headers)
            assert answer.status_code in (400, 421), (method, path, host)


def test_foreign_origins_are_refused_everywhere(collector: RunningCollector, anyone: httpx.Client) -> None:
    """A page of another origin, port included, gets nowhere, even with the token."""
    for method, path in routes(collector):
        for origin in ("https://evil.example", "http://127.0.0.1:1", "null"):
            headers = {"origin": origin, "authorization": f"Bearer {TOKEN}"}
            assert anyone.request(method, path, headers=headers).status_code == 403, (method, path, origin)


def test_the_token_opens(collector: RunningCollector, anyone: httpx.Client) -> None:
    """Bearer token or session cookie; the collector's own origin."""
    for headers in ({"authorization": f"Bearer {TOKEN}"}, {"cookie": f"fp8scope_session={TOKEN}"},
                    {"authorization": f"Bearer {TOKEN}", "origin": collector.url}):
        assert anyone.get("/api/v1/runs", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [
    {}, {"Authorization": "Bearer wrong"},
    {"Authorization": f"Bearer {TOKEN}", "Origin": "https://evil.example"},
])
def test_websockets_are_refused_before_they_open(
    headers: dict[str, str], collector: RunningCollector
) -> None:
    """No token, a wrong one, or a foreign page: the handshake fails."""
    for path in websockets(collector):
        address = f"ws://{collector.host}{path}"
        with (pytest.raises(InvalidStatus) as refused,
              connect(address, additional_headers=headers, proxy=None)):
            pass
        assert refused.value.response.status_code == 403


def test_websockets_with_a_foreign_host_are_refused(collector: RunningCollector) -> None:
    """The Host header counts for websockets as well."""
    for path in websockets(collector):
        host, port = collector.host.split(":")
        request = (f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer {TOKEN}\r\n"
                   "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                   "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request.encode())
            assert b" 403 " in connection.recv(4096).split(b"\r\n", 1)[0]
