"""Sums that merge exactly: what every rank collects, reduces and finally turns into metrics.

A *row* belongs to one series and holds four groups of columns. Micro-batches, tiles and ranks merge by
adding counts, sums and histograms and by taking the maximum of maxes, so no ratio is ever averaged:

    counts      int64    COUNT_COLUMNS    0 where nothing was seen
    sums        float64  SUM_COLUMNS      over finite elements; a NaN here is impossible
    maxes       float64  MAX_COLUMNS      -inf where not measured; minima stored negated; NaN stored as +inf
    histogram   int64    40 bins of floor(log2 |y|)

A tile (or block) with a NaN or Inf is encoded as NaN throughout, so it has no round-trip error. Its finite
elements count in `x2`, `abs` and `x4`, but not in `coded`, `coded_x2`, `e2`, `xe`, `zero_codes`,
`underflow`, `saturated` and the histogram; the block counts as bad.

Of states that were found stored, not seen being stored, there are `stored` elements, zero codes, scales, the
histogram and moments of the decoded values; `coded` and `blocks` are 0, so nothing about an error is derived.

`derive.py` is the only place where sums become ratios.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp8scope.timer import StepTime
from fp8scope_protocol.commands import Command, CommandReport
from fp8scope_protocol.metrics import HISTOGRAM_BINS
from fp8scope_protocol.series import Layout
from fp8scope_protocol.wire import ProbeEvent

COUNT_COLUMNS = (
    "elements",  # N, padding excluded, non-finite elements included
    "calls",
    "nonzero",  # finite x != 0
    "nan",
    "inf",
    "coded",  # elements of tiles without NaN or Inf
    "zero_codes",
    "underflow",
    "saturated",
    "blocks",
    "zero_blocks",
    "scaled_blocks",  # neither all zero nor NaN-coded: the blocks whose scale means something
    "bad_blocks",
    "stored",  # elements read from codes whose original is gone: nothing is known of their round trip
)
SUM_COLUMNS = (
    "x2",  # sum x^2 over finite elements
    "abs",
    "x4",
    "coded_x2",  # sum x^2 over coded elements
    "e2",
    "xe",
    "scale_log2",  # over scaled blocks
    "scale_log2_sq",
    # of changes of weights, or of updates in units of lr; see updates.py and twins.py
    "wanted2",  # sum of squares of what exact arithmetic would have done
    "got2",  # of what was done
    "missed2",  # of the difference
    # of one gradient twice; see fidelity.py: x in high precision, e what the job's precision changes
    "grad_x2",
    "grad_e2",
    "grad_xe",
    "noise_e2",  # what another micro-batch changes
    "noise_xe",
)
MAX_COLUMNS = (
    "amax",
    "neg_amin_nonzero",
    "neg_scale_min",
    "scale_max",
    "staleness_bits",
    "channel_outlier",
    "gemm_error",
    "wgrad_row_error",
)

SENTINEL_SUM_COLUMNS = (
    "loss_sum",
    "loss_count",  # mean over ranks and micro-batches
    "grad_square",  # replicated gradients enter with 1 / replicas
    "grad_count",  # optimizer steps whose gradients were measured, over ranks
    "norm_square",  # of norms of the whole job that were logged
    "norm_count",  # ranks that logged one
    "nonfinite",
    "v_zero",
    "v_total",
    "update_square",
    "weight_square",
)
SENTINEL_MAX_COLUMNS = (
    "update_max",
    "scale_staleness_bits",
    "loss_scale",
    "lr",
    "attn_logit_bound",
    "neg_router_entropy",
    "router_logit_max",
    "skipped",  # 1 where an optimizer skipped the step by itself: a mark of the step, not a sentinel
)


class RowSums(NamedTuple):
    """One row: fresh tensors, or views into a `SumTables` that accumulate in place."""

    counts: Tensor
    sums: Tensor
    maxes: Tensor
    histogram: Tensor

    @classmethod
    def zeros(cls, device: torch.device | str) -> "RowSums":
        return SumTables.zeros(1, device).row(0)

    def add(self, other: "RowSums") -> None:
        """Merge `other` into this row, in place."""
        self.counts.add_(other.counts)
        self.sums.add_(other.sums)
        torch.maximum(self.maxes, other.maxes, out=self.maxes)
        self.histogram.add_(other.histogram)

    def to(self, device: torch.device) -> "RowSums":
        return RowSums(*(part.to(device, non_blocking=device.type == "cuda") for part in self))


@dataclass(frozen=True, kw_only=True, slots=True)
class SumTables:
    """Rows of all series of a layout. counts [S, 14], sums [S, 16], maxes [S, 8], histogram [S, 40]."""

    counts: Tensor
    sums: Tensor
    maxes: Tensor
    histogram: Tensor
    worst_rank: Tensor | None = None
    """[S], of merged rows: see worst_rank.py."""

    @classmethod
    def zeros(cls, rows: int, device: torch.device | str = "cpu") -> "SumTables":
        """Nothing seen yet: 0 everywhere, -inf in maxes."""
        return cls(
            counts=torch.zeros((rows, len(COUNT_COLUMNS)), dtype=torch.int64, device=device),
            sums=torch.zeros((rows, len(SUM_COLUMNS)), dtype=torch.float64, device=device),
            maxes=torch.full((rows, len(MAX_COLUMNS)), -math.inf, dtype=torch.float64, device=device),
            histogram=torch.zeros((rows, HISTOGRAM_BINS), dtype=torch.int64, device=device),
        )

    def __len__(self) -> int:
        return int(self.counts.shape[0])

    @property
    def nbytes(self) -> int:
        """Memory of all rows."""
        return sum(part.nbytes for part in (self.counts, self.sums, self.maxes, self.histogram))

    def row(self, index: int) -> RowSums:
        """Views of row `index`: whatever is added to them is added here."""
        return RowSums(self.counts[index], self.sums[index], self.maxes[index], self.histogram[index])

    def clear(self) -> None:
        """Nothing seen, in place."""
        for part in (self.counts, self.sums, self.histogram):
            part.zero_()
        self.maxes.fill_(-math.inf)

    def merge(self, other: "SumTables") -> None:
        """Add `other`, which has the same rows in the same order, in place."""
        RowSums(self.counts, self.sums, self.maxes, self.histogram).add(
            RowSums(other.counts, other.sums, other.maxes, other.histogram))

    def take(self, rows: list[int]) -> "SumTables":
        """New tables with row `rows[i]` of this one as row i; -1 makes an empty row."""
        grown = SumTables.zeros(len(rows), self.counts.device)
        kept = [i for i, row in enumerate(rows) if row >= 0]
        target = torch.tensor(kept, dtype=torch.int64).to(self.counts.device, non_blocking=True)
        source = torch.tensor([rows[i] for i in kept], dtype=torch.int64).to(target.device, non_blocking=True)
        grown.counts.index_copy_(0, target, self.counts[source])
        grown.sums.index_copy_(0, target, self.sums[source])
        grown.maxes.index_copy_(0, target, self.maxes[source])
        grown.histogram.index_copy_(0, target, self.histogram[source])
        return grown

    def to_layout(self, have: Layout, wanted: Layout) -> "SumTables":
        """These rows, ordered as `have`, in the order of `wanted`; absent series get an empty row."""
        places = {one.key: i for i, one in enumerate(have.series)}
        return self.take([places.get(one.key, -1) for one in wanted.series])


@dataclass(frozen=True, kw_only=True, slots=True)
class SentinelSums:
    """Per-step numbers of the whole job before reduction: sums [11] add up, maxes [8] take the maximum."""

    sums: Tensor
    maxes: Tensor

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> "SentinelSums":
        return cls(
            sums=torch.zeros(len(SENTINEL_SUM_COLUMNS), dtype=torch.float64, device=device),
            maxes=torch.full((len(SENTINEL_MAX_COLUMNS),), -math.inf, dtype=torch.float64, device=device),
        )

    @property
    def skipped(self) -> bool:
        """Whether an optimizer skipped the step by itself, as fused ones do under a gradient scaler."""
        return bool(self.maxes[SENTINEL_MAX_COLUMNS.index("skipped")] > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What the training thread hands to the worker, once per closed step. Tensors are on the CPU (pinned,
    and still being filled, when the job runs on a GPU): call `ready` before reading them."""

    step: int
    skipped: bool = False
    sentinels: SentinelSums
    tables: SumTables | None = None
    """None off cadence."""
    layout: Layout | None = None
    """Rows of `tables`; sorted by (depth, name, role, orientation, format, scaling); the same object as
    long as no series was added. Ranks may differ (an expert that no token reached): unite, `to_layout`."""
    events: tuple[ProbeEvent, ...] = ()
    reports: tuple[CommandReport, ...] = ()
    """What became of commands in this rank at the boundary before this step; steps_by_rank is empty."""
    passed: tuple[CommandReport, ...] = ()
    """Commands at that boundary that name no layer of this rank: rejected, if no rank has one."""
    wait: Callable[[], None] | None = None
    time: Callable[[], StepTime] | None = None
    """How long the step took; to be called after `ready`."""

    def ready(self) -> None:
        """Blocks until every tensor has arrived in host memory."""
        if self.wait is not None:
            self.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the reduction of one step decided, the same on every rank."""

    step: int
    commands: tuple[Command, ...] = ()
    """To be applied now, in this order; each command is given once."""
    every: int | None = None
    """The cadence from now on; None where it stays."""


class StepWorker(Protocol):
    """The other side of the seam: takes records, reduces them over ranks, sends, fetches commands."""

    @property
    def rank(self) -> int:
        """This rank's place among the ranks that reduce together."""

    @property
    def world(self) -> int:
        """How many ranks reduce together; 1 when the probe works rank-locally."""

    @property
    def job(self) -> int:
        """How many ranks share sentinels: all of the job, of whatever producer; 1 when rank-local."""

    @property
    def partial(self) -> bool:
        """Whether other ranks hold layers that this one has not: pipeline stages, expert groups."""

    @property
    def first_depth(self) -> int:
        """How many modules of the whole model lie before those of this rank."""

    def holders(self, name: str) -> tuple[int, ...]:
        """Places, among the ranks that reduce together, of those that hold this layer or parameter."""

    def submit(self, record: StepRecord) -> None:
        """Takes over `record`. Never blocks, never raises."""

    def result(self, step: int) -> StepResult:
        """The reduced result of an earlier submitted step; waits for it, but not for ever."""

    def close(self) -> None:
        """Sends what is left (at most a few seconds) and stops."""
