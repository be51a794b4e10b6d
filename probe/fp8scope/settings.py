"""The probe's settings: one frozen object, read once from the environment when a probe attaches."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fp8scope_protocol.access import data_home, read_token
from fp8scope_protocol.address import check_address
from fp8scope_protocol.errors import Invalid

LOG = logging.getLogger("fp8scope")

PREFIX = "FP8SCOPE_"
OFFLINE = "offline"
"""Value of `collector` that keeps everything in the spool and sends nothing."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Each field is read from the variable FP8SCOPE_ + its name in capitals."""

    collector: str = "http://127.0.0.1:8050"
    """Address of the collector; `offline` fills the spool and sends nothing."""
    spool: Path = field(default_factory=lambda: data_home() / "spool")
    """Folder that holds what was measured and not yet acknowledged."""
    spool_bytes: int = 2 * 2**30
    """Hard limit of one producer's spool; beyond it the oldest segment goes, counted."""
    queue_bytes: int = 256 * 2**20
    """Memory for measurements that wait for the probe's threads; beyond it full measurements go, counted."""
    close_steps: int = 50
    """Steps that are all measured in full after a sentinel was elevated; 0 keeps the cadence."""
    twin_elements: int = 768
    """Elements of a parameter of which exact moments are kept, where an optimizer stores them in few bits."""
    poll_seconds: float = 5.0
    """Time between two questions for commands, when remote control is on."""
    exit_seconds: float = 5.0
    """Longest time that closing goes on sending; what remains stays in the spool."""
    request_seconds: float = 10.0
    """Longest time one request to the collector may take."""
    retry_seconds: float = 30.0
    """Longest pause between two tries, unless the collector asks for a longer one."""
    handshake_seconds: float = 30.0
    """Longest time attaching waits for the probes of the other ranks."""
    reduce_seconds: float = 1800.0
    """Longest time a reduction waits for a stalled rank before this rank goes on alone."""

    def __post_init__(self) -> None:
        if self.collector != OFFLINE:
            check_address("collector", self.collector, also=f", or {OFFLINE!r}; tokens: FP8SCOPE_TOKEN")
        if not isinstance(self.spool, Path):
            raise Invalid("spool", self.spool, "must be a folder")
        for name, least in (("spool_bytes", 2**16), ("queue_bytes", 2**16)):
            if getattr(self, name) < least:
                raise Invalid(name, getattr(self, name), f"must be at least {least} bytes")
        if not 0 <= self.close_steps <= 10_000:
            raise Invalid("close_steps", self.close_steps, "must be 0 to 10000 steps")
        if not 8 <= self.twin_elements <= 2**20:
            raise Invalid("twin_elements", self.twin_elements, f"must be 8 to {2**20} elements")
        for one in fields(self):
            if one.name.endswith("_seconds") and not 0 < getattr(self, one.name) <= 86_400:
                raise Invalid(one.name, getattr(self, one.name), "must be over 0 and at most 86400 seconds")

    @property
    def offline(self) -> bool:
        """True when nothing is sent."""
        return self.collector == OFFLINE


def read_settings(environment: Mapping[str, str] = os.environ, **given: Any) -> ProbeSettings:
    """Settings from `environment`; what is `given` (and not None) wins over it."""
    values = {name: value for name, value in given.items() if value is not None}
    for one in fields(ProbeSettings):
        text = environment.get(PREFIX + one.name.upper(), "")
        if one.name in values or not text:
            continue
        try:
            values[one.name] = _PARSERS[one.type](text)
        except ValueError:
            raise Invalid(PREFIX + one.name.upper(), text, f"must be {_kind(one.type)}") from None
    if isinstance(values.get("spool"), str):
        values["spool"] = Path(values["spool"])
    settings = ProbeSettings(**values)
    return replace(settings, spool=settings.spool.expanduser().absolute())  # the job may change its folder


def token_for(settings: ProbeSettings) -> str | None:
    """The local token, if anything is to be sent. One that cannot be had is no reason to stop a job: it is
    said once, without the token, and the spool keeps what the collector then refuses."""
    if settings.offline:
        return None
    try:
        return read_token()
    except Invalid as error:
        LOG.warning("fp8scope: %s; without it the collector takes nothing, and the spool keeps all", error)
        return None


_PARSERS: dict[Any, Any] = {str: str, int: int, float: float, Path: Path}


def _kind(type_: Any) -> str:
    return {int: "a whole number", float: "a number"}.get(type_, "text")
