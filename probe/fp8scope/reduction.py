"""One step of all ranks, merged.

    every step     one gather of a short row: step, flags, times, sentinel sums and maxima (200 bytes a rank)
    when needed    one gather of bytes: events and reports of any rank, new commands from rank 0
    sampled steps  three packed reductions: int64 sums, float64 sums, float64 maxima with the worst rank

Rows and bytes are of the whole job, so that sentinels, cadence and commands are the same on every rank; the
reductions are among the ranks of a producer, which alone have its series.

The row is gathered, not reduced: gloo's all-reduce is a ring and takes twice the messages of its
all-gather, and only whole rows show a rank that is at another step, has no full measurement, or leaves.
Everything that decides about a further collective is read from those rows, so all ranks decide alike.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import msgspec
import torch
from torch import Tensor

from fp8scope.ranks import Ranks
from fp8scope.sums import SENTINEL_SUM_COLUMNS, SentinelSums, StepRecord, SumTables
from fp8scope.timer import StepTime
from fp8scope.worst_rank import badness_with_rank, worst_rank
from fp8scope_protocol.commands import Command, CommandReport
from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_protocol.series import Layout, decode_layout, encode_layout
from fp8scope_protocol.wire import ProbeEvent

STEP, SKIPPED, LEAVING, LAYOUT, EXTRAS, ALERT, TIME = range(7)
HEAD = TIME + len(fields(StepTime))


class RanksDisagree(Fp8scopeError):
    """The ranks are not at the same step: their numbers cannot be merged."""


class Extras(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank has to say beside numbers."""

    events: tuple[ProbeEvent, ...] = ()
    reports: tuple[CommandReport, ...] = ()
    passed: tuple[CommandReport, ...] = ()
    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedStep:
    """One step over all ranks that take part. Tables, layout and events are those of this rank's producer,
    everything else is the same on every rank."""

    step: int
    skipped: bool
    time: StepTime
    alert: bool
    """Whether rank 0 knows of an alert on the run."""
    sentinels: SentinelSums
    tables: SumTables | None
    layout: Layout | None
    events: tuple[ProbeEvent, ...]
    reports: tuple[tuple[CommandReport, ...], ...]
    """By rank of the job."""
    passed: tuple[tuple[CommandReport, ...], ...]
    """By rank of the job, for commands that name no layer of the rank."""
    commands: tuple[Command, ...]
    unmatched: bool
    """True when some member of the producer had a full measurement and another had none: it was given up."""
    broken: str
    """Why the producer's members could not be merged; they are alone from the next step on."""
    leaving: tuple[int, ...]
    """Ranks that take part for the last time."""


