"""Commands: the closed set of things that may be asked of a running job.

A command is data, never code. Its life: queued -> delivered -> applied (at a step) | rejected (with a
reason) | expired. Ids grow by one per run, so the highest id is the version that rides in the probe's
per-step reduction.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from fp8scope_protocol.errors import Invalid

Precision = Literal["fp8", "bf16", "shadow"]
"""What a layer computes in. `shadow` is BF16 compute with FP8 still measured, so that a return to FP8
can be judged; the probe turns a wish for `bf16` into `shadow` wherever the layer can do it."""

CommandState = Literal["queued", "delivered", "applied", "rejected", "expired"]

PRECISIONS: tuple[str, ...] = get_args(Precision)
FINAL_STATES = ("applied", "rejected", "expired")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetPrecision:
    """Switch the named layers to a precision. Names are exact, as in the run's precision map."""

    modules: tuple[str, ...]
    precision: Precision
    kind: Literal["set_precision"] = "set_precision"

    def __post_init__(self) -> None:
        if not self.modules:
            raise Invalid("modules", self.modules, "name at least one layer")
        if twice := [name for name, times in Counter(self.modules).items() if times > 1]:
            raise Invalid("modules", twice[0], "name each layer once")
        if self.precision not in PRECISIONS:
            raise Invalid("precision", self.precision, f"must be one of {', '.join(PRECISIONS)}")


Action = SetPrecision


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """An action with its id and state, as the collector keeps it and the probe receives it."""

    id: int
    action: Action
    issued_by: str
    """`user`, or `rule:NAME`."""
    reason: str = ""
    state: CommandState = "queued"
    issued_step: int = 0
    """Newest step of the run when the command was given."""
    expires_step: int | None = None
    """The probe rejects the command at boundaries beyond this step."""
    applied_step: int | None = None
    steps_by_rank: tuple[int, ...] = field(default=())
    """The step at which each rank applied it; all equal, shown because it must be."""
    answer: str = ""
    """Why it was rejected or expired."""


class CommandReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a command in one producer."""

    id: int
    state: Literal["applied", "rejected", "expired"]
    step: int
    steps_by_rank: tuple[int, ...] = ()
    reason: str = ""
    precision: str = ""
    """What all its layers run in since then, where that is one: `shadow`, say, if asked for `bf16`."""
