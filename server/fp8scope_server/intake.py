"""Admission: how much may come in at once, and how large one body may be."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect

from fp8scope_protocol.errors import TooLarge
from fp8scope_server.problems import Refused


class Intake:
    """`queue` bodies are inside at most, `writers` of them being written. One more is told to come back."""

    def __init__(self, *, queue: int, writers: int, max_body_bytes: int) -> None:
        self.queue = queue
        self.max_body_bytes = max_body_bytes
        self.inside = 0
        self.writing = asyncio.Semaphore(writers)

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The request's body; holds a place in the queue until left."""
        if self.inside >= self.queue:
            raise Refused(429, f"{self.queue} batches are waiting already; try again",
                          headers={"retry-after": "1"})
        self.inside += 1
        try:
            yield await self.read(request)
        finally:
            self.inside -= 1

    async def read(self, request: Request) -> bytes:
        """The request's body, without a place. Counts what arrives: a Content-Length may be wrong."""
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > self.max_body_bytes:
                    raise TooLarge(f"the body is over the limit of {self.max_body_bytes} bytes")
        except ClientDisconnect:
            raise Refused(400, "the connection ended before the body did") from None
        return bytes(body)
