"""The collector as one ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from fp8scope_protocol.access import Guard, ensure_token
from fp8scope_server import (
    attempts,
    commands,
    ingest,
    live,
    losses,
    parts,
    policies,
    problems,
    prometheus,
    read,
)
from fp8scope_server.changes import Changes
from fp8scope_server.database import open_database
from fp8scope_server.intake import Intake
from fp8scope_server.layouts import Layouts
from fp8scope_server.nonfinite import NonfiniteTally
from fp8scope_server.query import known_parameters
from fp8scope_server.settings import ServerSettings


def create_app(settings: ServerSettings) -> FastAPI:
    """The collector of `settings`. The database opens with the app's lifespan.

    `app.state` holds what requests share: database, changes, intake, layouts, nonfinite, settings.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_database(settings) as database:
            app.state.database = database
            yield

    app = FastAPI(title="fp8scope collector", lifespan=lifespan, openapi_url=None)
    app.state.settings = settings
    app.state.changes = Changes()
    app.state.layouts = Layouts()
    app.state.intake = Intake(
        queue=settings.queue, writers=settings.writers, max_body_bytes=settings.max_body_bytes)
    app.state.nonfinite = NonfiniteTally()
    for module in (attempts, ingest, parts, losses):
        app.include_router(module.router)
    strictly = [Depends(known_parameters)]
    for module in (commands, policies, read, live, prometheus):
        app.include_router(module.router, dependencies=strictly)
    app.add_api_route("/healthz", healthz, response_class=PlainTextResponse, dependencies=strictly)
    app.add_api_route("/openapi.json", openapi, response_class=JSONResponse, dependencies=strictly)
    problems.install(app)
    app.add_middleware(Guard, token=ensure_token(), hosts=settings.hosts)
    return app


async def healthz() -> PlainTextResponse:
    """Answers as soon as the database is open."""
    return PlainTextResponse("ok\n")


async def openapi(request: Request) -> JSONResponse:
    """What this document is: every route, its parameters and its body."""
    return JSONResponse(request.app.openapi())
