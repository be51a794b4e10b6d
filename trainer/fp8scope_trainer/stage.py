"""ZeRO's stages, and the names that other engines give them."""

from enum import Enum

from fp8scope_protocol.errors import Invalid


class Stage(Enum):
    """What is cut into shards. The values are the stages' own names."""

    REPLICATED = "0"
    """Nothing: every rank holds everything, gradients are all-reduced."""
    STATES = "1"
    """Optimizer states (and, on FSDP2, parameters between steps)."""
    GRADIENTS = "2"
    """States and gradients."""
    PARAMETERS = "3"
    """States, gradients and parameters."""
    HYBRID = "HYBRID_SHARD"
    """All three inside a group of ranks; the groups are replicas of one another."""

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters stay gathered from the first forward of a step to its last backward."""
        return self in (Stage.REPLICATED, Stage.STATES, Stage.GRADIENTS)


ACCEPTED = "0 (NO_SHARD, DDP), 1, 2 (SHARD_GRAD_OP), 3 (FULL_SHARD), HYBRID_SHARD; in any case"

_NAMES = {
    "0": Stage.REPLICATED, "no_shard": Stage.REPLICATED, "ddp": Stage.REPLICATED,
    "1": Stage.STATES,
    "2": Stage.GRADIENTS, "shard_grad_op": Stage.GRADIENTS,
    "3": Stage.PARAMETERS, "full_shard": Stage.PARAMETERS,
    "hybrid_shard": Stage.HYBRID,
}


def parse_stage(stage: int | str | Stage) -> Stage:
    """The stage meant by a number or a name; raises `Invalid` with what is accepted."""
    if isinstance(stage, Stage):
        return stage
    known = isinstance(stage, (int, str)) and not isinstance(stage, bool)
    name = str(stage).strip().lower().replace("-", "_") if known else ""
    if name not in _NAMES:
        raise Invalid("stage", stage, f"must be one of {ACCEPTED}")
    return _NAMES[name]


def check_fp8_gather(stage: Stage, *, tensor: bool) -> None:
    """`Invalid` where weights cannot be gathered as codes; `tensor`: layers are cut over ranks, too."""
    if stage.keeps_parameters:
        raise Invalid("fp8_gather", True, f"is for stage 3 and HYBRID_SHARD, not for {stage.value}")
    if tensor:
        raise Invalid("fp8_gather", True, "does not go with tensor parallelism; accepted with it: False")
