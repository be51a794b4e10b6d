"""The outbox: turns merged steps into batches and puts them into the spool.

A thread of its own, because deriving, compressing and a slow disk must not hold up the merging of later
steps, which all ranks wait for. Its queue is bounded in bytes: beyond it a step goes out without its full
measurement, counted; sentinels and events always go out.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from fp8scope.derive import Arrays, derive
from fp8scope.reduction import MergedStep, table_bytes
from fp8scope.spool import Spool
from fp8scope_protocol.commands import CommandReport
from fp8scope_protocol.series import Layout, encode_layout
from fp8scope_protocol.wire import Batch, BatchHeader, Hello, ProbeEvent, encode_batch, planes_of

LOG = logging.getLogger("fp8scope")


class Outbox:
    """Takes merged steps, in order; `announce` is called after each batch that the spool holds."""

    def __init__(
        self, spool: Spool, *, hello: Hello, queue_bytes: int, lost: Counter[str],
        announce: Callable[[], None],
    ) -> None:
        self._spool = spool
        self._hello = hello
        self._queue_bytes = queue_bytes
        self._lost = lost
        self._announce = announce
        self._ready = threading.Condition()
        self._queue: deque[tuple[MergedStep, dict[str, float], tuple[CommandReport, ...]]] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._seq = 0
        self._said = ""
        self._layout: Layout | None = None
        self._layout_entry: tuple[str, bytes] | None = None
        self._thread = threading.Thread(target=self._work, name="fp8scope-spool", daemon=True)
        self._thread.start()

    def put(
        self, step: MergedStep, sentinels: dict[str, float], reports: tuple[CommandReport, ...]
    ) -> None:
        """Send `step`, its `sentinels` by name and `reports`; never blocks."""
        size = table_bytes(step.tables)
        with self._ready:
            if self._queued_bytes + size > self._queue_bytes:
                step, size = replace(step, tables=None, layout=None), 0
                self._lost["outbox full"] += 1
            self._queue.append((step, sentinels, reports))
            self._queued_bytes += size
            self._ready.notify()

    def close(self, seconds: float) -> None:
        """Bring what is queued into the spool, for at most `seconds`; what is left is lost, counted."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join(seconds)
        with self._ready:
            if self._queue:
                self._lost["closed"] += len(self._queue)
                self._queue.clear()

    def _work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                step, sentinels, reports = self._queue.popleft()
                self._queued_bytes -= table_bytes(step.tables)
            try:
                self._spool_step(step, sentinels, reports)
            except Exception:
                if not self._lost["probe error"]:
                    LOG.exception("fp8scope: step %d is lost to a fault in the probe", step.step)
                self._lost["probe error"] += 1
            self._announce()

    def _spool_step(
        self, step: MergedStep, sentinels: dict[str, float], reports: tuple[CommandReport, ...]
    ) -> None:
        arrays: Arrays = {}
        entry = None
        if step.tables is not None and step.layout is not None:
            arrays = derive(step.tables, step.layout)
            entry = self._entry(step.layout)
        header = BatchHeader(
            run=self._hello.run,
            attempt=self._hello.attempt,
            producer=self._hello.producer,
            seq=self._seq,
            step=step.step,
            sent_ns=time.time_ns(),
            skipped=step.skipped,
            sentinels=sentinels,
            lost=dict(Counter(dict(self._lost)) + Counter(dict(self._spool.lost))),  # copies are atomic
            events=self._events(step),
            reports=reports,
            layout=entry[0] if entry is not None else None,
            columns=len(step.layout.series) if step.layout is not None else 0,
            planes=planes_of(arrays),
        )
        self._spool.append(self._seq, encode_batch(Batch(header=header, arrays=arrays)), entry)
        self._seq += 1

    def _events(self, step: MergedStep) -> tuple[ProbeEvent, ...]:
        """Those of the step, and once that the spool had to leave the disk."""
        if self._said == self._spool.trouble:
            return step.events
        self._said = self._spool.trouble
        return (*step.events, ProbeEvent(kind="spool", step=step.step, text=self._said))

    def _entry(self, layout: Layout) -> tuple[str, bytes]:
        """Id and bytes of `layout`; encoded once as long as it stays the same."""
        if layout is not self._layout or self._layout_entry is None:
            self._layout, self._layout_entry = layout, (layout.id, encode_layout(layout))
        return self._layout_entry
