"""Asking a collector that this process started: patience with a busy one, a clear word on one that ended."""

import time
from collections.abc import Sequence
from typing import TypeVar

import httpx
import msgspec

from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_server.children import Child, check_running

SILENCE_SECONDS = 60.0
"""Longest time without a good answer."""
PAUSE_SECONDS = 0.5

_Document = TypeVar("_Document")


class Reader:
    """Documents by path. Raises `Fp8scopeError` when one of `children` has ended, or nothing good comes."""

    def __init__(self, client: httpx.Client, children: Sequence[Child] = (), *,
                 silence_seconds: float = SILENCE_SECONDS) -> None:
        self._client = client
        self._children = children
        self._silence_seconds = silence_seconds

    def get(self, path: str, kind: type[_Document]) -> _Document:
        """The document at `path`."""
        return msgspec.json.decode(self._ask("GET", path), type=kind)

    def put(self, path: str, document: object) -> None:
        """Store `document` at `path`."""
        self._ask("PUT", path, msgspec.json.encode(document))

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        deadline = time.monotonic() + self._silence_seconds
        headers = {"content-type": "application/json"} if content is not None else {}
        while True:
            try:
                answer = self._client.request(method, path, content=content, headers=headers)
                if answer.is_success:
                    return answer.content
                trouble = f"answers {answer.status_code}: {answer.text[:300]}"
                again = answer.status_code == 429 or answer.is_server_error
            except httpx.HTTPError as error:
                trouble, again = f"does not answer ({error or type(error).__name__})", True
            check_running(self._children)
            if not again or time.monotonic() >= deadline:
                raise Fp8scopeError(f"{method} {path}: the collector {trouble}")
            time.sleep(PAUSE_SECONDS)
