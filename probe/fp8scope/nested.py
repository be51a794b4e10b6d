"""Tensors in whatever a layer is given or returns."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

PLAIN = (int, float, complex, str, bytes, type(None))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, each once.

    Lists may be long (token ids) and containers may hold themselves.
    """
    seen: set[int] = set()
    pending = deque([value])
    while pending:
        one = pending.popleft()
        if isinstance(one, PLAIN) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            pending += one
        elif isinstance(one, Mapping):
            pending += one.values()
        elif is_dataclass(one) and not isinstance(one, type):
            pending += [getattr(one, f.name, None) for f in fields(one)]  # one may not be set yet
