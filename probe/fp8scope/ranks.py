"""Who takes part: the handshake over the job's own store, and the probe's own groups.

Attaching must not be able to hang a job in which some rank has no probe. So the ranks first meet in the
c10d store, with a time-out, and one of them writes the decision there for all: either every rank has a
probe with the same configuration, or every probe works rank-locally. Only after that are groups made,
because a `new_group` that one rank does not join makes the training's own collectives fail. With its
configuration each rank says what it holds: that tells the producers (producer.py), and so which
groups all ranks have to make, in the same order.

Groups are gloo, on the host, whatever the training uses: the probe's collectives run in its own thread,
in step order, and can neither reorder nor stall NCCL's.
"""

import base64
import hashlib
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fp8scope.circle import Circle
from fp8scope.producer import Holding, Producer, find_clash, find_producers, unite

KEY = "fp8scope"
TOGETHER = "together"
LONGEST_REASON = 500
"""Of a rank that cannot attach, in characters."""
LOOK_SECONDS = 0.02
"""Pause between two looks at the store; `Store.wait` would print a C++ stack when it times out."""


class Ranks:
    """The ranks of a job: `job` is all of them, `own` those of this rank's producer. Both are this rank alone
    in a single process and in rank-local mode."""

    def __init__(
        self, *, rank: int = 0, world_size: int = 1, attempt: str = "", apart: str = "",
        producers: Sequence[Producer] = (), holding: Holding | None = None, first_depth: int = 0,
        job: Circle | None = None, own: Circle | None = None, clash: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.attempt = attempt or uuid.uuid4().hex
        self.apart = apart
        """Why the ranks are not merged; empty when they are, and in a single process."""
        self.clash = clash
        """What has one name in the producer and cannot be one layer; see `find_clash`."""
        alone = Producer(name=f"rank{rank}", members=(rank,)) if apart else Producer(members=(rank,))
        self.producer = next((one for one in producers if rank in one.members), alone)
        self.producers = max(1, len(producers))
        """How many there are in the job; 1 in rank-local mode."""
        self.leads = rank == self.producer.members[0]
        """Whether batches are made here: on the lowest rank of each producer."""
        self.holding = holding or Holding()
        """What the ranks of the producer hold."""
        self.first_depth = first_depth
        """Modules of the producers before this one: stages lie one behind the other."""
        self.job = job or Circle()
        self.own = own or self.job

    @property
    def speaks(self) -> bool:
        """Whether what is known of the whole job is told here: on its first rank, and on each one alone."""
        return self.job.index == 0

    def leave(self, reason: str) -> None:
        """Work rank-locally from now on."""
        self.apart = reason
        self.own.leave()
        self.job.leave()


@contextmanager
def declining() -> Iterator[None]:
    """Around what may fail before `join_ranks`: the other ranks are told and need not wait for this one.
    Such an attach counts as one on its rank, so that a second try meets those of the other ranks."""
    try:
        yield
    except Exception as error:
        if _is_shared():
            rank = dist.get_rank()
            store, prefix = _open(rank)
            _agree(store, f"{prefix}/verdict", f"attaching failed on rank {rank}: {error}"[:LONGEST_REASON])
        raise


@contextmanager
def leaving(ranks: "Ranks") -> Iterator[None]:
    """Around what may fail after it: the connections are closed, which the other ranks see."""
    try:
        yield
    except Exception as error:
        ranks.leave(f"attaching failed: {error}")
        raise


def _is_shared() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _open(rank: int) -> tuple[Store, str]:
    """The job's store, and what the keys of this attach begin with: its number, on this rank."""
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    return store, f"{KEY}/{store.add(f'{KEY}/{rank}/attached', 1)}"


def join_ranks(
    configuration: str, holding: Holding | None = None, *, handshake_seconds: float, reduce_seconds: float
) -> Ranks:
    """Meet the probes of the other ranks. To be called on the training thread, once per attach.

    `configuration` must be the same text on all ranks for their numbers to be merged.
    """
    holding = holding or Holding()
    if not _is_shared():
        return Ranks(holding=holding)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store, prefix = _open(rank)
    attempt = _agree(store, f"{prefix}/attempt", uuid.uuid4().hex)
    store.set(f"{prefix}/{rank}", f"{_put(store, prefix, holding)} {configuration}")
    obstacle = _obstacle(store, prefix, world_size, handshake_seconds)
    # Whoever decides first decides for all: a late rank must not wait for ranks that gave up on it.
    verdict = _agree(store, f"{prefix}/verdict", obstacle or TOGETHER)
    if verdict != TOGETHER:
        return Ranks(rank=rank, world_size=world_size, attempt=attempt, apart=verdict, holding=holding)
    held = _get(store, prefix, world_size)
    producers = find_producers([one.names for one in held])
    holdings = [unite({id(held[i]): held[i] for i in one.members}.values()) for one in producers]
    mine = next(i for i, one in enumerate(producers) if rank in one.members)
    job, own = _groups(producers, rank, timedelta(seconds=reduce_seconds))
    return Ranks(rank=rank, world_size=world_size, attempt=attempt, producers=producers, job=job, own=own,
                 holding=holdings[mine], clash=find_clash(held, producers[mine].members),
                 first_depth=sum(one.depth for one in holdings[:mine]))


def _groups(producers: Sequence[Producer], rank: int, timeout: timedelta) -> tuple[Circle, Circle]:
    """The whole job, and the producer of `rank`. Every rank takes part in making every group."""
    job = Circle(dist.new_group(backend="gloo", timeout=timeout))
    if len(producers) == 1:
        return job, job
    own = Circle()
    for producer in producers:
        if len(producer.members) > 1:
            group = dist.new_group(list(producer.members), backend="gloo", timeout=timeout)
            own = Circle(group) if rank in producer.members else own
    return job, own


def _agree(store: Store, key: str, wish: str) -> str:
    """The value of `key`: `wish` if no rank has set it before."""
    return bytes(store.compare_set(key, "", wish)).decode()


def _put(store: Store, prefix: str, holding: Holding) -> str:
    """The digest under which `holding` lies in the store; most ranks have the same."""
    data = msgspec.msgpack.encode(holding)
    digest = hashlib.sha256(data).hexdigest()[:32]
    store.set(f"{prefix}/held/{digest}", base64.b85encode(zlib.compress(data)).decode())
    return digest


def _get(store: Store, prefix: str, world_size: int) -> list[Holding]:
    """What each rank holds; one object for all that hold the same."""
    digests = [digest for digest, _ in _said(store, prefix, world_size)]
    known = {}
    for digest in set(digests):
        data = zlib.decompress(base64.b85decode(bytes(store.get(f"{prefix}/held/{digest}"))))
        known[digest] = msgspec.msgpack.decode(data, type=Holding)
    return [known[digest] for digest in digests]


def _said(store: Store, prefix: str, world_size: int) -> list[tuple[str, str]]:
    """The digest of what each rank holds, and its configuration."""
    said = store.multi_get([f"{prefix}/{rank}" for rank in range(world_size)])
    entries = (bytes(one).decode().partition(" ") for one in said)
    return [(digest, configuration) for digest, _, configuration in entries]


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
    first, *others = (configuration for _, configuration in _said(store, prefix, world_size))
    unlike = [str(rank) for rank, other in enumerate(others, start=1) if other != first]
    return f"attached with other settings than rank 0: rank {', '.join(unlike[:8])}" if unlike else ""
