"""`fp8scope sync DIR`: brings to the collector what offline jobs spooled, from a node that can reach it.

DIR is a spool, or any folder of it: a run's, an attempt's, a producer's. What the collector has acknowledged
is removed. With --follow it goes on while jobs write, waits for new ones, and carries commands back into jobs
that were attached with remote control. What another process already sends is left to it.

exit code  0  everything was sent
           1  something is left, or was rejected: the messages say where; another call goes on from there
           2  bad input
           3  another process sends from all that is there
"""

import logging
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from fp8scope.claim import place
from fp8scope.delivery import Delivery
from fp8scope.letterbox import Letterbox
from fp8scope.line import Line
from fp8scope.progress import Progress
from fp8scope.segment import SUFFIX
from fp8scope.settings import ProbeSettings, read_settings
from fp8scope.tail import Tail
from fp8scope_protocol.access import read_token
from fp8scope_protocol.command_line import Parser
from fp8scope_protocol.errors import Invalid

LOG = logging.getLogger("fp8scope")

LOOK_SECONDS = 0.2
"""Between two looks at spools that had nothing new."""
SCAN_SECONDS = 1.0
"""Between two looks for new spools."""
PATIENCE_SECONDS = 60.0
"""Without --follow: longest time without an answer."""


class Forwarding:
    """One producer's spool on its way: batches out, commands in."""

    def __init__(self, tail: Tail, line: Line, *, poll_seconds: float) -> None:
        self.tail = tail
        self.delivery = Delivery(line, tail)
        self._letterbox = Letterbox(tail.folder)
        self._poll_seconds = poll_seconds
        self._next_poll = 0.0
        self._asked_for = 0

    def step(self) -> bool:
        """Make one request that is due; False if none is."""
        if self._poll_due():
            self._next_poll = time.monotonic() + self._poll_seconds
            self.delivery.poll(self._letterbox)
        self.tail.peek_many(1, 0)  # it may see the end now
        if not self.delivery.due(final=self.tail.ended):
            return False
        self.delivery.step()
        reply = self.delivery.reply
        if reply is not None and reply.commands > max(self._letterbox.known, self._asked_for):
            self._next_poll, self._asked_for = 0.0, reply.commands
        return True

    def done(self) -> bool:
        """Whether nothing is left and nothing will come."""
        return self.tail.ended and not self.delivery.due(final=True)

    def close(self) -> None:
        """Let go of the spool; removes it when it is done."""
        self.tail.close()

    def _poll_due(self) -> bool:
        return (self.delivery.greeted and self.delivery.hello().remote_control
                and time.monotonic() >= self._next_poll and self.tail.living())


class Sync:
    """All spools below `root`. `stop` ends it after the request that is under way."""

    def __init__(self, root: Path, line: Line, *, settings: ProbeSettings, follow: bool,
                 stop: threading.Event) -> None:
        self.busy: set[Path] = set()
        """Folders from which another process sends."""
        self._sent = 0  # batches, of spools that are done
        self._rejected = 0
        self._root = root
        self._line = line
        self._settings = settings
        self._follow = follow
        self._stop = stop
        self._open: dict[Path, Forwarding] = {}
        self._progress = Progress("sync")

    def run(self) -> int:
        """The exit code."""
        next_scan, heard = 0.0, time.monotonic()
        try:
            while not self._stop.is_set():
                now = time.monotonic()
                if now >= next_scan:
                    self._scan()
                    next_scan = now + SCAN_SECONDS
                if now < self._line.next_try:
                    if not self._follow and now - heard > PATIENCE_SECONDS:
                        break
                    self._stop.wait(min(self._line.next_try - now, SCAN_SECONDS))
                    continue
                before = self.sent()
                worked = self._round()
                if self.sent() > before:
                    heard = now
                if not worked and not self._follow:
                    break
                if not worked:
                    self._stop.wait(LOOK_SECONDS)
            return self._end()
        finally:
            for forwarding in self._open.values():
                forwarding.close()

    def sent(self) -> int:
        """Batches that arrived."""
        return self._sent + sum(one.delivery.acknowledged for one in self._open.values())

    def _scan(self) -> None:
        """Take up spools that are new, earlier attempts first: the collector numbers them as they come."""
        found = {path.parent for path in self._root.rglob("*" + SUFFIX)} - set(self._open)
        self.busy &= found
        for folder in sorted(found, key=lambda path: (path.parent.parent, place(path), path)):
            try:
                tail = Tail(folder)
            except OSError as error:
                if folder not in self.busy:
                    why = "another process does" if isinstance(error, BlockingIOError) else error
                    LOG.warning("fp8scope: %s is not sent from: %s", folder, why)
                self.busy.add(folder)
                continue
            self.busy.discard(folder)
            self._open[folder] = Forwarding(tail, self._line, poll_seconds=self._settings.poll_seconds)

    def _round(self) -> bool:
        """One request for each spool that has something to send; False if none has."""
        worked = False
        for folder, one in list(self._open.items()):
            if self._stop.is_set() or time.monotonic() < self._line.next_try:
                return True
            worked |= one.step()
            if one.done():
                one.close()
                self._sent += one.delivery.acknowledged
                self._rejected += one.delivery.rejected
                del self._open[folder]
        self._progress.show(self.sent(), lambda: sum(one.tail.size() for one in self._open.values()))
        return worked

    def _end(self) -> int:
        self._progress.end()
        left = [one.tail.folder for one in self._open.values() if one.tail.peek_many(1, 0)]
        rejected = self._rejected + sum(one.delivery.rejected for one in self._open.values())
        print(f"{self.sent()} batches sent, {rejected} rejected", file=sys.stderr)
        for folder in left:
            print(f"{folder}: not all is sent", file=sys.stderr)
        if self.busy and not self._open and not self.sent():
            return 3
        return 1 if left or rejected else 0


def main(argv: list[str]) -> int:
    """Entry of `fp8scope sync`."""
    options = _parser().parse_args(argv)
    settings = read_settings(collector=options.collector)
    if settings.offline:
        raise Invalid("collector", settings.collector, "must be an address here; give --collector")
    if not options.follow and not options.dir.is_dir():
        raise Invalid("DIR", str(options.dir), "must be a folder")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _interrupt(stop))
    with ExitStack() as stack:
        line = stack.enter_context(Line(settings, token=read_token(), where=options.dir))
        return Sync(options.dir, line, settings=settings, follow=options.follow, stop=stop).run()


def _interrupt(stop: threading.Event) -> None:
    """The first signal ends after the request under way, the second at once."""
    if stop.is_set():
        raise KeyboardInterrupt
    stop.set()


def _parser() -> Parser:
    parser = Parser(prog="fp8scope sync", description=__doc__)
    parser.add_argument("dir", type=Path, metavar="DIR", help="a spool, or a folder of it")
    parser.add_argument("--follow", action="store_true", help="go on until told to end (Ctrl-C, SIGTERM)")
    parser.add_argument("--collector", help="address of the collector (FP8SCOPE_COLLECTOR)")
    return parser
