"""Text from outside, made fit for the database and for a page."""

from fp8scope_protocol.errors import Invalid


def checked(field: str, value: str, *, limit: int = 256) -> str:
    """`value` if it is printable and of decent length: for names that other things refer to."""
    if not 0 < len(value) <= limit or not value.isprintable():
        raise Invalid(field, value[:80], f"must be 1 to {limit} printable characters")
    return value


def cleaned(value: str, *, limit: int = 2000) -> str:
    """`value` without control characters and cut to `limit`: for prose, which is never refused."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value[:limit])
