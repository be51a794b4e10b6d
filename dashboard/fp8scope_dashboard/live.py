"""Live updates: one websocket callback per page that pushes versions, never data.

It follows the collector's live feed of the run that the page shows and sets the `live` store to
{run, version, last_step, problem, beat}. Everything else is fetched by callbacks that the page starts
when a version is new and the last answer is there, so a slow collector makes pages slow, never piles up.

The callback has no inputs: Dash restarts only such callbacks when a websocket comes back. So it asks the
page where it is.
"""

import asyncio
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

from dash import Dash, ctx
from dash.exceptions import WebsocketDisconnected

from fp8scope_dashboard.client import Collector, CollectorError, Refused

BEAT_SECONDS = 5.0
"""Longest silence towards the page: it falls back to asking by itself when beats stay away."""
LOOK_SECONDS = 1.0
"""How often to ask the page whether it still shows the same run."""
LEAST_SECONDS = 0.3
"""Shortest time between two pushes."""
LIST_SECONDS = 3.0
RETRY_SECONDS = 2.0
SLEEPING_PAGE_SECONDS = 1800.0
"""How long a page may stay silent (a frozen tab) before its follower gives up."""


class Page(Protocol):
    """What live.py needs of Dash's websocket."""

    async def get_prop(self, component_id: str, prop_name: str, timeout: float = ...) -> Any: ...

    async def set_prop(self, component_id: str, prop_name: str, value: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a page is: the list of runs, or one run."""

    run: str | None


class Follower:
    """Keeps one page's `live` store up to date."""

    def __init__(self, page: Page, collector: Collector) -> None:
        self._page = page
        self._collector = collector
        self._beat = 0

    async def follow(self) -> None:
        """Until the page goes away."""
        while True:
            place = await self._place()
            try:
                if place.run is None:
                    await self._follow_list()
                else:
                    await self._follow_run(place.run)
            except Refused:  # an unknown run: the page says so, and it may yet appear
                await self._push(place.run, None)
                await asyncio.sleep(LIST_SECONDS)
            except CollectorError as error:
                await self._push(place.run, None, problem=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow_run(self, run: str) -> None:
        place = Place(run=run)
        await self._collector.run(run)  # an unknown run is refused here, in words
        async with self._collector.live(run) as feed:
            silent = 0.0
            version: int | None = None
            last_step: int | None = None
            while await self._place() == place:
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        document = await feed.newest()
                except TimeoutError:
                    silent += LOOK_SECONDS
                    if silent >= BEAT_SECONDS and version is not None:
                        await self._push(run, version, last_step)
                        silent = 0.0
                    continue
                version, last_step, silent = document.version, document.last_step, 0.0
                await self._push(run, version, last_step)
                await asyncio.sleep(LEAST_SECONDS)

    async def _follow_list(self) -> None:
        place = Place(run=None)
        while await self._place() == place:
            runs = await self._collector.runs()
            seen = [(run.id, run.last_seen_at, run.active, run.firing, run.layers_in_bf16) for run in runs]
            await self._push(None, zlib.crc32(repr(seen).encode()))
            await asyncio.sleep(LIST_SECONDS)

    async def _place(self) -> Place:
        """Asks the page; a frozen tab may take its time."""
        waited = 0.0
        while True:
            try:
                place = await self._page.get_prop("place", "data", timeout=30.0)
            except TimeoutError:
                waited += 30.0
                if waited >= SLEEPING_PAGE_SECONDS:
                    raise WebsocketDisconnected() from None  # type: ignore[no-untyped-call]
                continue
            if place is not None:
                return Place(run=place.get("run"))
            await asyncio.sleep(0.1)  # the page has not looked at its address yet

    async def _push(
        self, run: str | None, version: int | None, last_step: int | None = None, problem: str = ""
    ) -> None:
        self._beat += 1
        await self._page.set_prop("live", "data", {
            "run": run, "version": version, "last_step": last_step, "problem": problem, "beat": self._beat})


def add_live(app: Dash, collector: Collector) -> None:
    """Register the websocket callback."""

    @app.callback(websocket=True, persistent=True)
    async def follow() -> None:
        page = ctx.websocket
        if page is not None:
            await Follower(page, collector).follow()


