"""JSON that a client writes, read strictly: a misspelt field is an error and never a default.

pydantic, which FastAPI would read bodies with, takes "5" and true for numbers and drops what it does not
know. msgspec's strict mode refuses the first; fields are compared here with what is known, since these types
are dataclasses and msgspec forbids unknown fields of a `Struct` only. In what probes send, unknown fields are
no error: a probe may be newer than its collector (wire.py).
"""

import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from fastapi import Depends, Request
from msgspec import inspect

from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_server.problems import Refused

_Kind = TypeVar("_Kind")


def written(kind: type[_Kind]) -> Any:
    """The dependency that reads a request's body as `kind`; 413, 415 and 422 say what is wrong with it."""
    async def read(request: Request) -> _Kind:
        sent = request.headers.get("content-type", "")
        media = sent.partition(";")[0].strip().lower()
        if media and media != "application/json" and not re.fullmatch(r"application/.+\+json", media):
            raise Refused(415, f"the body is not read with content-type = {sent!r}; send JSON, with "
                               "application/json or without a content-type")
        return decode(await request.app.state.intake.read(request), kind)

    reader: Callable[[Request], Awaitable[_Kind]] = read
    return Depends(reader)


def described(kind: type) -> dict[str, Any]:
    """What OpenAPI says of a route whose body is a `kind`."""
    schema, parts = msgspec.json.schema_components((kind,), ref_template="{name}")

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inlined(parts[node["$ref"]])
            closed = {"additionalProperties": False} if "properties" in node else {}
            return closed | {key: inlined(value) for key, value in node.items()}
        return [inlined(one) for one in node] if isinstance(node, list) else node

    content = {"application/json": {"schema": inlined(schema[0])}}
    return {"requestBody": {"required": True, "content": content}}


def decode(body: bytes, kind: type[_Kind]) -> _Kind:
    """`body` as a `kind`, or `Refused` naming the field, its value and what is accepted."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise Refused(422, f"the body is no JSON that can be read: {error}") from None
    _check_text(body)
    _check_fields(inspect.type_info(kind), raw, "")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, raw) from None


def _check_text(body: bytes) -> None:
    """Refuses what JSON allows and nobody means: a field twice, of which one would win, and NUL, which
    the database does not take."""
    def read(items: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, value in items:
            if name in seen:
                raise Refused(422, f"field {name[:80]!r} is given twice; give it once", field=name[:80])
            seen.add(name)
            if any("\0" in one for one in (name, *(value if isinstance(value, list) else [value]))
                   if isinstance(one, str)):
                wrong = Invalid(name[:80], value, "must not hold the character NUL (\\u0000)")
                raise Refused(422, str(wrong), field=name[:80])

    with suppress(RecursionError):  # the other reader was not as deep
        json.loads(body, object_pairs_hook=read, parse_int=str, parse_float=str)


def _check_fields(kind: inspect.Type, raw: Any, path: str) -> None:
    """Refuses the first field of `raw`, at whatever depth, that `kind` does not have."""
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            _check_fields(one, raw, path)
    elif isinstance(kind, inspect.VarTupleType) and isinstance(raw, list):
        for index, item in enumerate(raw):
            _check_fields(kind.item_type, item, f"{path}[{index}]")
    elif isinstance(kind, inspect.DataclassType) and isinstance(raw, dict):
        known = {field.encode_name: field.type for field in kind.fields}
        for name, value in raw.items():
            here = f"{path}.{name[:80]}".lstrip(".")
            if name not in known:
                near = get_close_matches(name[:80], known, n=3, cutoff=0.4)
                misses = f"near misses: {', '.join(near)}; " if near else ""
                raise Refused(422, f"unknown field {here!r}; {misses}known: {', '.join(known)}",
                              field=here, near=near, known=list(known))
            _check_fields(known[name], value, here)


def _refusal(error: msgspec.ValidationError, raw: Any) -> Refused:
    words, _, end = str(error).rpartition(" - at `$")
    path = end.rstrip("`").removeprefix(".") if words else ""
    if isinstance(cause := error.__cause__, Invalid):
        where = f"{path}: " if path else ""
        members: dict[str, Any] = {"near": cause.near} if isinstance(cause, UnknownName) else {}
        return Refused(422, where + str(cause), field=f"{path}.{cause.field}".lstrip("."), **members)
    said = (words or str(error)).replace("`", "")
    wrong = Invalid(path or "body", _value(raw, path), said[:1].lower() + said[1:])
    return Refused(422, str(wrong), field=wrong.field)


def _value(raw: Any, path: str) -> Any:
    """What stands in `raw` at a path like `enter.conditions[0].k`."""
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        if isinstance(raw, dict) and name in raw:
            raw = raw[name]
        elif isinstance(raw, list) and index and int(index) < len(raw):
            raw = raw[int(index)]
    return raw
