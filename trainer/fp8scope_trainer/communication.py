"""What a rank sends: collectives are counted as they are called, and compared with what a stage must send.

S is the size of the whole tensor (what is gathered, reduced or exchanged), w the ranks of the group. By the
ring, which no algorithm undercuts, a rank sends

    all_gather, reduce_scatter, all_to_all   S (w - 1) / w
    all_reduce                               2 S (w - 1) / w
    broadcast, reduce                        S (w - 1) / w, the mean over the ranks
    gather, scatter                          S / w, about the mean over the ranks
    send                                     S

What is counted is the payload of each call, not the bytes on a wire: a backend may use another algorithm, and
gloo does. `Traffic` sees the calls of FSDP, DTensor and torch.distributed alike, because all of them pass
torch's dispatcher; that costs host time for each operation, so count single steps, not a run.

Rejected: CommDebugMode, which counts calls but not bytes; counters of the network card, which see every
process of the machine.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.stage import Stage, parse_stage

_KINDS = (
    ("allgather", "all_gather"), ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"), ("all_reduce", "all_reduce"),
    ("alltoall", "all_to_all"), ("shard_dim_alltoall", "all_to_all"), ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"), ("reduce", "reduce"), ("gather", "gather"), ("scatter", "scatter"),
    ("send", "send"),
)
"""Beginning of an operation's name -> kind; the first that fits."""
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """Of one kind of collective."""

    calls: int
    sent_bytes: float
    """By this rank, by the ring."""


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Traffic() as traffic: step()`; then `traffic.volumes` by kind, those of this rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.volumes: dict[str, Volume] = {}

    @property
    def sent_bytes(self) -> float:
        """Of all kinds."""
        return sum(volume.sent_bytes for volume in self.volumes.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # comes back as the operations that it is made of
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in _NAMESPACES and (kind := _kind(func)):
            self._add(kind, _sent(kind, (*args, *(kwargs or {}).values()), result))
        return result

    def _add(self, kind: str, sent: float) -> None:
        if not sent:  # a group of one
            return
        old = self.volumes.get(kind, Volume(calls=0, sent_bytes=0.0))
        self.volumes[kind] = Volume(calls=old.calls + 1, sent_bytes=old.sent_bytes + sent)


def expected_traffic(
    stage: int | str | Stage, *, gathered_bytes: float, reduced_bytes: float, shard: int, replicate: int = 1,
    accumulate: int = 1,
) -> dict[str, float]:
    """Bytes that a rank must send in a step, by kind.

    gathered_bytes, reduced_bytes: of all parameters in the dtype they are gathered in, and of all gradients
    in the one they are reduced in. shard, replicate: sizes of the mesh. accumulate: micro-batches.
    """
    if min(shard, replicate, accumulate) < 1:
        raise Invalid("shard, replicate, accumulate", (shard, replicate, accumulate), "must be at least 1")
    which = parse_stage(stage)
    gather, scatter = (s * (shard - 1) / shard for s in (gathered_bytes, reduced_bytes))
    times = {
        Stage.REPLICATED: (0, 0), Stage.STATES: (1, 1), Stage.GRADIENTS: (1, accumulate),
        Stage.PARAMETERS: (2 * accumulate, accumulate), Stage.HYBRID: (2 * accumulate, accumulate),
    }[which]
    sent = {"all_gather": times[0] * gather, "reduce_scatter": times[1] * scatter,
            "all_reduce": 2 * reduced_bytes / shard * (replicate - 1) / replicate}
    return {kind: value for kind, value in sent.items() if value}


def _kind(func: Any) -> str:
    """The kind of collective; empty for what moves nothing (wait_tensor, barrier, recv)."""
    name = func._overloadpacket.__name__.lstrip("_")
    return next((kind for start, kind in _KINDS if name.startswith(start)), "")


def _sent(kind: str, arguments: tuple[Any, ...], result: Any) -> float:
    sizes = [size for one in arguments if (size := _bytes(one))]
    ranks = _ranks(arguments)
    if kind == "all_to_all":  # c10d names the output first; the functional form has the input only
        whole = sizes[min(1, len(sizes) - 1)]
    else:
        whole = max((*sizes, _bytes(result)), default=0)
    if kind in ("gather", "scatter"):
        return float(min(sizes))
    if kind == "send":
        return float(whole)
    return whole * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def _bytes(value: Any) -> int:
    """Of a tensor, or of all in a list of any depth."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _ranks(arguments: Iterable[Any]) -> int:
    """Size of the group among the arguments: an object, or its name."""
    for one in arguments:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return int(dist.ProcessGroup.unbox(one).size())
        if isinstance(one, dist.ProcessGroup):
            return int(one.size())
    name = [one for one in arguments if isinstance(one, str)][-1]
    return int(torch._C._distributed_c10d._resolve_process_group(name).size())  # type: ignore[arg-type]
