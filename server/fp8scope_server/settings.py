"""Settings of the collector, from the environment."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from fp8scope_protocol.access import data_home
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.wire import MAX_BODY_BYTES

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Each field is FP8SCOPE_ plus its name in capitals; FP8SCOPE_HOME is the data home."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8050
    hosts: tuple[str, ...] = LOOPBACK
    """Host names that requests may ask for, separated by commas; `host` is always one of them."""
    home: Path = field(default_factory=data_home)
    """Where the token and the embedded database live."""
    database_url: URL | None = None
    """A PostgreSQL of your own; None runs the embedded one."""
    queue: int = 64
    """Batches being received, waiting or being written; one more is answered 429."""
    writers: int = 8
    """Batches being written at once; each holds a database connection."""
    max_body_bytes: int = MAX_BODY_BYTES
    """Largest request body, as sent."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise Invalid("FP8SCOPE_PORT", self.port, "must be 1 to 65535")
        for name in ("queue", "writers", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise Invalid(f"FP8SCOPE_{name.upper()}", getattr(self, name), "must be 1 or more")
        if self.max_body_bytes > MAX_BODY_BYTES:
            raise Invalid("FP8SCOPE_MAX_BODY_BYTES", self.max_body_bytes, f"must be at most {MAX_BODY_BYTES}")

    @classmethod
    def from_environment(cls) -> Self:
        """Settings as the environment says; `Invalid` names the variable that is wrong."""
        environ = os.environ
        given: dict[str, int] = {}
        for name in ("port", "queue", "writers", "max_body_bytes"):
            variable = f"FP8SCOPE_{name.upper()}"
            if text := environ.get(variable):
                if not text.isascii() or not text.isdigit() or len(text) > 18:
                    raise Invalid(variable, text, "must be a whole number of at most 18 digits")
                given[name] = int(text)
        host = environ.get("FP8SCOPE_HOST") or LOOPBACK[0]
        names = [name.strip().lower() for name in environ.get("FP8SCOPE_HOSTS", "").split(",")]
        url = environ.get("FP8SCOPE_DATABASE_URL")
        return cls(
            host=host,
            hosts=(*LOOPBACK, host.lower(), *(name for name in names if name)),
            home=data_home(),
            database_url=parse_database_url(url) if url else None,
            **given,
        )


def parse_database_url(text: str) -> URL:
    """A PostgreSQL address with our driver in it. Errors show neither the address nor its password."""
    rule = "must look like postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise Invalid("FP8SCOPE_DATABASE_URL", "(hidden)", rule) from None
    if url.drivername not in ("postgres", "postgresql", "postgresql+psycopg"):
        raise Invalid("FP8SCOPE_DATABASE_URL", url.drivername + "://...", rule)
    return url.set(drivername="postgresql+psycopg")
