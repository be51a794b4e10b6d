"""Sentinels: a few numbers of the whole job, taken in every step at any cadence.

Everything stays on the device until the step closes. How numbers merge over ranks is fixed by their columns
(sums.py): squares and counts add up, extremes take the maximum. What several ranks hold alike enters with
1 / replicas, so that a sum over ranks counts it once, under DDP, FSDP and hybrids of both.

Gradients are read in sampled steps and, off cadence, in every GRADIENTS_EVERY-th step (why not in all:
docs/decisions/0008), when `optimizer.step` begins: after unscaling, and after clipping if the job clips; when
it ends if it was given a closure, which computes them. A job that knows the norm before clipping says so
with `scope.log(grad_norm=...)`, which wins; from then on its gradients are read in sampled steps only, and
its norm is there in every step. A gradient *tensor* that holds a NaN or an Inf counts as one, which its norm
tells without another pass; off cadence under a logged norm all gradients together do.

What it costs. Numbers that the host knows stay on the host, and what the device knows is kept as it comes,
one 0-dim tensor each, and put together when the step closes: some twenty launches a step beside the norm
itself, which is one for all gradients, however many there are (`squares_kernel`).

CUDA graphs. What is read while one is captured (`recorded`) is read again by every replay, at no cost for
the host: it is added to a board of one cell a column, at a fixed address, which a closing step empties.

Numbers about the update come, in every step, from the optimizer's own account (`optimizer.step_stats`) if it
keeps one, else in sampled steps from a sample of its states (see `updates`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8scope.backend import squares
from fp8scope.rows import to_host
from fp8scope.scalar import said, to_scalar
from fp8scope.sharding import local, replicas
from fp8scope.squares import squares as plain_squares
from fp8scope.sums import SENTINEL_MAX_COLUMNS, SENTINEL_SUM_COLUMNS, SentinelSums
from fp8scope_protocol.errors import UnknownName

LOGGED = ("loss", "grad_norm", "lr", "loss_scale")
"""What a job may hand over by name."""
GRADIENTS_EVERY = 4
"""Steps between two reads of all gradients, at most."""
COLUMNS = SENTINEL_SUM_COLUMNS + SENTINEL_MAX_COLUMNS

Number = Tensor | float
Alike = dict[int, list[Tensor]]
"""Parameters by the number of ranks that hold the same part of them."""


class Sentinels:
    """The sentinels of the step under way."""

    def __init__(
        self, device: torch.device, *, world: int, copies: Callable[[Tensor], int] | None = None
    ) -> None:
        """`world` ranks share sentinels; `copies` of them hold a part of a parameter, all unless told."""
        self.device = device
        self.world = world
        self.copies = copies or (lambda parameter: world)
        self._found: defaultdict[str, list[Tensor]] = defaultdict(list)
        """Column -> what the device knows: float64 [] each."""
        self._known: dict[str, float] = {}
        """Column -> what the host knows."""
        self._recording = False
        self.board = torch.tensor([_start(name) for name in COLUMNS], dtype=torch.float64, device=device)
        """What replays have added in this step."""
        self._empty_board = self.board.clone()
        self.has_board = False
        """Whether anything was ever recorded."""
        self._losses: list[Tensor] = []
        self._norm: Tensor | None = None
        """The norm that the job has logged in this step."""
        self._expects_norm = False
        """Whether it did in the last one."""
        self._lr_is_said = False
        self._read: set[int] = set()
        """Ids of the optimizers whose gradients were read, and which have not stepped since."""
        self._gradients_read = False
        self._unread = GRADIENTS_EVERY
        """Steps since gradients were read last, on this rank as on the others."""
        self._is_due = False
        """Whether they are in this one."""
        self._alike: dict[int, tuple[int, Alike]] = {}
        """Optimizer -> (number of its parameters, those parameters)."""
        self._absent = {name: torch.full((), _start(name), dtype=torch.float64, device=device)
                        for name in COLUMNS}

    def log(self, values: dict[str, Number]) -> None:
        """Numbers that the job knows. Losses average over calls; the others are the job's, on any rank. Of
        values that are refused none counts."""
        for name in values:
            if name not in LOGGED:
                raise UnknownName("log", name, LOGGED)
        for name, number in {name: said(name, value, self.device) for name, value in values.items()}.items():
            if name == "loss":
                self._losses.append(number)
            elif name == "grad_norm":
                self._norm = number
            else:
                self._found[name] = [number]
                if name == "lr":  # what the job says wins
                    self._known.pop("lr", None)
                    self._lr_is_said = True

    def read_gradients(self, optimizer: Optimizer, *, sampled: bool) -> None:
        """Reads the gradients that `optimizer` is about to use, or has used; once for each of its steps."""
        if id(optimizer) in self._read:
            return
        self._read.add(id(optimizer))
        lr = optimizer.param_groups[0].get("lr")
        if lr is not None and not self._lr_is_said:
            self._know_lr(lr)
        if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
            self.add("skipped", found_inf)  # the optimizer itself skips what a gradient scaler rejects
        if not sampled and (self._unread < GRADIENTS_EVERY or self._norm is not None or self._expects_norm):
            return
        self._is_due = True
        scale = getattr(optimizer, "grad_scale", None)  # set where the optimizer unscales by itself
        for copies, gradients in self._gradients(optimizer, sampled).items():
            self._gradients_read = True
            found = self._squares(gradients)
            self.add("nonfinite", (found - found).ne_(0).sum() / copies)
            square = found.sum() / copies
            self.add("grad_square", square if scale is None else square / self._number(scale).square())
            if self._recording:
                self.board[COLUMNS.index("grad_count")].fill_(1.0)
            else:
                self._known["grad_count"] = 1.0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While a CUDA graph is captured: what is added inside is added by every replay."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def after_step(self, optimizer: Optimizer) -> None:
        """Reads the optimizer's own account of its step, if it keeps one: this rank's own ratios, merged
        over ranks as means."""
        self._read.discard(id(optimizer))
        stats = getattr(optimizer, "step_stats", None)
        if stats is not None:
            self.add("update_max", stats.update_max)
            self.add("update_square", self._number(stats.update_weight_ratio).square())
            self.add("weight_square", 1.0)
            if stats.v_zero_share is not None:  # there is a second moment
                self.add("v_zero", stats.v_zero_share)
                self.add("v_total", 1.0)

    def add(self, column: str, value: Number) -> None:
        """Adds to a sum, or raises a maximum to `value`, a number or a tensor [] of any kind."""
        if self._recording:
            self._record(column, self._number(value))
        elif isinstance(value, Tensor):
            self._found[column].append(self._number(value))
        elif column in SENTINEL_SUM_COLUMNS:
            self._known[column] = self._known.get(column, 0.0) + value
        else:
            self._known[column] = max(self._known.get(column, -math.inf), value)

    def take(self) -> SentinelSums:
        """The step's sentinels on their way to the host; then begins anew."""
        self._settle()
        known = torch.tensor([self._known.get(name, _start(name)) for name in COLUMNS], dtype=torch.float64)
        if self.device.type == "cuda":
            known = known.pin_memory().to(self.device, non_blocking=True)
        found = torch.stack([self._merged(name) for name in COLUMNS])
        if self.has_board:
            found = self._with_board(found)
        cut = len(SENTINEL_SUM_COLUMNS)
        extremes = found[cut:].nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        taken = SentinelSums(sums=to_host(found[:cut] + known[:cut]),
                             maxes=to_host(torch.maximum(extremes, known[cut:])))
        self._found.clear()
        self._known.clear()
        self._losses.clear()
        self._read.clear()
        self._expects_norm, self._norm = self._norm is not None, None
        self._unread = 1 if self._is_due else self._unread + 1
        self._is_due = self._gradients_read = self._lr_is_said = False
        return taken

    def _settle(self) -> None:
        """Losses, and a norm that the job knows, become columns."""
        if self._losses:
            losses = torch.stack(self._losses)
            self.add("loss_sum", losses.sum())
            self.add("nonfinite", (losses - losses).ne_(0).sum())
            self._known["loss_count"] = float(len(self._losses))
        if self._norm is not None:
            self._found["norm_square"] = [self._norm.square()]
            self._known["norm_count"] = 1.0
            if not (self._gradients_read or self.has_board):
                self.add("nonfinite", (self._norm - self._norm).ne_(0) / self.world)

    def _merged(self, column: str) -> Tensor:
        values = self._found[column]
        if len(values) < 2:
            return values[0] if values else self._absent[column]
        together = torch.stack(values)
        return together.sum() if column in SENTINEL_SUM_COLUMNS else together.amax()

    def _gradients(self, optimizer: Optimizer, sampled: bool) -> Alike:
        """This rank's parts of all gradients, by the number of ranks that hold the same part."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known, alike = self._alike.get(id(optimizer), (-1, {}))
        if sampled or known != count:  # FSDP may have replaced parameters, whose number is the same
            alike = {}
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    alike.setdefault(replicas(parameter, self.copies(parameter)), []).append(parameter)
            self._alike[id(optimizer)] = (count, alike)
        found: Alike = {}
        for copies, parameters in alike.items():
            gradients = [_plain(p.grad) for p in parameters if p.grad is not None]
            if some := [gradient for gradient in gradients if gradient.numel()]:
                found[copies] = some
        return found

    def _squares(self, gradients: list[Tensor]) -> Tensor:
        """Sum of squares of each, float64 [N], on the device of the sums."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        read = plain_squares if self._recording else squares  # a replay copies nothing from the host
        found = [read(some) for some in kinds.values()]
        moved = [one.to(self.device, non_blocking=self.device.type == "cuda") for one in found]
        return moved[0] if len(moved) == 1 else torch.cat(moved)

    def _know_lr(self, lr: Number) -> None:
        self.add("lr", lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr))

    def _record(self, column: str, number: Tensor) -> None:
        """Puts into the graph that is captured what `add` does at once."""
        self.has_board = True
        cell = self.board[COLUMNS.index(column)]
        if column in SENTINEL_SUM_COLUMNS:
            cell.add_(number)
        else:
            torch.maximum(cell, number, out=cell)

    def _with_board(self, found: Tensor) -> Tensor:
        """`found` and what replays have added; what the job has said wins."""
        if self._lr_is_said:
            self.board[COLUMNS.index("lr")].fill_(-math.inf)
        cut = len(SENTINEL_SUM_COLUMNS)
        whole = torch.cat([found[:cut] + self.board[:cut], torch.maximum(found[cut:], self.board[cut:])])
        self.board.copy_(self._empty_board)
        return whole

    def _number(self, value: Number) -> Tensor:
        return to_scalar(value, self.device)


def _start(column: str) -> float:
    return 0.0 if column in SENTINEL_SUM_COLUMNS else -math.inf


def _plain(gradient: Any) -> Tensor:
    """This rank's part of a gradient, as a dense real tensor without history."""
    part = local(gradient)
    if part.is_sparse:
        part = part.coalesce().values()
    return torch.view_as_real(part) if part.is_complex() else part
