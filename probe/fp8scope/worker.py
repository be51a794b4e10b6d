"""The worker: takes closed steps from the training thread and does everything else about them.

    training thread   submit(record) ................ result(step), two boundaries later
    reduce thread     wait for the copy, merge over ranks, publish the result
    spool thread      derive metrics, encode, append to the spool          on each producer's first rank
    send thread       spool -> collector, collector -> commands            there; commands on rank 0

The training thread waits nowhere but in `result`, and there only for this rank's own copy of a merge that
began two steps ago; those waits are counted and timed. Nothing raises into it. Losses are counted by
reason and sent with every batch. A forked child (a DataLoader's worker) is inert: it has no threads, and
every entry returns at once.
"""

import atexit
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from fp8scope.cadence import Cadence
from fp8scope.control import DELAY, Answers, Inbox
from fp8scope.derive import GRAD_NORM_WINDOW, derive_sentinels
from fp8scope.letterbox import Letterbox, reader
from fp8scope.outbox import Outbox
from fp8scope.ranks import Ranks
from fp8scope.reduction import MergedStep, Reduction, table_bytes
from fp8scope.segment import spool_folder
from fp8scope.sender import Sender
from fp8scope.settings import ProbeSettings
from fp8scope.spool import Spool
from fp8scope.sums import SentinelSums, StepRecord, StepResult
from fp8scope_protocol.commands import Command, CommandReport
from fp8scope_protocol.wire import Hello, ProbeEvent, encode_hello

LOG = logging.getLogger("fp8scope")

MOST_WAITING = 10_000
"""Steps that may wait for the reduce thread; a job that asks for its results never has more than three."""
MOST_RESULTS = 64
"""Results that are kept for a training thread that does not ask for them."""
MOST_EVENTS = 256
"""Events of one rank and step that are passed on; of the others only their number is."""


