"""What the browser fetches from the collector itself: pictures and cells, through the dashboard.

Only these three paths, only GET, so that the browser never needs the collector's address and a page's
script can change nothing there.
"""

from collections.abc import Awaitable, Callable

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask

from fp8scope_dashboard.client import Collector, path_of

SHOWN = ("heatmap.png", "heatmap", "cell")

_ASKED = ("if-none-match", "accept")
_ANSWERED = ("content-type", "content-length", "content-encoding", "etag", "cache-control")


def add_proxy(server: FastAPI, collector: Collector) -> None:
    """`GET /collector/runs/{run}/{shown}?...`, streamed, with ETag and 304; 404 for everything else."""

    for shown in SHOWN:
        server.get("/collector/runs/{run}/" + shown, include_in_schema=False)(_forward(collector, shown))


def _forward(collector: Collector, shown: str) -> Callable[[str, Request], Awaitable[Response]]:
    async def forward(run: str, request: Request) -> Response:
        asked = {name: request.headers[name] for name in _ASKED if name in request.headers}
        # The bytes pass through as they come, so only an encoding that the browser reads may be asked for.
        asked["accept-encoding"] = request.headers.get("accept-encoding", "identity")
        outgoing = collector.http.build_request(
            "GET", "/api/v1/" + path_of(run, shown), params=request.url.query, headers=asked)
        try:
            reply = await collector.http.send(outgoing, stream=True)
        except httpx.HTTPError:
            return JSONResponse({"title": "the collector does not answer", "status": 502}, 502,
                                media_type="application/problem+json")
        headers = {name: reply.headers[name] for name in _ANSWERED if name in reply.headers}
        return StreamingResponse(reply.aiter_raw(), reply.status_code, headers,
                                 background=BackgroundTask(reply.aclose))

    return forward


def add_not_found(server: FastAPI) -> None:
    """404 where Dash's catch-all would answer a page with 200."""

    methods = ["GET", "POST", "PUT", "DELETE"]

    @server.api_route("/api/{path:path}", include_in_schema=False, methods=methods)
    @server.api_route("/collector/{path:path}", include_in_schema=False, methods=methods)
    async def not_found(path: str) -> Response:
        return JSONResponse({"title": f"there is no {path[:80]!r} here", "status": 404}, 404,
                            media_type="application/problem+json")
