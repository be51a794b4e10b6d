"""The sender: the thread that empties spools, first what earlier lives of the run left, then the live one.

What is sent and what answers mean is in delivery.py, when it is tried again in line.py. The thread has one
place to wait at, and closing wakes it there.
"""

import logging
import threading
import time
from collections import Counter, deque

from fp8scope.control import Inbox
from fp8scope.delivery import Delivery
from fp8scope.line import Line
from fp8scope.settings import ProbeSettings
from fp8scope.spool import Spool, adopt
from fp8scope_protocol.errors import Fp8scopeError

LOG = logging.getLogger("fp8scope")

THREAD = "fp8scope-send"


class Sender:
    """`lost` is where the job counts what it loses; `inbox` takes commands for the attempt of `spool`."""

    def __init__(
        self, spool: Spool, *, settings: ProbeSettings, run: str, token: str | None, inbox: Inbox | None,
        lost: Counter[str],
    ) -> None:
        self._settings = settings
        self._run = run
        self._inbox = inbox
        self._line = Line(settings, token=token, where=spool.folder)
        self._live = Delivery(self._line, spool, lost=lost)
        self._deliveries = deque([self._live])
        self._wake = threading.Event()
        self._deadline: float | None = None
        self._next_poll = 0.0
        self._asked_for = 0  # highest command id that a reply named
        self._thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
        self._thread.start()

    @property
    def alert(self) -> bool:
        """Whether the collector's newest answer told of an alert on the run."""
        reply = self._live.reply
        return reply is not None and reply.alert

    def wake(self) -> None:
        """Something new is in the spool."""
        self._wake.set()

    def close(self, seconds: float) -> None:
        """Go on sending for at most `seconds`, then stop."""
        self._deadline = time.monotonic() + seconds
        self._wake.set()
        self._thread.join(seconds + 0.1)

    def _work(self) -> None:
        logging.getLogger("httpx").addFilter(_is_theirs)
        try:
            self._adopt()
            with self._line:
                while self._turn():
                    pass
        except Fp8scopeError as error:
            where = self._live.source.folder
            LOG.warning("fp8scope: the sender stopped; batches stay in %s: %s", where, error)
        except Exception:
            LOG.exception("fp8scope: the sender stopped; batches stay in %s", self._live.source.folder)
        for delivery in self._deliveries:
            if delivery is not self._live:
                delivery.source.close()

    def _adopt(self) -> None:
        """Put before the live spool what earlier lives of the run left on this machine."""
        try:
            spools = adopt(self._settings.spool, self._run, limit=self._settings.spool_bytes)
        except OSError as error:
            LOG.warning("fp8scope: what earlier runs left in the spool cannot be read: %s", error)
            return
        self._deliveries.extendleft(Delivery(self._line, spool) for spool in reversed(spools))

    def _turn(self) -> bool:
        """Do one thing that is due, or wait until something is; False when all is over."""
        now = time.monotonic()
        self._line.deadline = self._deadline
        if self._deadline is not None and now >= self._deadline:
            return False
        if self._inbox is not None and self._deadline is None and now >= self._next_poll:
            self._next_poll = now + self._settings.poll_seconds
            self._live.poll(self._inbox)
            return True
        first = self._deliveries[0]
        busy = first.due(final=first is not self._live or self._deadline is not None)
        if busy and now >= self._line.next_try:
            self._step(first)
            return True
        if not busy and first is not self._live:
            self._deliveries.popleft().source.close()
            return True
        return self._wait(now, busy)

    def _step(self, delivery: Delivery) -> None:
        greeted = delivery.greeted
        delivery.step()
        if self._inbox is None or delivery is not self._live:
            return
        waiting = delivery.reply.commands if delivery.reply is not None else 0
        if delivery.greeted and not greeted:  # there may be commands for a run that is resumed
            self._next_poll = 0.0
        elif waiting > max(self._inbox.known, self._asked_for):
            self._next_poll, self._asked_for = 0.0, waiting

    def _wait(self, now: float, busy: bool) -> bool:
        line, deadline = self._line, self._deadline
        due = [line.next_try] if busy else []
        if deadline is not None:
            if not busy or line.next_try >= deadline:
                return False
        elif self._inbox is not None:
            due.append(self._next_poll)
        self._wake.wait(max(0.0, min(due) - now) if due else None)
        self._wake.clear()
        if deadline is None and self._deadline is not None and not line.obliged:
            line.next_try = 0.0  # one more try before the end
        return True


def _is_theirs(entry: logging.LogRecord) -> bool:
    """httpx logs every request at INFO; one line a step would drown the job's own log."""
    return entry.threadName != THREAD
