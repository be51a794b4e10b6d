"""What a run page shows: metric, role, format, steps and chosen layer. All of it lives in the address."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from urllib.parse import parse_qs

from fp8scope_dashboard.client import Query
from fp8scope_protocol.documents import SeriesDocument
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.series import ORIENTATIONS, ROLES

WINDOWS = {"all": None, "1000": 1000, "100": 100}
"""Choices of newest steps to show."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A wish. `fitted` to the series a run has, it is what is shown."""

    metric: str = "underflow_ratio"
    role: str = "activation"
    orientation: str = "rowwise"
    format: str = "e4m3"
    window: str = "all"
    first: int | None = None
    last: int | None = None
    """A fixed range of steps; wins over `window` when both are there."""
    layer: str = ""

    @property
    def zoomed(self) -> bool:
        return self.first is not None and self.last is not None

    def steps(self, newest: int | None) -> Query:
        """`first` and `last` for the collector, as far as they are bounded."""
        if self.first is not None and self.last is not None:
            return {"first": self.first, "last": self.last}
        width = WINDOWS[self.window]
        if width is None or newest is None:
            return {}
        return {"first": max(0, newest + 1 - width), "last": newest}

    def selection(self) -> Query:
        """`metric`, `role`, `orientation` and `format` for the collector."""
        return {"metric": self.metric, "role": self.role, "orientation": self.orientation,
                "format": self.format}


def parse_view(query: str) -> View:
    """The view of an address's query. What is unknown or broken falls back to the default."""
    given = {key: values[-1] for key, values in parse_qs(query.removeprefix("?")).items()}
    default = View()
    first, last = _step(given.get("first")), _step(given.get("last"))
    if first is None or last is None or first > last:
        first = last = None
    return View(
        metric=_one_of(METRICS, given.get("metric"), default.metric),
        role=_one_of(ROLES, given.get("role"), default.role),
        orientation=_one_of(ORIENTATIONS, given.get("orientation"), default.orientation),
        format=given.get("format", default.format),
        window=_one_of(WINDOWS, given.get("window"), default.window),
        first=first, last=last, layer=given.get("layer", ""),
    )


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a run offers, each in the vocabulary's order; orientations and formats are those of the role."""

    roles: tuple[str, ...]
    orientations: tuple[str, ...]
    formats: tuple[str, ...]


def fit(view: View, series: Sequence[SeriesDocument]) -> tuple[View, Choices]:
    """`view` with what the run does not have replaced by the first thing it has."""
    roles = tuple(role for role in ROLES if any(one.role == role for one in series))
    role = _one_of(roles, view.role, roles[0] if roles else view.role)
    of_role = [one for one in series if one.role == role]
    orientations = tuple(side for side in ORIENTATIONS if any(one.orientation == side for one in of_role))
    formats = tuple(sorted({one.format for one in of_role}))
    fitted = replace(
        view, role=role,
        orientation=_one_of(orientations, view.orientation, orientations[0] if orientations else "rowwise"),
        format=_one_of(formats, view.format, formats[0] if formats else view.format),
    )
    return fitted, Choices(roles=roles, orientations=orientations, formats=formats)


def _one_of(known: Container[str], given: str | None, default: str) -> str:
    return given if given is not None and given in known else default


def _step(text: str | None) -> int | None:
    try:
        step = int(text or "")
    except ValueError:
        return None
    return step if 0 <= step < 2**53 else None
