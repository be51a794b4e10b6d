"""Ranks that go on together or fail together: an error of one must not leave the others waiting for it."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from fp8scope_protocol.errors import Fp8scopeError

T = TypeVar("T")


def on_first_rank(work: Callable[[], T]) -> T:
    """Does `work` on rank 0 only and gives every rank its result, or its `Fp8scopeError`."""
    if not _several():
        return work()
    answer: list[tuple[T | None, str]] = [(None, "")]
    own: Fp8scopeError | None = None
    if dist.get_rank() == 0:
        try:
            answer = [(work(), "")]
        except Fp8scopeError as error:
            answer, own = [(None, str(error))], error
    dist.broadcast_object_list(answer)
    result, failure = answer[0]
    if failure:
        raise own or Fp8scopeError(failure)
    return result  # type: ignore[return-value]  # what rank 0 made


def on_all_ranks(work: Callable[[], T]) -> T:
    """Does `work` on every rank; if it raises `Fp8scopeError` on any, all raise, each its own if it has one."""
    if not _several():
        return work()
    result, own = None, None
    try:
        result = work()
    except Fp8scopeError as error:
        own = error
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if own is None else str(own))
    if own is not None:
        raise own
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise Fp8scopeError(f"rank {rank}: {failure}")
    return result  # type: ignore[return-value]


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