class Reduction:
    """Merges the steps of this rank with those of all others; calls must match on all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._layout: Layout | None = None
        self._number = 0.0
        self._united: dict[tuple[float, ...], Layout] = {}

    def merge(
        self, record: StepRecord, commands: Sequence[Command] = (), *, alert: bool = False
    ) -> MergedStep:
        """`record` merged with the other ranks' of the same step; `commands` and `alert` are rank 0's."""
        extras = Extras(events=record.events, reports=record.reports, passed=record.passed,
                        commands=tuple(commands))
        rows, texts = self._exchange(record, extras, alert=alert)
        present = rows[rows[:, LEAVING] == 0]
        if (present[:, STEP] != record.step).any():
            raise RanksDisagree(f"ranks are at steps {sorted(set(present[:, STEP].int().tolist()))}")
        members = self._members(len(rows))
        numbers = rows[members, LAYOUT]
        layout, tables, broken = None, None, ""
        if record.layout is not None and record.tables is not None and bool(numbers.all()):
            try:
                layout, tables = self._join(record.layout, record.tables, numbers)
            except Exception as error:  # what the rows say holds: the other producers obey it already
                broken = str(error).partition("\n")[0]
        split = HEAD + len(SENTINEL_SUM_COLUMNS)
        sentinels = SentinelSums(sums=rows[:, HEAD:split].sum(0), maxes=rows[:, split:].amax(0))
        return MergedStep(
            step=record.step,
            skipped=bool(rows[:, SKIPPED].any()) or sentinels.skipped,
            time=_longest(rows),
            alert=bool(rows[:, ALERT].any()),
            sentinels=sentinels,
            tables=tables,
            layout=layout,
            events=tuple(dict.fromkeys(event for rank in members for event in texts[rank].events)),
            reports=tuple(text.reports for text in texts),
            passed=tuple(text.passed for text in texts),
            commands=texts[0].commands,
            unmatched=bool(numbers.any()) and tables is None,
            broken=broken,
            leaving=tuple(rows[:, LEAVING].nonzero().flatten().tolist()),
        )

    def leave(self) -> None:
        """Tell the others, in place of a further step, that this rank takes part no more."""
        if self.ranks.job.count > 1:
            self._exchange(StepRecord(step=0, sentinels=SentinelSums.zeros()), Extras(), leaving=True)
            self.ranks.leave("the probe was closed")

    def _join(self, layout: Layout, tables: SumTables, numbers: Tensor) -> tuple[Layout, SumTables]:
        """The layout of the producer and its members' tables in one."""
        whole = self._unite(layout, numbers)
        return whole, self._reduce(tables if whole is layout else tables.to_layout(layout, whole))

    def _members(self, rows: int) -> list[int]:
        """Which of the gathered rows are of this rank's producer."""
        return list(self.ranks.producer.members) if rows > 1 else [0]

    def _exchange(
        self, record: StepRecord, extras: Extras, *, leaving: bool = False, alert: bool = False
    ) -> tuple[Tensor, list[Extras]]:
        """Rows [ranks, HEAD + sentinels] and the extras of each rank."""
        text = msgspec.msgpack.encode(extras) if extras != Extras() else b""
        number = 0.0 if record.tables is None else self._layout_number(record.layout)
        time = record.time() if record.time is not None else StepTime()
        head = torch.tensor([record.step, record.skipped, leaving, number, len(text), alert, *astuple(time)],
                            dtype=torch.float64)
        rows = self.ranks.job.gather(torch.cat([head, record.sentinels.sums, record.sentinels.maxes]))
        sizes = rows[:, EXTRAS].int().tolist()
        if not any(sizes):
            return rows, [Extras()] * len(sizes)
        texts = self.ranks.job.gather_bytes(text, sizes)
        return rows, [msgspec.msgpack.decode(one, type=Extras) if one else Extras() for one in texts]

    def _layout_number(self, layout: Layout | None) -> float:
        """52 bits of the layout's id, exact in a float64; never 0."""
        if layout is not self._layout and layout is not None:
            self._layout, self._number = layout, float(int(layout.id[:13], 16) | 1)
        return self._number

    def _unite(self, layout: Layout, numbers: Tensor) -> Layout:
        """The layout with the series of every member; `layout` itself where all have the same."""
        key = tuple(numbers.tolist())
        if len(set(key)) == 1:
            return layout
        if key not in self._united:
            data = encode_layout(layout)
            sizes = self.ranks.own.gather(torch.tensor([len(data)]))[:, 0].tolist()
            found = {
                series.key: series
                for one in reversed(self.ranks.own.gather_bytes(data, sizes))  # the lowest rank's entry wins
                for series in decode_layout(one).series
            }
            self._united[key] = Layout(series=tuple(sorted(found.values(), key=lambda s: (s.depth, *s.key))))
        return self._united[key]

    def _reduce(self, tables: SumTables) -> SumTables:
        """New tables; the given ones stay as they are, for a rank that has to go on alone."""
        if self.ranks.own.count == 1:
            return tables
        whole = self.ranks.own.sum(torch.cat([tables.counts.flatten(), tables.histogram.flatten()]))
        cut = tables.counts.numel()
        bids = badness_with_rank(tables, self.ranks.rank)
        maxes = self.ranks.own.max(torch.cat([tables.maxes, bids.unsqueeze(1)], dim=1))
        return SumTables(
            counts=whole[:cut].view_as(tables.counts),
            sums=self.ranks.own.sum(tables.sums.clone()),
            maxes=maxes[:, :-1],
            histogram=whole[cut:].view_as(tables.histogram),
            worst_rank=worst_rank(maxes[:, -1]),
        )


def _longest(rows: Tensor) -> StepTime:
    """The largest of every rank's numbers."""
    sampled, detailed, on_device, seconds, probe_seconds = rows[:, TIME:HEAD].amax(0).tolist()
    return StepTime(sampled=bool(sampled), detailed=bool(detailed), on_device=bool(on_device),
                    seconds=seconds, probe_seconds=probe_seconds)


def table_bytes(tables: SumTables | None) -> int:
    """Memory of a step's full measurement."""
    return 0 if tables is None else tables.nbytes
