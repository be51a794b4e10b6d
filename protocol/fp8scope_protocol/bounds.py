"""Bounds of what people give: whole numbers that can be stored, and finite ones.

Python takes True for 1, and integers of any length. JSON and the collector keep integers exactly up to 2^53,
and PostgreSQL's largest is 2^63 - 1; so no number here goes beyond 2^53, and True is no number.
"""

import math

from fp8scope_protocol.errors import Invalid

MOST_STEPS = 2**53
"""Of steps and of counts of steps."""
_ENDS = {2**53: "2^53", 2**63 - 1: "2^63 - 1"}


def check_whole(field: str, value: object, *, least: int = 0, most: int = MOST_STEPS) -> None:
    """`Invalid` unless `value` is an int from `least` to `most`, both included."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Invalid(field, value, f"must be a whole number from {least} to {_ENDS.get(most, most)}")


def check_finite(field: str, value: object) -> None:
    """`Invalid` unless `value` is a finite int or float."""
    if not _is_number(value) or not math.isfinite(value):  # type: ignore[arg-type]
        raise Invalid(field, value, "must be a finite number")


def check_share(field: str, value: object) -> None:
    """`Invalid` unless `value` is over 0 and at most 1."""
    if not _is_number(value) or not 0 < value <= 1:  # type: ignore[operator]
        raise Invalid(field, value, "must be a number over 0 and at most 1")


def _is_number(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 1024
    return whole or isinstance(value, float)
