"""Delivery: brings one producer's batches to the collector, oldest first, and acts on the answers.

    2xx with a reply        acknowledged
    409 {"missing": ...}    the hello or the layout is sent, then the batches again
    413                     fewer batches in a request; a batch that is too large by itself goes in parts
    400, 422, 413 at last   the batch goes to rejected.f8sr beside its segments, counted
    anything else           the batches stay in the spool and are sent later (line.py)

Requests follow each other, so batches are stored in the order in which they were measured; a request carries
several once they pile up. What was lost is told with every batch, and once more at the end if the last batch
could not know it.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import httpx
import msgspec

from fp8scope.letterbox import decode_commands
from fp8scope.line import SMALLEST_PART, Line
from fp8scope.segment import MAGIC, Record, encode_record
from fp8scope_protocol.bundle import join_batches
from fp8scope_protocol.commands import Command
from fp8scope_protocol.errors import BrokenMessage
from fp8scope_protocol.wire import (
    MAX_STEP_BYTES,
    BatchHeader,
    Hello,
    IngestReply,
    decode_header,
    decode_hello,
)

LOG = logging.getLogger("fp8scope")

REJECTED = (400, 422)
PATIENCE = 3
"""Answers in a row to one source that ask for a hello or a layout before there is a pause."""
REJECTED_NAME = "rejected.f8sr"
REJECTED_BYTES = 64 * 2**20
"""Limit of one such file; what is rejected beyond it is only counted."""


class Source(Protocol):
    """Where batches come from: a spool of this process, or one that another process fills."""

    folder: Path
    hello: bytes
    layouts: dict[str, bytes]
    lost: Counter[str]

    def peek_many(self, most: int, most_bytes: int) -> list[Record]: ...

    def ack(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Mailbox(Protocol):
    """Where commands go; `known` is the highest id that was there."""

    @property
    def known(self) -> int: ...

    def add(self, commands: Iterable[Command]) -> None: ...


class Delivery:
    """One source and what of it has arrived.

    `lost` is where the job counts what it loses; None for a source that an earlier or another process filled.
    """

    def __init__(self, line: Line, source: Source, *, lost: Counter[str] | None = None) -> None:
        self.source = source
        self.acknowledged = 0
        """Batches that arrived."""
        self.reply: IngestReply | None = None
        """The newest one."""
        self.greeted = False
        """Whether the collector knows the attempt."""
        self._line = line
        self._lost: Counter[str] = Counter() if lost is None else lost
        self._foreign = lost is None
        self._hello: Hello | None = None
        self._asked = 0  # answers in a row that asked for a hello or a layout
        self._part = (-1, 0, 0)  # seq, how many parts, the next one
        self._said: dict[str, int] = {}  # lost, by the newest batch that arrived
        self._told: dict[str, int] = {}  # lost, as far as the collector knows

    @property
    def rejected(self) -> int:
        """Batches that the collector will never take."""
        return self._lost["rejected"]

    def due(self, *, final: bool) -> bool:
        """Whether there is something to send; `final` if no further batch will say what was lost."""
        waiting = self.source.peek_many(1, 0)
        if not self.greeted:
            return self._readable()
        return bool(waiting) or (final and self._losses() != self._told)

    def step(self) -> None:
        """Make the request that is due."""
        if not self.greeted:
            self.greeted = self._greet()
            return
        line = self._line
        records = self.source.peek_many(line.most_batches, min(line.bundle_bytes, line.largest))
        if not records:
            self._tell()
        elif len(records[0].payload) > line.largest:
            self._send_part(records[0])
        else:
            self._send(records)

    def poll(self, mailbox: Mailbox) -> None:
        """Fetch commands; also tells the collector that the run is alive."""
        query = urlencode({"attempt": self.hello().attempt})
        response = self._line.ask(f"{self._run()}/commands?{query}")
        try:
            if response is not None and response.is_success:
                mailbox.add(decode_commands(response.content))
        except msgspec.DecodeError as error:
            LOG.debug("fp8scope: commands that cannot be read: %s", error)

    def hello(self) -> Hello:
        """The producer's hello; `BrokenMessage` if it is none."""
        if self._hello is None:
            self._hello = decode_hello(self.source.hello)
        return self._hello

    def _readable(self) -> bool:
        if not self.source.hello:
            return False
        try:
            self.hello()
        except BrokenMessage as error:
            LOG.warning("fp8scope: nobody can tell whose batches are in %s: %s", self.source.folder, error)
            return False
        return True

    def _run(self) -> str:
        return quote(self.hello().run, safe="")

    def _greet(self) -> bool:
        return self._supply("POST", f"{self._run()}/attempts", self.source.hello)

    def _send(self, records: list[Record]) -> None:
        body = join_batches([record.payload for record in records])
        response = self._line.request("POST", f"{self._run()}/batches", body)
        if response is None or response.status_code >= 500:
            self._line.most_batches = max(1, len(records) // 2)
        if response is None:
            return
        if response.status_code == 413:
            self._lighten(records, len(body), response)
        elif response.status_code in REJECTED and len(records) > 1:
            self._line.most_batches = 1  # to find the one that is not taken
        else:
            self._settle(records, response)

    def _lighten(self, records: list[Record], size: int, response: httpx.Response) -> None:
        """A body of `size` bytes is too large."""
        if len(records) > 1:
            self._line.bundle_bytes = size // 2
        elif size > SMALLEST_PART:
            self._line.largest = max(SMALLEST_PART, size // 2)
        else:
            self._reject(records[0], response)

    def _send_part(self, record: Record) -> None:
        """One part of a batch that is too large for one request; the collector joins them."""
        size = self._line.largest
        count = -(-len(record.payload) // size)
        index = self._part[2] if self._part[:2] == (record.seq, count) else 0
        hello = self.hello()
        query = urlencode({"attempt": hello.attempt, "producer": hello.producer, "seq": record.seq,
                           "index": index, "count": count})
        part = record.payload[index * size:(index + 1) * size]
        response = self._line.request("PUT", f"{self._run()}/parts?{query}", part)
        if response is None:
            return
        if response.status_code == 413:
            self._lighten([record], size, response)
        elif response.status_code != 202:
            self._settle([record], response)
        elif index + 1 < count:
            self._part = (record.seq, count, index + 1)
        else:  # the collector has lost some
            self._part = (-1, 0, 0)
            self._line.pause("the collector asks for a batch's parts again")

    def _settle(self, records: list[Record], response: httpx.Response) -> None:
        """Act on the collector's answer to `records`."""
        if response.status_code == 409:
            self._supply_missing(records, response)
        elif response.status_code in REJECTED:
            self._reject(records[0], response)
        elif (reply := _reply(response)) is None:
            self._line.postpone(response)
        else:
            self._line.recovered()
            self._asked = 0
            self.reply = reply
            self.acknowledged += len(records)
            if (header := _header(records[-1])) is not None:
                self._said = self._told = header.lost
            for record in records:
                self.source.ack(record)

    def _supply_missing(self, records: list[Record], response: httpx.Response) -> None:
        if _missing(response) != "layout":
            supplied = self._greet()
        else:
            headers = [header for record in records if (header := _header(record)) is not None]
            named = {header.layout for header in headers if header.layout is not None}
            layouts = [(name, self.source.layouts[name]) for name in sorted(named & set(self.source.layouts))]
            if not layouts and len(records) == 1:
                self._reject(records[0], response)  # it was damaged on the disk
                return
            attempt = urlencode({"attempt": self.hello().attempt})
            supplied = all(self._supply("PUT", f"{self._run()}/layouts/{name}?{attempt}", content)
                           for name, content in layouts)
            self._line.most_batches = max(1, len(records) // 2)
        self._asked += 1
        if supplied and self._asked > PATIENCE:
            self._line.pause("the collector goes on asking for what it was sent")

    def _supply(self, method: str, path: str, content: bytes) -> bool:
        response = self._line.request(method, path, content)
        if response is None:
            return False
        if not response.is_success:
            self._line.postpone(response)
        return response.is_success

    def _losses(self) -> dict[str, int]:
        """What the attempt has lost so far, by reason."""
        lost = Counter(dict(self._lost)) + Counter(dict(self.source.lost))  # copies are atomic
        return dict(lost + Counter(self._said) if self._foreign else lost)

    def _tell(self) -> None:
        """Say what was lost, without a batch."""
        lost, hello = self._losses(), self.hello()
        query = urlencode({"attempt": hello.attempt, "producer": hello.producer})
        response = self._line.request("PUT", f"{self._run()}/lost?{query}", msgspec.json.encode(lost))
        if response is None:
            return
        if response.status_code == 409:
            self.greeted = False
        elif response.is_success or response.status_code in (*REJECTED, 404):
            self._told = lost
        else:
            self._line.postpone(response)

    def _reject(self, record: Record, response: httpx.Response) -> None:
        """Set a batch aside that the collector will never take."""
        self._lost["rejected"] += 1
        path = self.source.folder / REJECTED_NAME
        if self._lost["rejected"] == 1:
            LOG.warning("fp8scope: the collector rejects batch %d (%d %s); such batches are kept in %s",
                        record.seq, response.status_code, response.text[:200], path)
        try:
            with path.open("ab") as file:
                if file.tell() + len(record.payload) < REJECTED_BYTES:
                    file.write((b"" if file.tell() else MAGIC) + encode_record(record))
        except OSError as error:
            LOG.warning("fp8scope: a rejected batch cannot be kept: %s", error)
        self.source.ack(record)


def _reply(response: httpx.Response) -> IngestReply | None:
    """The collector's reply; None if somebody else, such as a proxy, answered 200."""
    if not response.is_success:
        return None
    try:
        return msgspec.json.decode(response.content, type=IngestReply)
    except (msgspec.DecodeError, RecursionError):
        return None


def _missing(response: httpx.Response) -> object:
    """What a 409 says the collector lacks: "attempt" or "layout"."""
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any]).get("missing")
    except (msgspec.DecodeError, RecursionError):
        return None


def _header(record: Record) -> BatchHeader | None:
    try:
        return decode_header(record.payload, most_bytes=MAX_STEP_BYTES)[0]
    except BrokenMessage:
        return None
