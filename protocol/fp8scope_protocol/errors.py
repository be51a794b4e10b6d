"""What can be wrong with something a person or a peer gave us.

    Fp8scopeError
    ├── Invalid        a value breaks a rule: field, value, what is accepted
    │   └── UnknownName    a name that does not exist; near misses are named
    ├── BrokenMessage  bytes that are not a message of this protocol
    └── TooLarge       a message over its size limit
"""

from collections.abc import Iterable
from difflib import get_close_matches

_SHOWN = 400
"""Longest value in a message, in characters."""


class Fp8scopeError(Exception):
    """Base of every error that is shown to a person as one line."""


class Invalid(Fp8scopeError, ValueError):
    """A value breaks a rule. The message names the field, the value and what is accepted."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {_shown(value)}: {rule}")
        self.field = field
        self.value = value
        self.rule = rule


def _shown(value: object) -> str:
    """`value` in a message; of one that cannot be shown its type."""
    try:
        shown = repr(value)
    except Exception:  # what is wrong with it is what the message is for
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."


class UnknownName(Invalid):
    """A name or pattern that matches nothing; `near` holds the closest known names."""

    def __init__(self, field: str, value: str, known: Iterable[str]) -> None:
        candidates = sorted(set(known))
        self.near = get_close_matches(value[:_SHOWN], candidates, n=3, cutoff=0.4)
        if self.near:
            rule = "matches nothing; near misses: " + ", ".join(self.near)
        else:
            shown = ", ".join(candidates[:8]) + (", ..." if len(candidates) > 8 else "")
            rule = f"matches nothing; known: {shown or 'none yet'}"
        super().__init__(field, value, rule)


class BrokenMessage(Fp8scopeError, ValueError):
    """Bytes that are not a message of this protocol."""


class TooLarge(Fp8scopeError, ValueError):
    """A message that is, or would inflate to be, over its size limit."""
