"""What the probe leaves in a model, and what becomes of it in a copy.

A hook object that is copied or pickled with its model becomes a function that does nothing, and an observer
becomes None. So a copy (an EMA, a checkpoint) is not observed, and holds nothing of the probe's threads and
locks, which could not be copied.
"""

from collections.abc import Callable
from typing import Any


class Inert:
    """Base of hooks: copies and pickles are `nothing`."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _get_nothing, ()


class InertObserver(Inert):
    """Base of observers: the copy of an observed module has none."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return type(None), ()


def nothing(*args: Any, **kwargs: Any) -> None:
    """What a copied hook does."""


def _get_nothing() -> Callable[..., None]:
    return nothing


def can_report(owner: object) -> bool:
    """Whether a module or optimizer has a place for an observer: `observer`, None or one of ours.

    Other code may use the name for something else; that is left alone.
    """
    return isinstance(getattr(owner, "observer", False), InertObserver | None)
