"""The collector's database: embedded or given, migrated before use."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import URL, Connection, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_server.postgres import EmbeddedPostgres
from fp8scope_server.settings import ServerSettings

_MIGRATION_LOCK = 0x6670387363  # any number that only we use
_READERS = 8
_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 2.0

LOG = logging.getLogger("fp8scope")


class Database:
    """Sessions on one PostgreSQL database. `with database.session() as session` is one transaction."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)

    def session(self) -> AbstractAsyncContextManager[AsyncSession]:
        """A session that commits on leaving, and rolls back when an exception leaves."""
        return self._sessions.begin()


@asynccontextmanager
async def open_database(settings: ServerSettings) -> AsyncIterator[Database]:
    """The database of `settings`, started if it is the embedded one, and migrated.

    Blocks the event loop while the embedded server starts, on purpose: the server lives as long as the
    thread that starts it, so that must not be a thread of a pool.
    """
    with ExitStack() as stack:
        url, embedded = settings.database_url, None
        if url is None:
            embedded = stack.enter_context(EmbeddedPostgres(settings.home))
            url = embedded.url()
        engine = create_async_engine(
            url, pool_size=settings.writers + _READERS, max_overflow=0,
            json_serializer=partial(json.dumps, allow_nan=False, separators=(",", ":")))
        if embedded is not None:
            event.listen(engine.sync_engine, "do_connect", partial(_to_the_socket, embedded))
        keeper = None
        try:
            await migrate(engine)
            if embedded is not None:
                keeper = asyncio.create_task(_keep_alive(embedded, engine))
            yield Database(engine)
        finally:
            if keeper is not None:
                keeper.cancel()
            await engine.dispose()


async def _keep_alive(embedded: EmbeddedPostgres, engine: AsyncEngine) -> None:
    """Start the embedded server again whenever it has died, here or with the process that ran it; until it
    answers, requests get a 503.

    The event loop waits meanwhile, for the reason that `open_database` gives.
    """
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            if not embedded.deserted():
                continue
            LOG.error("PostgreSQL has ended%s; starting it again",
                      " unexpectedly" if embedded.owner else " with the collector that ran it")
            embedded.restart()
        except (Fp8scopeError, OSError, psycopg.Error) as error:
            # what its children held may not be free yet, or the disk is full
            LOG.error("%s", error)
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            await engine.dispose()  # connections to the server that died


def _to_the_socket(embedded: EmbeddedPostgres, dialect: Any, record: Any, arguments: Any,
                   options: dict[str, Any]) -> None:
    """Of an event of SQLAlchemy's: whoever runs the server may have changed since the engine was made."""
    options["host"] = str(embedded.socket_folder)


async def migrate(engine: AsyncEngine) -> None:
    """Bring the schema to the newest version; collectors that start together take turns."""
    try:
        async with engine.begin() as connection:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
            await connection.run_sync(_upgrade)
    except OperationalError as error:
        raise Fp8scopeError(f"no database at {_shown(engine.url)}: {str(error.orig).strip()}") from None
    except CommandError as error:
        raise Fp8scopeError(f"the schema of {_shown(engine.url)} does not fit this fp8scope ({error}); "
                            "upgrade fp8scope, or give it another database") from None


def migrations_folder() -> Path:
    """The migrations, inside the package when it comes from a wheel, else in the checkout."""
    package = Path(__file__).parent
    for folder in (package / "migrations", package.parents[1] / "migrations"):
        if (folder / "env.py").exists():
            return folder
    raise Fp8scopeError(f"fp8scope is installed without its migrations (none in {package})")


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _shown(url: URL) -> str:
    """The address for people: a password may stand in its query, too."""
    query = {name: value for name, value in url.query.items() if name in ("host", "port")}
    return url.set(query=query).render_as_string(hide_password=True)
