"""The line to the collector: requests, and the pauses after those that failed.

    401, 403 and what no collector answers   said once per outage, tried again
    408, 425, 429, 5xx, no answer            the same; Retry-After is obeyed
    one that is too long, encoded or slow    as no answer: it is not read to its end

A pause is a random share of a bound that doubles, so a thousand jobs do not return in step after the
collector was away. The line also learns how much one request may carry: fewer batches after one that got no
answer, fewer bytes after a 413.
"""

import email.utils
import logging
import random
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from fp8scope.settings import ProbeSettings
from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_protocol.wire import MAX_BODY_BYTES

LOG = logging.getLogger("fp8scope")

UNAUTHORIZED = (401, 403)
OVERLOADED = (408, 425, 429, *range(500, 600))
FIRST_PAUSE = 0.5
"""Seconds; the bound of the first pause."""
LONGEST_RETRY_AFTER = 3600.0
ANSWER_BYTES = 64 * 2**10
"""Of the longest answer that is read; the collector's have some hundred."""
QUESTION_BYTES = 4 * 2**20
"""The same, of an answer to a question: a command may name each layer of a model that has 50,000."""
MOST_BATCHES = 32
"""In one request."""
BUNDLE_BYTES = 2**20
"""Of several batches in one request; beyond it the bytes cost more than the answer."""
SMALLEST_PART = 16 * 2**10
"""Bytes; a collector that takes no body of this size gets nothing."""


class Line:
    """Requests to `settings.collector` from one thread; `where` is named as the place where batches wait.

    Entering opens it, which reads certificates: not in a training thread, and it may raise `Fp8scopeError`.
    """

    def __init__(self, settings: ProbeSettings, *, token: str | None, where: Path) -> None:
        self.most_batches = 1
        """Batches in a request; doubles with every success."""
        self.bundle_bytes = BUNDLE_BYTES
        self.largest = MAX_BODY_BYTES
        """Bytes of one request; a batch over it goes in parts."""
        self.next_try = 0.0
        """When the next request may be made, on the monotonic clock."""
        self.obliged = False
        """Whether that was asked for by the collector."""
        self.deadline: float | None = None
        self._settings = settings
        self._where = where
        self._failures = 0
        self._trouble = ""
        self._random = random.Random()  # the module's own generator is the job's
        self._token = token
        self._opened: httpx.Client | None = None

    def __enter__(self) -> Self:
        see = "see SSL_CERT_FILE, HTTP_PROXY and HTTPS_PROXY"
        try:
            self._opened = _client(self._settings.collector, self._token)
        except OSError as error:
            raise Fp8scopeError(f"{error}; {see}") from None
        except (ValueError, httpx.InvalidURL) as error:  # whose text may hold the password of a proxy
            what = f"a proxy or a certificate cannot be used ({type(error).__name__})"
            raise Fp8scopeError(f"{what}; {see}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._opened is not None:
            self._opened.close()

    @property
    def _client(self) -> httpx.Client:
        assert self._opened is not None, "the line is not open"
        return self._opened

    def request(self, method: str, path: str, content: bytes | None = None) -> httpx.Response | None:
        """The answer, or None when there was none, in which case a pause is set. `path` is behind /runs/."""
        seconds = self._settings.request_seconds
        if self.deadline is not None:
            seconds = max(0.05, min(seconds, self.deadline - time.monotonic()))
        try:
            return self._read(method, path, content, seconds=seconds, most=ANSWER_BYTES)
        except httpx.HTTPError as error:
            self.pause(f"no answer from {self._settings.collector} ({error or type(error).__name__})")
            return None

    def ask(self, path: str) -> httpx.Response | None:
        """The answer to a question that may go unanswered: no pause follows."""
        try:
            return self._read("GET", path, seconds=self._settings.request_seconds, most=QUESTION_BYTES)
        except httpx.HTTPError as error:
            LOG.debug("fp8scope: no answer from %s: %s", self._settings.collector, error)
            return None

    def _read(self, method: str, path: str, content: bytes | None = None, *, seconds: float, most: int
              ) -> httpx.Response:
        """An answer of at most `most` bytes, as they came; else `httpx.HTTPError`. What came beyond them is
        left on the line, which is closed."""
        end = time.monotonic() + seconds
        with self._client.stream(method, path, content=content, timeout=seconds) as response:
            if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
                raise httpx.DecodingError(f"its answer is encoded as {encoding[:40]}, unasked")
            data = bytearray()
            for chunk in response.iter_raw():
                data += chunk
                if len(data) > most:
                    raise httpx.DecodingError(f"its answer is longer than {most} bytes")
                if time.monotonic() > end:
                    raise httpx.ReadTimeout(f"its answer took longer than {seconds:g} s")
        return httpx.Response(response.status_code, headers=response.headers, content=bytes(data),
                              request=response.request)

    def postpone(self, response: httpx.Response) -> None:
        """Pause after an answer that is no acknowledgement and no reason to give a batch up."""
        status = response.status_code
        if status in OVERLOADED:
            self.pause(f"the collector answers {status}", _retry_after(response))
        elif status in UNAUTHORIZED:
            self.pause(f"the collector refuses the token ({status}); see FP8SCOPE_TOKEN and the token file")
        else:
            self.pause(f"{response.url} answers {status}, not as a collector does")

    def pause(self, trouble: str, least: float | None = None) -> None:
        """Set the time of the next try; say once per outage what is wrong."""
        bound = min(self._settings.retry_seconds, FIRST_PAUSE * 2.0 ** min(self._failures, 16))
        seconds = self._random.uniform(0, bound)
        if least is not None:
            seconds += min(least, LONGEST_RETRY_AFTER)
        self._failures += 1
        self.obliged = least is not None
        self.next_try = time.monotonic() + seconds
        if not self._trouble:
            LOG.warning("fp8scope: %s; batches are kept in %s and sent later", trouble, self._where)
        self._trouble = trouble

    def recovered(self) -> None:
        """Something was stored."""
        if self._trouble:
            LOG.warning("fp8scope: the collector takes batches again")
        self._trouble, self._failures, self.obliged, self.next_try = "", 0, False, 0.0
        self.most_batches = min(MOST_BATCHES, 2 * self.most_batches)


def _client(collector: str, token: str | None) -> httpx.Client:
    """Proxies and CA files as httpx reads them from the environment; never a proxy to this machine itself."""
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {token}"} if token else {})
    local = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}
    return httpx.Client(base_url=f"{collector.rstrip('/')}/api/v1/runs/", headers=headers, mounts=local)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that a Retry-After header asks for: a number, or a date by the collector's own clock."""
    text = response.headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        then = email.utils.parsedate_to_datetime(text).timestamp()
        date = response.headers.get("date")
        now = email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()
    except ValueError:
        return None
    return max(0.0, then - now)
