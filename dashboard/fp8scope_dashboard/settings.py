"""Where the dashboard listens, and which collector it shows."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from fp8scope_protocol.access import ensure_token
from fp8scope_protocol.address import check_address
from fp8scope_protocol.errors import Invalid

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """FP8SCOPE_DASHBOARD_HOST, _PORT, _HOSTS and FP8SCOPE_COLLECTOR, with the local token."""

    token: str
    host: str = "127.0.0.1"
    port: int = 8051
    collector: str = "http://127.0.0.1:8050"
    """Base address of the collector, without a path."""
    hosts: tuple[str, ...] = ()
    """Further names by which browsers may address the dashboard, beside loopback and `host`."""

    def __post_init__(self) -> None:
        if not self.token:
            raise Invalid("token", self.token, "must not be empty")
        if not 0 <= self.port <= 65535:
            raise Invalid("port", self.port, "must be 0 to 65535")
        if urlsplit(check_address("collector", self.collector)).path not in ("", "/"):
            raise Invalid("collector", self.collector, "must have no path here, as http://127.0.0.1:8050")

    @property
    def accepted_hosts(self) -> tuple[str, ...]:
        """Names that a Host header may carry."""
        return (*LOOPBACK, self.host, *self.hosts)


def settings_from(environment: Mapping[str, str] | None = None, **given: object) -> Settings:
    """Settings by the environment; what is `given` and not None wins."""
    known = os.environ if environment is None else environment
    values: dict[str, object] = {
        "token": ensure_token(),
        "host": known.get("FP8SCOPE_DASHBOARD_HOST", Settings.host),
        "port": known.get("FP8SCOPE_DASHBOARD_PORT", Settings.port),
        "collector": known.get("FP8SCOPE_COLLECTOR", Settings.collector),
    }
    values.update({key: value for key, value in given.items() if value is not None})
    extra = known.get("FP8SCOPE_DASHBOARD_HOSTS", "")
    return Settings(
        token=str(values["token"]), host=str(values["host"]), port=_port(values["port"]),
        collector=str(values["collector"]).rstrip("/"),
        hosts=tuple(name.strip().lower() for name in extra.split(",") if name.strip()),
    )


def _port(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise Invalid("FP8SCOPE_DASHBOARD_PORT", value, "must be a number from 0 to 65535") from None