class Worker:
    """One per attach and rank. `hello` describes the job; what depends on the ranks is filled in here."""

    def __init__(
        self, hello: Hello, *, ranks: Ranks, settings: ProbeSettings, token: str | None,
        cadence: Cadence | None = None,
    ) -> None:
        remote = hello.remote_control and not ranks.apart
        self.hello = msgspec.structs.replace(
            hello, attempt=ranks.attempt, producer=ranks.producer.name, world_size=ranks.world_size,
            remote_control=remote,
        )
        self.lost: Counter[str] = Counter()
        self.waits = 0
        """How often `result` had to wait."""
        self.waited_seconds = 0.0
        self._ranks = ranks
        self._settings = settings
        self._pid = os.getpid()
        self._closed = False
        self._last = 0
        """The newest step that was submitted."""
        self._ready = threading.Condition()
        self._queue: deque[StepRecord | None] = deque()
        self._queued_bytes = 0
        self._unsettled = 0
        """Steps that were submitted, and are neither with the outbox nor counted as lost."""
        self._given_up = False
        """Whether closing did not wait for those."""
        self._outstanding: set[int] = set()
        self._results: dict[int, StepResult] = {}
        self._kept_events: tuple[ProbeEvent, ...] = ()  # of steps that were dropped
        self._notices: list[str] = []
        self._reduction = Reduction(ranks)
        self._cadence = cadence or Cadence(hello.every)
        self._grad_norms: deque[float] = deque(maxlen=GRAD_NORM_WINDOW)
        self._answers = Answers(ranks.producer.members, first=ranks.speaks)
        self._inbox = Inbox() if remote and ranks.speaks else None
        self._speaks = ranks.speaks
        """Whether the sentinels of the step under way are told here; a rank that is alone tells its own."""
        self._spool: Spool | None = None
        self._sender: Sender | None = None
        self._outbox: Outbox | None = None
        if ranks.leads:
            self._open_outbox(token)
        if ranks.apart:
            refused = "; remote control is off" if hello.remote_control else ""
            self._notices.append(f"ranks are measured one by one: {ranks.apart}{refused}")
        if ranks.clash and ranks.leads:
            self._notices.append(ranks.clash)
        self._thread = threading.Thread(target=self._work, name="fp8scope-reduce", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        """This rank's place among the ranks that reduce together."""
        return self._ranks.own.index

    @property
    def world(self) -> int:
        """How many ranks reduce together; 1 when the probe works rank-locally."""
        return self._ranks.own.count

    @property
    def job(self) -> int:
        """How many ranks share sentinels; 1 when the probe works rank-locally."""
        return self._ranks.job.count

    @property
    def partial(self) -> bool:
        """Whether other ranks hold layers that this one has not."""
        return self._ranks.producers > 1 or bool(self._ranks.producer.held)

    @property
    def first_depth(self) -> int:
        """How many modules lie before those of this rank."""
        return self._ranks.first_depth

    def holders(self, name: str) -> tuple[int, ...]:
        """Places, among the ranks that reduce together, of those that hold this layer or parameter."""
        return self._ranks.producer.holders(name)

    def submit(self, record: StepRecord) -> None:
        """Take over `record`. Never blocks, never raises."""
        if self._inert():
            return
        with self._ready:
            if len(self._queue) >= MOST_WAITING:
                self.lost["steps"] += 1
                self._kept_events = (self._kept_events + record.events)[:MOST_EVENTS]
                return
            if self._queued_bytes + table_bytes(record.tables) > self._settings.queue_bytes:
                record = replace(record, tables=None, layout=None)
                self.lost["queue full"] += 1
            self._queue.append(record)
            self._unsettled += 1
            self._last = record.step
            self._queued_bytes += table_bytes(record.tables)
            self._outstanding.add(record.step)
            self._ready.notify_all()

    def result(self, step: int) -> StepResult:
        """What the merge of an earlier submitted step decided; waits for it if need be."""
        if os.getpid() != self._pid:
            return StepResult(step=step)
        with self._ready:
            if step in self._outstanding:
                self._await(step)
            return self._results.pop(step, StepResult(step=step))

    def close(self) -> None:
        """Bring everything into the spool, then go on sending for a few seconds."""
        if self._inert():
            return
        atexit.unregister(self.close)
        with self._ready:
            self._closed = True
            self._queue.append(None)
            self._ready.notify_all()
        self._thread.join(self._settings.exit_seconds)
        self._give_up()
        if self._outbox is not None and self._spool is not None:
            self._outbox.close(self._settings.exit_seconds)
            if self._sender is not None:
                self._sender.close(self._settings.exit_seconds)
            if lost := self._spool.in_memory():
                LOG.warning("fp8scope: %d batches are lost: neither sent nor on disk", lost)
            if kept := self._spool.pending() - lost:
                LOG.warning("fp8scope: %d batches are unsent; %s keeps them until the run is attached again "
                            "or fp8scope sync sends them", kept, self._spool.folder)
            self._spool.close()

    def _give_up(self) -> None:
        """Counts the steps that are still on their way, as when another rank is far behind, and says so."""
        with self._ready:
            self._given_up, steps = True, self._unsettled
            if not steps:
                return
            self.lost["closed"] += steps
            LOG.warning("fp8scope: the last %d steps are lost: closing does not wait longer", steps)
            if self._outbox is not None:
                text = f"the last {steps} steps are lost: the probe was closed before they were merged"
                event = ProbeEvent(kind="ranks", step=self._last, text=text)
                last = StepRecord(step=self._last, sentinels=SentinelSums.zeros(), events=(event,))
                self._outbox.put(Reduction(Ranks(rank=self._ranks.rank)).merge(last), {}, ())

    def _settle(self, hand_over: Callable[[], None]) -> None:
        """A step leaves the reduce thread, in one piece with `_give_up`, which has counted it or has not."""
        with self._ready:
            if not self._given_up:
                hand_over()
                self._unsettled -= 1

    def _inert(self) -> bool:
        return self._closed or os.getpid() != self._pid

    def _open_outbox(self, token: str | None) -> None:
        settings, hello = self._settings, self.hello
        folder = spool_folder(settings.spool, hello.run, hello.attempt, hello.producer)
        self._spool = Spool(folder, limit=settings.spool_bytes, memory_limit=settings.queue_bytes,
                            hello=encode_hello(hello), sends=not settings.offline)
        announce: Callable[[], None] = _nothing
        if not settings.offline:
            self._sender = Sender(self._spool, settings=settings, run=hello.run, token=token,
                                  inbox=self._inbox, lost=self.lost)
            announce = self._sender.wake
        elif self._inbox is not None:
            announce = reader(Letterbox(folder), self._inbox.add, seconds=settings.poll_seconds)
        self._outbox = Outbox(self._spool, hello=hello, queue_bytes=settings.queue_bytes, lost=self.lost,
                              announce=announce)

    def _await(self, step: int) -> None:
        """Wait, holding the condition, until `step` is merged; gives up with the merge's own time-out."""
        start = time.perf_counter()
        patience = self._settings.reduce_seconds + 60.0  # the merge fails first, and says why
        self._ready.wait_for(lambda: step not in self._outstanding, timeout=patience)
        self.waits += 1
        self.waited_seconds += time.perf_counter() - start

    def _work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue)
                record = self._queue.popleft()
                if record is None:
                    break
                self._queued_bytes -= table_bytes(record.tables)
            result = StepResult(step=record.step)
            try:
                result = self._process(record)
            except Exception:
                if not self.lost["probe error"]:
                    LOG.exception("fp8scope: step %d is lost to a fault in the probe", record.step)
                self._settle(partial(self.lost.update, ("probe error",)))
            self._publish(result)
        try:
            self._reduction.leave()
        except Exception as error:  # the others are gone, or the job has shut its process groups
            LOG.debug("fp8scope: left the other ranks without a word: %s", error)
            self._ranks.leave("the probe was closed")

    def _process(self, record: StepRecord) -> StepResult:
        """Merge one step, hand it to the outbox, and say what it decided."""
        record = self._prepare(record)
        commands, refusals = self._fetch(record.step)
        try:
            merged = self._reduction.merge(record, commands, alert=self._alert())
        except Exception as error:
            if self._ranks.job.count == 1:
                raise
            self._part(str(error).partition("\n")[0], record.step)
            merged = self._reduction.merge(self._prepare(record), alert=self._alert())
            refusals += _refused(commands, record.step, self._ranks.apart)
            self._speaks = True
        if merged.leaving:
            gone = ", ".join(map(str, merged.leaving[:8]))
            self._part(f"the probe of rank {gone} was closed", record.step)
        elif merged.broken:
            self._part(merged.broken, record.step)
        if merged.unmatched:
            self.lost["unmatched"] += 1
        merged, sentinels, every = self._judge(merged)
        reports = self._answers.add(merged.reports, merged.passed) + refusals
        news = merged.events or merged.tables is not None or reports
        hand_over: Callable[[], None] = _nothing
        if self._outbox is not None and (self._speaks or news):
            hand_over = partial(self._outbox.put, merged, sentinels if self._speaks else {}, reports)
        self._settle(hand_over)
        self._speaks = self._ranks.speaks
        return StepResult(step=record.step, commands=merged.commands, every=every)

    def _judge(self, merged: MergedStep) -> tuple[MergedStep, dict[str, float], int | None]:
        """The step and what it says of the cadence, its sentinels, and the new cadence if there is one."""
        sentinels = derive_sentinels(merged.sentinels, self._grad_norms)
        change = self._cadence.judge(merged.step, merged.time, sentinels, alert=merged.alert)
        if merged.time.sampled and self._cadence.overhead is not None:
            sentinels["overhead_ratio"] = self._cadence.overhead
        if change is None:
            return merged, sentinels, None
        if self._speaks:
            event = ProbeEvent(kind="cadence", step=merged.step + DELAY, text=change.why)
            merged = replace(merged, events=(*merged.events, event))
        return merged, sentinels, change.every

    def _alert(self) -> bool:
        """Whether the collector said, with its newest answer, that a rule holds layers of the run."""
        return self._sender is not None and self._sender.alert

    def _prepare(self, record: StepRecord) -> StepRecord:
        """`record`, arrived in host memory, with the worker's own events."""
        try:
            record.ready()
        except Exception:
            LOG.exception("fp8scope: the numbers of step %d did not arrive", record.step)
            self.lost["probe error"] += 1
            record = replace(record, sentinels=SentinelSums.zeros(), tables=None, layout=None, wait=None,
                             time=None)
        with self._ready:
            events, self._kept_events = self._kept_events + record.events, ()
            notices, self._notices = self._notices, []
        events += tuple(ProbeEvent(kind="ranks", step=record.step, text=text) for text in notices)
        if len(events) > MOST_EVENTS:
            more = f"{len(events) - MOST_EVENTS} more events in this step"
            events = (*events[:MOST_EVENTS], ProbeEvent(kind="more", step=record.step, text=more))
        return replace(record, events=events)

    def _fetch(self, step: int) -> tuple[tuple[Command, ...], tuple[CommandReport, ...]]:
        """New commands for all ranks, and reports on those that cannot be applied."""
        if self._inbox is None:
            return (), ()
        commands, late = self._inbox.take(step)
        if self._ranks.apart:
            return (), late + _refused(commands, step, self._ranks.apart)
        return commands, late

    def _part(self, reason: str, step: int) -> None:
        """Stop merging with the other ranks, for good."""
        self._ranks.leave(reason)
        LOG.warning("fp8scope: from step %d on rank %d is measured alone: %s", step, self._ranks.rank, reason)
        self._notices.append(f"only rank {self._ranks.rank} is measured from here on: {reason}")

    def _publish(self, result: StepResult) -> None:
        with self._ready:
            self._outstanding.discard(result.step)
            self._results[result.step] = result
            while len(self._results) > MOST_RESULTS:
                del self._results[next(iter(self._results))]
            self._ready.notify_all()


def _nothing() -> None:
    """Nobody waits for a batch, or there is none."""


def _refused(commands: tuple[Command, ...], step: int, reason: str) -> tuple[CommandReport, ...]:
    why = f"ranks could not switch at the same step: {reason}"
    return tuple(
        CommandReport(id=one.id, state="rejected", step=step + DELAY, reason=why) for one in commands
    )
