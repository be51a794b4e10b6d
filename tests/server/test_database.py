"""Migrations: they make what the models say, once, from the checkout and from an installed wheel."""

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import URL, Connection, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from fp8scope_protocol.errors import Fp8scopeError, Invalid
from fp8scope_server.database import migrate, migrations_folder
from fp8scope_server.models import Base
from fp8scope_server.postgres import EmbeddedPostgres
from fp8scope_server.settings import ServerSettings, parse_database_url

ROOT = Path(__file__).parents[2]
NEWEST = max(path.name for path in (ROOT / "migrations" / "versions").glob("[0-9]*.py"))[:4]


@pytest.fixture
def url(postgres: EmbeddedPostgres) -> URL:
    """An empty database."""
    name = "test_" + uuid.uuid4().hex[:12]
    whole = postgres.url()
    with psycopg.connect(host=str(whole.query["host"]), user=whole.username, dbname="postgres",
                         autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return postgres.url(name)


def migrated(url: URL, times: int = 1) -> None:
    """Migrate as `times` collectors would that start together."""
    async def one() -> None:
        engine = create_async_engine(url)
        try:
            await migrate(engine)
        finally:
            await engine.dispose()

    async def together() -> None:
        await asyncio.gather(*(one() for _ in range(times)))

    asyncio.run(together())


def connect(url: URL) -> psycopg.Connection:
    return psycopg.connect(host=str(url.query["host"]), user=url.username, dbname=url.database,
                           autocommit=True)


def query(url: URL, statement: LiteralString) -> list[tuple[Any, ...]]:
    with connect(url) as connection:
        return connection.execute(statement).fetchall()


def test_migrations_make_what_the_models_say(url: URL) -> None:
    """Alembic finds no difference, names of constraints and indices included."""
    migrated(url)
    engine = create_engine(url)

    def differences(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))

    with engine.connect() as connection:
        assert differences(connection) == []
    engine.dispose()
    names = {name for name, in query(url, "SELECT conname FROM pg_constraint WHERE contype IN ('p', 'f') "
                                          "AND connamespace = 'public'::regnamespace")}
    tables = Base.metadata.tables.values()
    expected = {constraint.name for table in tables for constraint in table.constraints}
    assert names - {"alembic_version_pkc"} == expected


def test_frames_are_read_through_their_indices(url: URL) -> None:
    """One metric over steps uses the key, one step uses the index: neither scans a run."""
    migrated(url)
    explain: LiteralString = "EXPLAIN SELECT * FROM frames WHERE run_id = 'r1' AND "
    with connect(url) as connection:
        connection.execute(
            "INSERT INTO frames SELECT 'r' || run, 'metric' || metric, step, 'a', '0', step, 'l', 'f4', 1, "
            "repeat('x', 100)::bytea FROM generate_series(0, 3) run, generate_series(0, 19) metric, "
            "generate_series(0, 99) step")
        connection.execute("ANALYZE frames")
        over_steps = connection.execute(explain + "metric = 'metric1' AND step BETWEEN 10 AND 20").fetchall()
        one_step = connection.execute(explain + "step = 10").fetchall()
    assert any("pk_frames " in line for line, in over_steps), over_steps
    assert any("ix_frames_run_id_step " in line for line, in one_step), one_step


def test_collectors_that_start_together_take_turns(url: URL) -> None:
    """Four migrations of one empty database at once all succeed."""
    migrated(url, times=4)
    assert query(url, "SELECT version_num FROM alembic_version") == [(NEWEST,)]


def test_a_newer_schema_is_refused(url: URL) -> None:
    """A database that a later version migrated is left alone, and the message says what to do."""
    migrated(url)
    with connect(url) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(Fp8scopeError, match=r"9999.*upgrade fp8scope"):
        migrated(url)


def test_no_database_is_one_line_without_the_password() -> None:
    """Where nothing listens, the error names the address and hides the password."""
    with pytest.raises(Fp8scopeError, match=r"no database at .*127\.0\.0\.1:1/") as raised:
        migrated(parse_database_url("postgresql://user:secret@127.0.0.1:1/nothing"))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("address", ["sqlite:///x.db", "mysql://u:secret@h/d", "nonsense", "postgresql+asyncpg://h/d"])
def test_other_databases_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL only; the message shows the form that is accepted."""
    monkeypatch.setenv("FP8SCOPE_DATABASE_URL", address)
    with pytest.raises(Invalid, match="must look like postgresql://") as raised:
        ServerSettings.from_environment()
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("name", "value"), [
    ("FP8SCOPE_PORT", "http"), ("FP8SCOPE_PORT", "70000"), ("FP8SCOPE_QUEUE", "0"),
    ("FP8SCOPE_WRITERS", "-1"), ("FP8SCOPE_MAX_BODY_BYTES", str(2**40)),
])
def test_bad_settings_name_their_variable(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message begins with the variable."""
    monkeypatch.setenv(name, value)
    with pytest.raises(Invalid, match=f"^{name} = "):
        ServerSettings.from_environment()


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable arrives, and a plain postgres address gets our driver."""
    monkeypatch.setenv("FP8SCOPE_HOST", "0.0.0.0")
    monkeypatch.setenv("FP8SCOPE_PORT", "8123")
    monkeypatch.setenv("FP8SCOPE_HOSTS", "scope.example, Other.example")
    monkeypatch.setenv("FP8SCOPE_DATABASE_URL", "postgres://me:pw@db/fp8scope")
    settings = ServerSettings.from_environment()
    assert (settings.host, settings.port) == ("0.0.0.0", 8123)
    assert settings.hosts == ("127.0.0.1", "localhost", "::1", "0.0.0.0", "scope.example", "other.example")
    assert settings.database_url is not None
    assert settings.database_url.render_as_string(hide_password=False) == "postgresql+psycopg://me:pw@db/fp8scope"


def test_a_wheel_carries_its_migrations(url: URL, tmp_path: Path) -> None:
    """A database is migrated by a wheel that is built, installed, and run outside of the checkout."""
    assert migrations_folder() == ROOT / "migrations"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
                   check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    [wheel] = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)],
                   check=True)
    program = (
        "import asyncio, sys\n"
        "from sqlalchemy.ext.asyncio import create_async_engine\n"
        "from fp8scope_server.database import migrate, migrations_folder\n"
        "print(migrations_folder())\n"
        "asyncio.run(migrate(create_async_engine(sys.argv[1])))\n")
    done = subprocess.run([sys.executable, "-c", program, str(url)], check=True, stdout=subprocess.PIPE,
                          text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(target)})
    assert Path(done.stdout.strip()) == target / "fp8scope_server" / "migrations"
    assert query(url, "SELECT version_num FROM alembic_version") == [(NEWEST,)]
