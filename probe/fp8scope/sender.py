"""The sender: takes batches from the spool, oldest first, and brings them to the collector.

    2xx with a reply               acknowledged
    409 {"missing": ...}           the hello or the layout is sent, then the batch again
    400, 413, 422                  the batch goes to rejected.f8sr beside its segments, counted
    401, 403 and anything else     the batch stays in the spool; said once, tried again
    408, 425, 429, 5xx, no answer  the same; Retry-After is obeyed

A pause is a random share of a bound that doubles, so a thousand jobs do not return in step after the
collector was away. The thread has one place to wait at, and closing wakes it there.
"""

import email.utils
import logging
import random
import threading
import time
from collections import Counter, deque
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from fp8scope.control import Inbox, decode_commands
from fp8scope.segment import MAGIC, Record, encode_record
from fp8scope.settings import ProbeSettings
from fp8scope.spool import Spool, adopt
from fp8scope_protocol.errors import BrokenMessage
from fp8scope_protocol.wire import BatchHeader, IngestReply, decode_header

LOG = logging.getLogger("fp8scope")

THREAD = "fp8scope-send"
REJECTED = (400, 413, 422)
UNAUTHORIZED = (401, 403)
OVERLOADED = (408, 425, 429, *range(500, 600))
FIRST_PAUSE = 0.5
"""Seconds; the bound of the first pause."""
PATIENCE = 3
"""Answers in a row that ask for a hello or a layout before there is a pause."""
LONGEST_RETRY_AFTER = 3600.0
REJECTED_NAME = "rejected.f8sr"
REJECTED_BYTES = 64 * 2**20
"""Limit of one such file; what is rejected beyond it is only counted."""


