"""Refusals as problem documents: {"title", "status", "detail", ...}, of type application/problem+json."""

import http
import json
import logging
from collections.abc import Mapping

import psycopg
from fastapi import FastAPI, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from fp8scope_protocol.errors import BrokenMessage, Fp8scopeError, Invalid, TooLarge, UnknownName

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A request that cannot be served: status, why, and members for programs (`missing`, `near`)."""

    def __init__(self, status: int, detail: str, *, headers: Mapping[str, str] | None = None,
                 **members: object) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.members = members


def problem(status: int, detail: str, *, headers: Mapping[str, str] | None = None,
            **members: object) -> Response:
    """The response that tells `detail` to a person and `members` to a program."""
    document = {"title": http.HTTPStatus(status).phrase, "status": status, "detail": detail, **members}
    return Response(json.dumps(document), status, headers, "application/problem+json")


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem document."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(Fp8scopeError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http)
    for value in (DataError, psycopg.DataError):  # of SQLAlchemy, and of the driver, which copies frames
        app.add_exception_handler(value, _no_such_value)
    for kind in (OperationalError, InterfaceError, PoolTimeout, psycopg.OperationalError,
                 psycopg.InterfaceError):
        app.add_exception_handler(kind, _no_database)
    app.add_exception_handler(Exception, _unexpected)


async def _refused(connection: Request | WebSocket, error: Exception) -> Response:
    assert isinstance(error, Refused)
    answer = problem(error.status, error.detail, headers=error.headers, **error.members)
    if isinstance(connection, WebSocket):
        await connection.send_denial_response(answer)
    return answer


def _ours(_: Request, error: Exception) -> Response:
    if isinstance(error, UnknownName):
        return problem(422, str(error), field=error.field, near=error.near)
    if isinstance(error, Invalid):
        return problem(422, str(error), field=error.field)
    if isinstance(error, TooLarge):
        return problem(413, str(error))
    return problem(400 if isinstance(error, BrokenMessage) else 500, str(error))


def _invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return problem(422, "; ".join(found))


def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, error.detail, headers=error.headers)


def _no_such_value(_: Request, error: Exception) -> Response:
    return problem(422, f"the database cannot hold that: {getattr(error, 'orig', error)}")


def _no_database(_: Request, error: Exception) -> Response:
    logger.error("the database does not answer: %s", error)
    return problem(503, "the database does not answer; try again", headers={"retry-after": "2"})


def _unexpected(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, "the collector failed; its log says how")
