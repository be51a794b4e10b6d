"""The collector's read API, typed, and the one thing the dashboard may change: commands."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec
import websockets.asyncio.client as websockets
from websockets.exceptions import WebSocketException

from fp8scope_dashboard.settings import LOOPBACK
from fp8scope_protocol.commands import Command, SetPrecision
from fp8scope_protocol.documents import (
    EventDocument,
    HeatmapDocument,
    LayerDocument,
    LiveDocument,
    RunDocument,
    SeriesDocument,
    StepsDocument,
    WorstDocument,
)

Document = TypeVar("Document")
Query = dict[str, str | int]


class CollectorError(Exception):
    """The collector cannot be asked or does not answer as agreed; the text is for people."""


class Unreachable(CollectorError):
    """No answer at all: try again later."""


class Refused(CollectorError):
    """An answer that says no, with its status and the collector's own words."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Collector:
    """One collector, addressed with the token. Open for the life of the dashboard; close it."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._authorization = {"Authorization": f"Bearer {token}"}
        self._proxied = urlsplit(address).hostname not in LOOPBACK
        self.http = httpx.AsyncClient(
            base_url=address, headers=self._authorization, timeout=httpx.Timeout(20.0, connect=3.0),
            trust_env=self._proxied,
        )

    async def close(self) -> None:
        await self.http.aclose()

    async def runs(self) -> list[RunDocument]:
        return await self._get("runs", list[RunDocument])

    async def run(self, run: str) -> RunDocument:
        return await self._get(path_of(run), RunDocument)

    async def series(self, run: str) -> list[SeriesDocument]:
        return await self._get(path_of(run, "series"), list[SeriesDocument])

    async def layers(self, run: str) -> list[LayerDocument]:
        return await self._get(path_of(run, "layers"), list[LayerDocument])

    async def heatmap(self, run: str, query: Query) -> HeatmapDocument:
        """What the picture of the same query shows: its rows, steps and scale."""
        return await self._get(path_of(run, "heatmap"), HeatmapDocument, query)

    async def steps(self, run: str, query: Query) -> StepsDocument:
        return await self._get(path_of(run, "steps"), StepsDocument, query)

    async def worst(self, run: str, query: Query) -> list[WorstDocument]:
        return await self._get(path_of(run, "worst"), list[WorstDocument], query)

    async def events(self, run: str, query: Query) -> list[EventDocument]:
        return await self._get(path_of(run, "events"), list[EventDocument], query)

    async def commands(self, run: str) -> list[Command]:
        return await self._get(path_of(run, "commands"), list[Command])

    async def send(self, run: str, action: SetPrecision, reason: str) -> Command:
        """Ask the job to do `action`; returns the queued command."""
        body = {"action": msgspec.to_builtins(action), "reason": reason}
        try:
            reply = await self.http.post("/api/v1/" + path_of(run, "commands"), json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return _document(reply, Command)

    @asynccontextmanager
    async def live(self, run: str) -> AsyncIterator["Live"]:
        """The run's live feed. Raises `CollectorError` when it cannot be opened or breaks."""
        address = "ws" + self.address.removeprefix("http") + "/api/v1/" + path_of(run, "live")
        try:
            async with websockets.connect(
                address, additional_headers=self._authorization, open_timeout=5,
                proxy=True if self._proxied else None,
            ) as connection:
                yield Live(connection)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise self._unreachable(error) from error

    async def _get(self, path: str, kind: type[Document], query: Query | None = None) -> Document:
        try:
            reply = await self.http.get("/api/v1/" + path, params=query)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return _document(reply, kind)

    def _unreachable(self, error: Exception) -> Unreachable:
        why = str(error) or type(error).__name__
        return Unreachable(f"The collector at {self.address} does not answer ({why}). Trying again.")


class Live:
    """An open live feed."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self._connection = connection

    async def newest(self) -> LiveDocument:
        """Wait for a document; of several that are waiting the last, so that a slow reader skips some."""
        message = await self._connection.recv()
        while True:
            try:
                async with asyncio.timeout(0):
                    message = await self._connection.recv()
            except TimeoutError:
                return msgspec.json.decode(message, type=LiveDocument)


def path_of(run: str, *rest: str) -> str:
    """`runs/RUN/...` with the run's id quoted: ids come from training jobs and may hold anything."""
    return "/".join(("runs", quote(run, safe=""), *rest))


def _document(reply: httpx.Response, kind: type[Document]) -> Document:
    if reply.is_success:
        try:
            return msgspec.json.decode(reply.content, type=kind)
        except (msgspec.DecodeError, ValueError) as error:
            words = f"The collector's answer to {reply.url.path} is not as agreed: {error}"
            raise CollectorError(words) from error
    raise Refused(reply.status_code, _detail(reply))


def _detail(reply: httpx.Response) -> str:
    """The words of a problem document, else the status."""
    try:
        problem: Any = msgspec.json.decode(reply.content)
    except msgspec.DecodeError:
        problem = None
    if isinstance(problem, dict):
        words = problem.get("detail") or problem.get("title")
        if words:
            return str(words)
    return f"The collector answered {reply.status_code} to {reply.url.path}"
