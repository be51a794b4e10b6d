"""Nobody without the token gets anything but the login page; the token stays out of addresses and logs."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from playwright.sync_api import BrowserContext, Page, expect
from starlette.routing import Mount, WebSocketRoute

from fp8scope_dashboard.app import create_app
from fp8scope_dashboard.door import OPEN_PATHS, Door
from fp8scope_dashboard.settings import Settings
from fp8scope_protocol.access import Message

Service = Any
TOKEN = "f8s_of-this-test"


@pytest.fixture(scope="module")
def door() -> Door:
    return create_app(Settings(token=TOKEN, collector="http://127.0.0.1:1"))


def routes(door: Door) -> Iterator[tuple[str, str]]:
    """(method, path) of every route, parameters filled in; method WEBSOCKET for websockets."""
    server = door.guard.app
    assert isinstance(server, FastAPI)
    for route in server.routes:
        path = str(getattr(route, "path", "")).replace("{path:path}", "x").replace("{run}", "r")
        path = path.replace("{package_name}", "dash").replace("{fingerprinted_path:path}", "x.js")
        if isinstance(route, WebSocketRoute) or "WebSocket" in type(route).__name__:
            yield "WEBSOCKET", path
        elif isinstance(route, Mount):
            yield "GET", path + "/style.css"
        else:
            for method in getattr(route, "methods", None) or {"GET"}:
                yield method, path


def status(door: Door, method: str, path: str, **headers: str) -> int:
    """What the door answers; for a websocket 403 when it is closed before it opens."""
    if method == "WEBSOCKET":
        return asyncio.run(_knock(door, path, headers))

    async def ask() -> int:
        transport = httpx.ASGITransport(door)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8051") as client:
            return (await client.request(method, path, headers=headers)).status_code

    return asyncio.run(ask())


async def _knock(door: Door, path: str, headers: dict[str, str]) -> int:
    sent: list[Message] = []
    fields = {"host": "127.0.0.1:8051"} | headers

    async def receive() -> Message:
        return {"type": "websocket.connect" if not sent else "websocket.disconnect", "code": 1000}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "query_string": b"", "subprotocols": [],
             "headers": [(key.encode(), value.encode()) for key, value in fields.items()]}
    await door(scope, receive, send)
    return 403 if sent[0]["type"] == "websocket.close" else 101


def test_every_route_needs_the_token(door: Door) -> None:
    """Walks all routes, Dash's and the websocket included: 401 (403 for a websocket) without a token."""
    walked = set(routes(door))
    assert {("WEBSOCKET", "/_dash-ws-callback"), ("POST", "/_dash-update-component"),
            ("GET", "/_dash-layout"), ("GET", "/assets/style.css"),
            ("GET", "/collector/runs/r/heatmap.png")} <= walked
    for method, path in walked:
        if path not in OPEN_PATHS:
            expected = 403 if method == "WEBSOCKET" else 401
            assert status(door, method, path) == expected, (method, path)
            assert status(door, method, path, authorization="Bearer wrong") == expected, (method, path)


def test_every_route_refuses_foreign_hosts_and_origins(door: Door) -> None:
    """Even with the token: an unknown Host is 421, a foreign Origin 403, on every route and open path."""
    token = f"Bearer {TOKEN}"
    for method, path in routes(door):
        foreign = status(door, method, path, authorization=token, host="evil.example")
        assert foreign == (403 if method == "WEBSOCKET" else 421), (method, path)
        assert status(door, method, path, authorization=token, origin="http://evil.example") == 403


def test_a_browser_is_shown_the_way_in(door: Door) -> None:
    """A page asked for without a token leads to the login page and remembers where to."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(door)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/runs/a%20b?layer=x", headers={"accept": "text/html"})

    answer = asyncio.run(ask())
    assert answer.status_code == 303
    assert answer.headers["location"] == "/login?next=/runs/a%2520b%3Flayer%3Dx"


def test_pages_cannot_be_framed_or_fed_scripts(door: Door) -> None:
    """Every answer, refusals included, carries the policy: our own scripts only, no frames."""

    async def ask(path: str) -> httpx.Headers:
        transport = httpx.ASGITransport(door)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(path)).headers

    for path in ("/login", "/", "/assets/login.js", "/api/v1/runs"):
        headers = asyncio.run(ask(path))
        policy = headers["content-security-policy"]
        scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
        assert "unsafe" not in scripts
        assert "http" not in scripts
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/api/v1/runs", "/api/nope", "/collector/runs", "/collector/runs/r/rules"])
def test_unknown_api_paths_are_404(door: Door, path: str) -> None:
    """Dash's catch-all, which answers a page to any GET, does not reach /api and /collector."""
    assert status(door, "GET", path, authorization=f"Bearer {TOKEN}") == 404


@pytest.mark.browser
def test_login_by_link(context: BrowserContext, dashboard: Service, complaints: list[str]) -> None:
    """/login#TOKEN logs in; the token is in no request's address, and scripts cannot read the cookie."""
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{dashboard.url}/login?next=/runs/some-run%3Flayer%3Dx#{dashboard.token}")
    page.wait_for_url(f"{dashboard.url}/runs/some-run?layer=x")
    (cookie,) = context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert page.evaluate("document.cookie") == ""
    assert not [address for address in asked if dashboard.token in address.partition("#")[0]]
    assert dashboard.token not in dashboard.log.read_text()
    page.go_back()
    assert dashboard.token not in page.url


@pytest.mark.browser
def test_login_by_form(context: BrowserContext, dashboard: Service) -> None:
    """A wrong token is refused in words, the right one pasted into the form logs in."""
    page: Page = context.new_page()
    page.goto(dashboard.url)
    page.fill("#token", "f8s_wrong")
    page.click("button")
    expect(page.locator("#message")).to_contain_text("not the one")
    page.fill("#token", dashboard.token)
    page.click("button")
    expect(page.locator("#runs-page h1")).to_have_text("Runs")


@pytest.mark.browser
@pytest.mark.parametrize("target", [
    "https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_login_goes_nowhere_else(context: BrowserContext, dashboard: Service, target: str) -> None:
    """`next` cannot lead to another site."""
    page = context.new_page()
    page.goto(f"{dashboard.url}/login?next={target}#{dashboard.token}")
    page.wait_for_url(dashboard.url + "/")


def test_pictures_come_through_with_their_etag(
    dashboard: Service, job: Callable[..., Any]
) -> None:
    """The proxy forwards the collector's ETag, and a 304 for it."""
    one = job().start()
    one.send(0, one.wave(0))
    address = f"{dashboard.url}/collector/runs/{one.run}/heatmap.png"
    query = {"metric": "underflow_ratio", "role": "activation", "width": "20", "height": "10"}
    headers = {"authorization": f"Bearer {dashboard.token}"}
    with httpx.Client(trust_env=False, headers=headers) as client:
        first = client.get(address, params=query)
        assert first.content.startswith(b"\x89PNG")
        again = client.get(address, params=query, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        broken = client.get(address, params=query | {"metric": "nope"})
        assert broken.status_code == 422
        assert broken.headers["content-type"] == "application/problem+json"
