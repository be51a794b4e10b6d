"""A collector that is slow (D1) or away, seen through a relay that holds requests back."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from playwright.sync_api import BrowserContext, expect

from fp8scope_dashboard.settings import Settings

pytestmark = pytest.mark.browser

Service = Any
Job = Any


class Relay:
    """Forwards TCP to the collector; holds requests for a heat map's description back by `delay` seconds."""

    def __init__(self, target: int) -> None:
        self.delay = 0.0
        self.open = True
        self.held = 0
        self.most_held = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()
        assert self._server is not None
        self.port: int = self._server.sockets[0].getsockname()[1]

    def _run(self) -> None:
        async def serve() -> None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self._stopped = asyncio.Event()
            self._ready.set()
            await self._stopped.wait()
            self._server.close()
            self._drop()
            await asyncio.sleep(0.1)

        self._loop.run_until_complete(serve())
        self._loop.close()

    def _drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def cut(self) -> None:
        """End all connections and take no new ones until `open` is set again."""
        self.open = False
        self._loop.call_soon_threadsafe(self._drop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.open:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, far_writer}
        with suppress(OSError):
            await asyncio.gather(self._pump(reader, far_writer, hold=True), self._pump(far_reader, writer))
        self._writers -= {writer, far_writer}

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hold: bool = False
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(2**16):
                if hold and b"/heatmap?" in chunk:
                    self.held += 1
                    self.most_held = max(self.most_held, self.held)
                    await asyncio.sleep(self.delay)
                    self.held -= 1
                writer.write(chunk)
                await writer.drain()
        writer.close()


@pytest.fixture(scope="module")
def relay(collector: Service) -> Iterator[Relay]:
    running = Relay(int(collector.url.rpartition(":")[2]))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def far_dashboard(start_dashboard: Callable[[str], Service], relay: Relay) -> Service:
    return start_dashboard(f"http://127.0.0.1:{relay.port}")


def test_the_first_answer_to_a_deep_link_is_complete(far_dashboard: Service) -> None:
    """A fresh dashboard names our scripts even when its first request is for a run's page."""
    headers = {"authorization": f"Bearer {far_dashboard.token}"}
    page = httpx.get(far_dashboard.url + "/runs/some-run", headers=headers, trust_env=False).text
    for name in ("theme.js", "hover.js", "scope.js", "shell.js", "style.css"):
        assert f"/assets/{name}?" in page


def test_d1_a_slow_collector_makes_the_page_slow_and_nothing_piles_up(
    context: BrowserContext, far_dashboard: Service, relay: Relay, job: Callable[..., Job]
) -> None:
    """D1: steps arrive five times as fast as answers; the page goes on showing newer ones, and never has
    more than the one question open."""
    one = job().start()
    one.send(0, one.wave(0))
    page = context.new_page()
    page.goto(f"{far_dashboard.url}/login?next=/runs/{one.run}#{far_dashboard.token}")
    page.wait_for_selector(".picture[src]")
    relay.delay, relay.most_held = 1.2, 0
    shown: set[str] = set()
    for step in range(1, 17):
        one.send(step, one.wave(step))
        time.sleep(0.25)
        shown.add(page.locator(".tile-value").first.inner_text())
    assert len(shown) >= 3, shown
    expect(page.locator(".tile-value").first).to_have_text("16")
    assert relay.most_held == 1
    relay.delay = 0


def test_an_absent_collector_is_a_banner_until_it_is_back(
    context: BrowserContext, far_dashboard: Service, relay: Relay, job: Callable[..., Job]
) -> None:
    """Without a collector the page keeps what it shows, says what is wrong, and recovers by itself."""
    one = job().start()
    one.send(0, one.wave(0))
    page = context.new_page()
    page.goto(f"{far_dashboard.url}/login?next=/runs/{one.run}#{far_dashboard.token}")
    page.wait_for_selector(".picture[src]")
    relay.cut()
    expect(page.locator("#banner")).to_contain_text("does not answer")
    expect(page.locator(".picture")).to_be_visible()
    one.send(1, one.wave(1))
    relay.open = True
    expect(page.locator("#banner")).to_be_hidden(timeout=20_000)
    expect(page.locator(".tile-value").first).to_have_text("1")


def test_settings_name_what_is_wrong() -> None:
    """A broken collector address is an error with the value and an example."""
    with pytest.raises(ValueError, match=r"ftp://x.*must be http"):
        Settings(token="t", collector="ftp://x")
