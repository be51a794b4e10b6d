"""Producers: which ranks share layers, and who of them measures what several hold alike.

Each rank says which layers and parameters it holds, by their names in the whole model. Ranks that share a
name, directly or through others, make one producer: the ranks of a data, tensor or context parallel group,
and the expert groups of a pipeline stage, whose attention they share. Pipeline stages share no name and are
producers each. So every series is reduced over all ranks that hold a part of it, and lies in one producer's
batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from fp8scope_protocol.wire import ModulePrecision, Unobserved

EVERYTHING = "all"
"""Name of the only producer of a job."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds, by names in the whole model."""

    names: tuple[str, ...] = ()
    """Of layers and parameters."""
    shapes: dict[str, tuple[int, ...]] = {}
    """Of parameters with several dimensions; the whole one's of a DTensor."""
    depth: int = 0
    """How many modules."""
    precision: tuple[ModulePrecision, ...] = ()
    unobserved: tuple[Unobserved, ...] = ()


def unite(holdings: Iterable[Holding]) -> Holding:
    """What several ranks hold; the first one's word on what they share."""
    some = tuple(holdings)
    precision = {one.name: one for held in reversed(some) for one in held.precision}
    order = dict.fromkeys(one.name for held in some for one in held.precision)
    return Holding(
        names=tuple(dict.fromkeys(name for held in some for name in held.names)),
        depth=max((held.depth for held in some), default=0),
        precision=tuple(precision[name] for name in order),
        unobserved=tuple(dict.fromkeys(one for held in some for one in held.unobserved)),
    )


def find_clash(held: Sequence[Holding], members: Iterable[int]) -> str:
    """What is called alike on ranks that are `members` of a producer, and cannot be the same there: empty if
    nothing is. Copies and equal shards have one shape, and so may different stages, which are not found."""
    seen: dict[str, tuple[tuple[int, ...], int]] = {}
    found: dict[str, str] = {}
    firsts: dict[int, int] = {}  # most ranks hold the same, and it is one object
    for rank in members:
        firsts.setdefault(id(held[rank]), rank)
    for rank in firsts.values():
        for name, shape in held[rank].shapes.items():
            other, earlier = seen.setdefault(name, (shape, rank))
            if other != shape:
                found.setdefault(
                    name, f"{name} is {[*other]} on rank {earlier} and {[*shape]} on rank {rank}")
    if not found:
        return ""
    more = f" (and {len(found) - 1} more names)" if len(found) > 1 else ""
    return (f"{next(iter(found.values()))}{more}, and what has one name is added up: if these are different "
            "layers, as of stages that are counted from 0, attach(rename=...) tells them apart")


@dataclass(frozen=True, kw_only=True)
class Producer:
    """Ranks that share layers, and what each holds."""

    name: str = EVERYTHING
    members: tuple[int, ...] = (0,)
    """Ranks of the job, ascending; a position among them is a rank's place."""
    held: tuple[tuple[frozenset[str], tuple[int, ...]], ...] = ()
    """Names and the places of the ranks that hold exactly these, where members differ; else empty."""

    def holders(self, name: str) -> tuple[int, ...]:
        """Places of the ranks that hold `name`; all of them where it is not known."""
        return self._holders.get(name, self._everyone)

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(len(self.members)))

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for names, places in self.held:
            found |= {name: tuple(sorted((*found.get(name, ()), *places))) for name in names}
        return found


def find_producers(held: Sequence[Iterable[str]]) -> tuple[Producer, ...]:
    """The producers of a job whose rank i holds the names held[i], in order of their lowest ranks."""
    kinds: dict[frozenset[str], list[int]] = {}
    for rank, names in enumerate(held):
        kinds.setdefault(frozenset(names), []).append(rank)
    circles: list[dict[frozenset[str], list[int]]] = []
    for names, ranks in kinds.items():
        joined = {names: ranks}
        apart = []
        for circle in circles:
            if any(not names.isdisjoint(others) for others in circle):
                joined |= circle
            else:
                apart.append(circle)
        circles = [*apart, joined]
    circles.sort(key=lambda circle: min(min(ranks) for ranks in circle.values()))
    single = len(circles) == 1
    return tuple(_producer(EVERYTHING if single else f"part{i}", circle) for i, circle in enumerate(circles))


def _producer(name: str, circle: dict[frozenset[str], list[int]]) -> Producer:
    members = tuple(sorted(rank for ranks in circle.values() for rank in ranks))
    places = {rank: place for place, rank in enumerate(members)}
    held = tuple((names, tuple(places[rank] for rank in ranks)) for names, ranks in circle.items())
    return Producer(name=name, members=members, held=held if len(held) > 1 else ())
