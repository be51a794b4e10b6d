"""The dashboard as one ASGI app: login, proxy, Dash, and the guard around all of it."""

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dash import Dash
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from fp8scope_dashboard import shell
from fp8scope_dashboard.callbacks import add_callbacks
from fp8scope_dashboard.client import Collector
from fp8scope_dashboard.clientside import add_clientside
from fp8scope_dashboard.door import OPEN_PATHS, Door, add_login
from fp8scope_dashboard.live import add_live
from fp8scope_dashboard.proxy import add_not_found, add_proxy
from fp8scope_dashboard.settings import Settings
from fp8scope_protocol.access import Guard

ASSETS = Path(__file__).parent / "assets"


def create_app(settings: Settings) -> Door:
    """The whole dashboard. Nothing of it answers without the token but the login page."""
    collector = Collector(settings.collector, settings.token)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await collector.close()

    server = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)

    @server.get("/healthz", include_in_schema=False)
    async def healthz() -> Response:
        return PlainTextResponse("ok")

    add_login(server, settings.token)
    add_proxy(server, collector)
    add_not_found(server)  # before Dash, whose catch-all answers every GET
    app = Dash(
        "fp8scope_dashboard", server=server,  # type: ignore[arg-type]
        title="fp8scope", update_title="", assets_folder=str(ASSETS),
        include_assets_files=False, index_string=shell.index_page(_version_of_assets()), serve_locally=True,
        websocket_inactivity_timeout=0, add_log_handler=False,
    )
    app.layout = shell.layout
    add_live(app, collector)
    add_callbacks(app, collector)
    add_clientside(app)
    guard = Guard(server, token=settings.token, hosts=settings.accepted_hosts, open_paths=OPEN_PATHS)
    return Door(guard, policy=_policy(app))


def _version_of_assets() -> str:
    return f"{zlib.crc32(b''.join(path.read_bytes() for path in sorted(ASSETS.iterdir()))):08x}"


def _policy(app: Dash) -> str:
    """Content security policy: our own files, Dash's inline starter by its hash, nothing else."""
    scripts = " ".join(["'self'", *app.csp_hashes()])
    return "; ".join([
        "default-src 'self'", f"script-src {scripts}", "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:", "object-src 'none'", "base-uri 'none'", "form-action 'self'",
        "frame-ancestors 'none'",
    ])
