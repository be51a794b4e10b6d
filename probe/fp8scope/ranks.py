"""Who takes part: the handshake over the job's own store, and the probe's own collectives.

Attaching must not be able to hang a job in which some rank has no probe. So the ranks first meet in the
c10d store, with a time-out, and one of them writes the decision there for all: either every rank has a
probe with the same configuration, or every probe works rank-locally. Only after that is a group made,
because a `new_group` that one rank does not join makes the training's own collectives fail.

The group is gloo, on the host, whatever the training uses: the probe's collectives run in its own thread,
in step order, and can neither reorder nor stall NCCL's.
"""

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

KEY = "fp8scope"
TOGETHER = "together"
LOOK_SECONDS = 0.02
"""Pause between two looks at the store; `Store.wait` would print a C++ stack when it times out."""


class Ranks:
    """The ranks whose numbers are merged. `group` is None in a single process and in rank-local mode."""

    def __init__(
        self, *, rank: int = 0, world_size: int = 1, attempt: str = "", group: Any = None, apart: str = ""
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.attempt = attempt or uuid.uuid4().hex
        self.apart = apart
        """Why the ranks are not merged; empty when they are, and in a single process."""
        self.producer = f"rank{rank}" if apart else "all"
        self._group = group

    @property
    def count(self) -> int:
        """How many ranks are merged: the first dimension of what `gather` returns."""
        return self.world_size if self._group is not None else 1

    @property
    def index(self) -> int:
        """This rank's row in what `gather` returns."""
        return self.rank if self._group is not None else 0

    @property
    def leads(self) -> bool:
        """True where batches are made: on rank 0, and on each rank when they are apart from the start."""
        return self.rank == 0 or self.producer != "all"

    def leave(self, reason: str) -> None:
        """Work rank-locally from now on. The connections are closed, so that no other rank waits for us."""
        group, self._group = self._group, None
        self.apart = reason
        if group is not None and dist.is_initialized():
            with suppress(ValueError, RuntimeError):  # the job may have destroyed it before
                dist.destroy_process_group(group)

    def gather(self, row: Tensor) -> Tensor:
        """row [K] of each rank -> [count, K]."""
        if self._group is None:
            return row[None]
        rows = torch.empty((self.world_size, *row.shape), dtype=row.dtype)
        dist.all_gather(list(rows.unbind(0)), row, group=self._group)
        return rows

    def gather_bytes(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        """`data` of each rank; `sizes` are all ranks' lengths, known from an earlier `gather`."""
        if self._group is None:
            return [data]
        longest = max(sizes)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        rows = self.gather(padded).numpy()
        return [rows[i, :size].tobytes() for i, size in enumerate(sizes)]

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over the ranks, in place."""
        if self._group is not None:
            dist.all_reduce(values, dist.ReduceOp.SUM, group=self._group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, in place."""
        if self._group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values


def join_ranks(configuration: str, *, handshake_seconds: float, reduce_seconds: float) -> Ranks:
    """Meet the probes of the other ranks. To be called on the training thread, once per attach.

    `configuration` must be the same text on all ranks for their numbers to be merged.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Ranks()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    nth = store.add(f"{KEY}/{rank}/attached", 1)
    prefix = f"{KEY}/{nth}"
    attempt = _agree(store, f"{prefix}/attempt", uuid.uuid4().hex)
    store.set(f"{prefix}/{rank}", configuration)
    obstacle = _obstacle(store, prefix, world_size, handshake_seconds)
    # Whoever decides first decides for all: a late rank must not wait for ranks that gave up on it.
    verdict = _agree(store, f"{prefix}/verdict", obstacle or TOGETHER)
    apart = "" if verdict == TOGETHER else verdict
    group = None
    if not apart:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=reduce_seconds))
    return Ranks(rank=rank, world_size=world_size, attempt=attempt, group=group, apart=apart)


def _agree(store: Store, key: str, wish: str) -> str:
    """The value of `key`: `wish` if no rank has set it before."""
    return bytes(store.compare_set(key, "", wish)).decode()


def _obstacle(store: Store, prefix: str, world_size: int, seconds: float) -> str:
    """Why the ranks cannot be merged; empty when all of them are there and alike."""
    keys = [f"{prefix}/{rank}" for rank in range(world_size)]
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if store.check([f"{prefix}/verdict"]):
            return "another rank gave up waiting"
        if time.monotonic() > deadline:
            absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            return f"no probe within {seconds:g} s on rank {', '.join(absent[:8])}"
        time.sleep(LOOK_SECONDS)
    first, *others = (bytes(store.get(key)) for key in keys)
    unlike = [str(rank) for rank, other in enumerate(others, start=1) if other != first]
    return f"attached with other settings than rank 0: rank {', '.join(unlike[:8])}" if unlike else ""