class Sender:
    """One thread that empties spools: first what earlier lives of the run left, then the live one."""

    def __init__(
        self, spool: Spool, *, settings: ProbeSettings, run: str, attempt: str, token: str | None,
        inbox: Inbox | None, lost: Counter[str],
    ) -> None:
        self._live = spool
        self._settings = settings
        self._run = run
        self._attempt = attempt
        self._token = token
        self._inbox = inbox
        self._lost = lost
        self._spools: deque[Spool] = deque()
        self._greeted = False  # the hello of spools[0] has arrived
        self._wake = threading.Event()
        self._deadline: float | None = None
        self._next_send = 0.0
        self._next_poll = 0.0
        self._obliged = False  # next_send was asked for by the collector
        self._failures = 0
        self._trouble = ""
        self._random = random.Random()  # the module's own generator is the job's
        self._thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something new is in the spool."""
        self._wake.set()

    def close(self, seconds: float) -> None:
        """Go on sending for at most `seconds`, then stop."""
        self._deadline = time.monotonic() + seconds
        self._wake.set()
        self._thread.join(seconds + 0.1)

    def _work(self) -> None:
        try:
            self._adopt()
            with self._client() as client:
                while self._turn(client):
                    pass
        except Exception:
            LOG.exception("fp8scope: the sender stopped; batches stay in %s", self._live.folder)
        for spool in self._spools:
            if spool is not self._live:
                spool.close()

    def _adopt(self) -> None:
        """Put before the live spool what earlier lives of the run left on this machine."""
        try:
            self._spools.extend(adopt(self._settings.spool, self._run, limit=self._settings.spool_bytes))
        except OSError as error:
            LOG.warning("fp8scope: what earlier runs left in the spool cannot be read: %s", error)
        for spool in self._spools:
            self._lost.update(spool.lost)
        self._spools.append(self._live)

    def _client(self) -> httpx.Client:
        """Proxies and CA files as httpx reads them from the environment."""
        logging.getLogger("httpx").addFilter(_not_ours)
        token = (self._token or "").encode(errors="surrogateescape")  # whatever it is: refused, not raised
        headers = {b"authorization": b"Bearer " + token} if token else {}
        base = f"{self._settings.collector.rstrip('/')}/api/v1/runs/{quote(self._run, safe='')}/"
        return httpx.Client(base_url=base, headers=headers)

    def _turn(self, client: httpx.Client) -> bool:
        """Do one thing that is due, or wait until something is; False when all is over."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return False
        if self._inbox is not None and self._deadline is None and now >= self._next_poll:
            self._poll(client, self._inbox)
            return True
        record = self._spools[0].peek()
        busy = record is not None or not self._greeted
        if busy and now >= self._next_send:
            self._send(client, record)
            return True
        if not busy and len(self._spools) > 1:
            self._spools.popleft().close()
            self._greeted = False
            return True
        return self._wait(now, busy)

    def _wait(self, now: float, busy: bool) -> bool:
        due = [self._next_send] if busy else []
        deadline = self._deadline
        if deadline is not None:
            if not busy or self._next_send >= deadline:
                return False
        elif self._inbox is not None:
            due.append(self._next_poll)
        self._wake.wait(max(0.0, min(due) - now) if due else None)
        self._wake.clear()
        if deadline is None and self._deadline is not None and not self._obliged:
            self._next_send = 0.0  # one more try before the end
        return True

    def _send(self, client: httpx.Client, record: Record | None) -> None:
        spool = self._spools[0]
        if not self._greeted:
            self._greeted = self._supply(client, "POST", "attempts", spool.hello)
            self._next_poll = 0.0  # there may be commands for a run that is resumed
        elif record is not None:
            response = self._request(client, "POST", "batches", record.payload)
            if response is not None:
                self._settle(client, spool, record, response)

    def _settle(self, client: httpx.Client, spool: Spool, record: Record, response: httpx.Response) -> None:
        """Act on the collector's answer to a batch."""
        if response.status_code == 409:
            self._supply_missing(client, spool, record, response)
        elif response.status_code in REJECTED:
            self._reject(spool, record, response)
        elif (reply := _reply(response)) is None:
            self._postpone(response)
        else:
            self._recovered()
            spool.ack(record)
            if self._inbox is not None and reply.commands > self._inbox.known:
                self._next_poll = 0.0

    def _supply_missing(
        self, client: httpx.Client, spool: Spool, record: Record, response: httpx.Response
    ) -> None:
        header = _header(record)
        layout = spool.layouts.get(header.layout or "") if header is not None else None
        if header is not None and layout is not None and _missing(response) == "layout":
            path = f"layouts/{header.layout}?attempt={quote(header.attempt, safe='')}"
            supplied = self._supply(client, "PUT", path, layout)
        else:
            supplied = self._supply(client, "POST", "attempts", spool.hello)
        if supplied:
            self._failures += 1  # a stored batch resets it
        if supplied and self._failures > PATIENCE:
            self._pause("the collector goes on asking for what it was sent")

    def _supply(self, client: httpx.Client, method: str, path: str, content: bytes) -> bool:
        response = self._request(client, method, path, content)
        if response is None:
            return False
        if not response.is_success:
            self._postpone(response)
        return response.is_success

    def _request(
        self, client: httpx.Client, method: str, path: str, content: bytes
    ) -> httpx.Response | None:
        """The answer, or None when there was none, in which case a pause is set."""
        seconds = self._settings.request_seconds
        if self._deadline is not None:
            seconds = max(0.05, min(seconds, self._deadline - time.monotonic()))
        try:
            return client.request(method, path, content=content, timeout=seconds)
        except httpx.HTTPError as error:
            self._pause(f"no answer from {self._settings.collector} ({error or type(error).__name__})")
            return None

    def _poll(self, client: httpx.Client, inbox: Inbox) -> None:
        """Fetch commands; also tells the collector that the run is alive."""
        self._next_poll = time.monotonic() + self._settings.poll_seconds
        try:
            response = client.get(f"commands?attempt={self._attempt}", timeout=self._settings.request_seconds)
            if response.is_success:
                inbox.add(decode_commands(response.content))
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            LOG.debug("fp8scope: no commands from %s: %s", self._settings.collector, error)

    def _postpone(self, response: httpx.Response) -> None:
        status = response.status_code
        if status in OVERLOADED:
            self._pause(f"the collector answers {status}", _retry_after(response))
        elif status in UNAUTHORIZED:
            self._pause(f"the collector refuses the token ({status}); see FP8SCOPE_TOKEN and the token file")
        else:
            self._pause(f"{response.url} answers {status}, not as a collector does")

    def _pause(self, trouble: str, least: float | None = None) -> None:
        """Set the time of the next try; say once per outage what is wrong."""
        bound = min(self._settings.retry_seconds, FIRST_PAUSE * 2.0 ** min(self._failures, 16))
        seconds = self._random.uniform(0, bound)
        if least is not None:
            seconds += min(least, LONGEST_RETRY_AFTER)
        self._failures += 1
        self._obliged = least is not None
        self._next_send = time.monotonic() + seconds
        if not self._trouble:
            LOG.warning("fp8scope: %s; batches are kept in %s and sent later", trouble, self._live.folder)
        self._trouble = trouble

    def _recovered(self) -> None:
        if self._trouble:
            LOG.warning("fp8scope: the collector takes batches again")
        self._trouble, self._failures, self._obliged, self._next_send = "", 0, False, 0.0

    def _reject(self, spool: Spool, record: Record, response: httpx.Response) -> None:
        """Set a batch aside that the collector will never take."""
        self._lost["rejected"] += 1
        path = spool.folder / REJECTED_NAME
        if self._lost["rejected"] == 1:
            LOG.warning("fp8scope: the collector rejects batch %d (%d %s); such batches are kept in %s",
                        record.seq, response.status_code, response.text[:200], path)
        try:
            with path.open("ab") as file:
                if file.tell() + len(record.payload) < REJECTED_BYTES:
                    file.write((b"" if file.tell() else MAGIC) + encode_record(record))
        except OSError as error:
            LOG.warning("fp8scope: a rejected batch cannot be kept: %s", error)
        spool.ack(record)


def _not_ours(entry: logging.LogRecord) -> bool:
    """httpx logs every request at INFO; one line a step would drown the job's own log."""
    return entry.threadName != THREAD


def _reply(response: httpx.Response) -> IngestReply | None:
    """The collector's reply; None if somebody else, such as a proxy, answered 200."""
    if not response.is_success:
        return None
    try:
        return msgspec.json.decode(response.content, type=IngestReply)
    except msgspec.DecodeError:
        return None


def _missing(response: httpx.Response) -> object:
    """What a 409 says the collector lacks: "attempt" or "layout"."""
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any]).get("missing")
    except msgspec.DecodeError:
        return None


def _header(record: Record) -> BatchHeader | None:
    try:
        return decode_header(record.payload)[0]
    except BrokenMessage:
        return None


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or as a date."""
    text = response.headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
