"""Where something comes from, and the record of what happened there."""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_server.models import Event
from fp8scope_server.text import cleaned


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """One step of one producer, and what its run is like."""

    run_id: str
    attempt_id: str
    producer: str
    step: int
    every: int
    remote_control: bool


def record(session: AsyncSession, origin: Origin, kind: str, name: str, text: str, *,
           step: int | None = None) -> None:
    """Add an event at `step`, or else at the origin's step."""
    session.add(Event(
        run_id=origin.run_id, attempt_id=origin.attempt_id, step=origin.step if step is None else step,
        kind=cleaned(kind, limit=64), name=cleaned(name, limit=256), text=cleaned(text)))


def listed(names: tuple[str, ...] | list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
