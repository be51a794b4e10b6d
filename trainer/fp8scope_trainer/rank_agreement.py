"""Ranks that go on together or fail together: an error of one must not leave the others waiting for it."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from fp8scope_protocol.errors import Fp8scopeError

T = TypeVar("T")


class _Failure(NamedTuple):
    """An error as it travels: what it was given may be anything, and not picklable."""

    kind: type[Fp8scopeError]
    text: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: Fp8scopeError) -> "_Failure":
        fields = {key: value if isinstance(value, str | int | float | None) else repr(value)
                  for key, value in vars(error).items()}
        return cls(type(error), str(error), fields)

    def error(self, prefix: str = "") -> Fp8scopeError:
        """The same error on another rank."""
        made = self.kind.__new__(self.kind, prefix + self.text)
        made.__dict__.update(self.fields)
        return made


def on_first_rank(work: Callable[[], T]) -> T:
    """Does `work` on rank 0 only and gives every rank its result, or its `Fp8scopeError`."""
    if not _several():
        return work()
    answer: list[Any] = [None]
    own: Fp8scopeError | None = None
    if dist.get_rank() == 0:
        try:
            answer = [work()]
        except Fp8scopeError as error:
            answer, own = [_Failure.of(error)], error
    dist.broadcast_object_list(answer)
    result = answer[0]
    if isinstance(result, _Failure):
        raise own or result.error()
    return result  # type: ignore[no-any-return]  # what rank 0 made


def on_all_ranks(work: Callable[[], T]) -> T:
    """Does `work` on every rank; if any raises an `Fp8scopeError`, all do, each its own if it has one."""
    if not _several():
        return work()
    result: Any = None
    own: Fp8scopeError | None = None
    try:
        result = work()
    except Fp8scopeError as error:
        own = error
    failures: list[_Failure | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if own is None else _Failure.of(own))
    if own is not None:
        raise own
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise failure.error(f"rank {rank}: ")
    return result  # type: ignore[no-any-return]


def merged(own: dict[str, T]) -> dict[str, T]:
    """The entries of every rank; call it on every rank."""
    if not _several():
        return own
    found: list[dict[str, T]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {key: value for one in found for key, value in sorted(one.items())}


def _several() -> bool:
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
