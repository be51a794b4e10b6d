"""How many bytes of a GPU a training job fills: a sum that needs no torch, no GPU and no model.

With N parameters, R ranks that share a shard and states of s bytes a parameter, FSDP2 keeps (`fsdp2`):

| stage  | fp32 weights | fp32 gradients      | states | gathered weights, from forward to backward |
|--------|--------------|---------------------|--------|--------------------------------------------|
| 0      | 4N           | 4N                  | sN     | cN                                         |
| 1      | 4N/R         | 4N/R; 4N while micro-batches add up | sN/R | cN                           |
| 2      | 4N/R         | 4N/R                | sN/R   | cN                                         |
| 3      | 4N/R         | 4N/R                | sN/R   | two units of c bytes, while they compute   |

c is 2 in bf16 and fp8, 4 in fp32. FSDP2 keeps the sharded gradient in the parameter's fp32 even where it
is reduced in bf16, so stage 2 on 8 ranks is 2 + 16/8 = 4.0 bytes a parameter, not the 3.75 of the papers.
HYBRID is stage 3 with R = the ranks of one shard group. Stage 1 differs from 2 only if micro-batches add up.

The papers' sum (`paper`): compute copy 2N, gradient 2N, fp32 master 4N, two fp32 moments 8N: 16N. Stage 1
divides master and moments by R, stage 2 the gradient too, stage 3 all. Scales of quantized states,
activations and whatever lives during a layer only are not counted there.

A quantized state is its codes and one fp32 scale for each started block of a row; a matrix of fewer than
4,096 elements, a vector, the embedding and the head keep fp32. Tensor parallelism divides the linears of the
layers and nothing else. Shards are taken as even: a rank with a row more than others has more.

Not counted: the CUDA context, communication buffers, fragmentation, gradients of the unit in backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING

from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import TILE
from fp8scope_trainer.cut import check_cut, keeps_tiles, linears_of
from fp8scope_trainer.stage import Stage, check_fp8_gather, parse_stage
from fp8scope_trainer.state_block import SMALLEST_QUANTIZED, block_of

if TYPE_CHECKING:
    from fp8scope_trainer.decoder import DecoderConfig

ACCOUNTINGS = ("fsdp2", "paper")
PRECISIONS = ("fp8", "bf16", "fp32")
MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1, "lion": 1}
"""States of each optimizer that are as large as the parameter."""
CODE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
MOST_PARAMETERS = 10**15
MOST_RANKS = 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """`count` equal parameters of `rows` x `columns`."""

    rows: int
    columns: int
    count: int = 1
    exempt: bool = False
    """Keeps fp32 states whatever is asked for: embedding, head, vectors."""
    linear: bool = False
    """A linear of a layer: in FP8 where asked for, and divided by tensor parallelism."""

    @property
    def elements(self) -> int:
        """In all of them."""
        return self.rows * self.columns * self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What of a model matters here."""

    weights: tuple[Weights, ...]
    layers: int = 1
    """Units that are gathered one at a time."""
    decoder: "DecoderConfig | None" = None
    """Whose size it is, if it is our decoder's: what it can be cut into is known."""
    activation_bytes: tuple[float, float] = (0.0, 0.0)
    """Kept for backward per token: elements in the compute precision, and bytes of all else."""
    linear_input_elements: float = 0.0
    """Inputs of the linears per token: codes in fp8, the compute precision otherwise."""

    @property
    def parameters(self) -> int:
        return sum(one.elements for one in self.weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How it is to be trained."""

    optimizer: str = "adamw"
    states: str = "fp32"
    block: int | None = None
    """Elements that share a scale; None for the format's own."""
    stage: str = "2"
    ranks: int = 1
    shard_ranks: int | None = None
    """Of `hybrid`: ranks that share one shard, a divisor of the data-parallel ranks."""
    tensor_parallel: int = 1
    """Ranks that share each layer's linears; a divisor of `ranks`."""
    precision: str = "bf16"
    fp8_gather: bool = False
    """Linears' weights are gathered as FP8 codes."""
    accumulate: int = 1
    """Micro-batches a step."""
    tokens: int = 0
    """Per rank and micro-batch, for the activations; 0 leaves them out."""
    accounting: str = "fsdp2"

    def __post_init__(self) -> None:
        for name, known in (("optimizer", MOMENTS), ("states", CODE_BYTES), ("precision", PRECISIONS),
                            ("accounting", ACCOUNTINGS)):
            if getattr(self, name) not in known:
                raise Invalid(name, getattr(self, name), f"must be one of {', '.join(known)}")
        for name in ("ranks", "tensor_parallel", "accumulate"):
            check_whole(name, getattr(self, name), least=1, most=MOST_RANKS)
        check_whole("tokens", self.tokens, most=MOST_PARAMETERS)
        block_of(self.states, self.block)
        if self.ranks % self.tensor_parallel:
            raise Invalid("tensor_parallel", self.tensor_parallel, f"must divide ranks = {self.ranks}")
        if (self.zero is Stage.HYBRID) != (self.shard_ranks is not None):
            raise Invalid("shard_ranks", self.shard_ranks, "goes with stage HYBRID_SHARD, and that with it")
        if self.shard_ranks is not None:
            check_whole("shard_ranks", self.shard_ranks, least=1, most=MOST_RANKS)
            if self.data_ranks % self.shard_ranks:
                raise Invalid("shard_ranks", self.shard_ranks,
                              f"must divide the {self.data_ranks} ranks of a data-parallel group")
        if self.fp8_gather:
            check_fp8_gather(self.zero, tensor=self.tensor_parallel > 1)
            if self.precision != "fp8":
                raise Invalid("fp8_gather", True, f"needs precision fp8, not {self.precision}")
        if self.accounting == "paper" and self.precision != "bf16":
            raise Invalid("accounting", "paper", f"counts a copy in bf16, not in {self.precision}")

    @property
    def zero(self) -> Stage:
        """The stage that is meant by its number or name."""
        return parse_stage(self.stage)

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.ranks // self.tensor_parallel

    @property
    def shards(self) -> int:
        """Parts that a parameter's states are cut into (R)."""
        return 1 if self.zero is Stage.REPLICATED else self.shard_ranks or self.data_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One thing that is kept."""

    name: str
    bytes_per_gpu: float
    lives: str
    """`always`, or when."""
    counted: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What fills a GPU, item by item."""

    parameters: int
    items: tuple[Item, ...]

    @property
    def bytes_per_gpu(self) -> float:
        """All items at once: what lives for a while is there at the end of forward."""
        return sum(item.bytes_per_gpu for item in self.items)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of one GPU over the parameters of the whole model."""
        return self.bytes_per_gpu / self.parameters

    def of(self, name: str) -> float:
        """Bytes per GPU of the item called `name`; 0 if there is none."""
        return sum(item.bytes_per_gpu for item in self.items if item.name == name)


def any_model(parameters: int, *, exempt: int = 0, layers: int = 1) -> ModelSize:
    """A model of which only sizes are known: all but `exempt` parameters are in linears of its layers."""
    check_whole("parameters", parameters, least=1, most=MOST_PARAMETERS)
    check_whole("exempt", exempt, most=parameters)
    check_whole("layers", layers, least=1, most=MOST_PARAMETERS)
    weights = (Weights(rows=1, columns=parameters - exempt, linear=True),
               Weights(rows=1, columns=exempt, exempt=True))
    return ModelSize(weights=tuple(one for one in weights if one.elements), layers=layers)


def estimate(model: ModelSize, plan: Plan) -> Estimate:
    """Bytes of the GPU that has the most, item by item; see the module for what is counted."""
    if plan.tokens and not model.linear_input_elements:
        raise Invalid("tokens", plan.tokens, "activations are known of a preset only")
    if plan.accounting == "paper" and (plan.tokens or plan.fp8_gather):
        raise Invalid("accounting", "paper", "counts neither activations nor what is gathered; fsdp2 does")
    _check_cut(model, plan)
    items = _paper(model, plan) if plan.accounting == "paper" else _fsdp2(model, plan)
    return Estimate(parameters=model.parameters, items=tuple(item for item in items if item.bytes_per_gpu))


def _check_cut(model: ModelSize, plan: Plan) -> None:
    """`Invalid` where the trainer could not share a layer over that many ranks, as far as is known."""
    if plan.tensor_parallel == 1:
        return
    if plan.tokens:
        raise Invalid("tokens", plan.tokens, "activations are known without tensor parallelism only")
    if model.decoder is not None:
        fp8 = {name: shape for name, shape in linears_of(model.decoder).items()
               if plan.precision == "fp8" and all(keeps_tiles(size, 1) for size in shape)}
        check_cut(model.decoder, plan.tensor_parallel, fp8)


def states_bytes(model: ModelSize, plan: Plan) -> float:
    """Of one rank's optimizer states, before they are cut into shards, `step` apart."""
    return sum(_states_of(one, plan) for one in model.weights)


def _fsdp2(model: ModelSize, plan: Plan) -> Iterator[Item]:
    elements, compute = _per_rank(model, plan), 4.0 if plan.precision == "fp32" else 2.0
    gathered = _gathered_bytes(model, plan, compute)
    yield Item(name="weights", bytes_per_gpu=4 * elements / plan.shards, lives="always", counted="fp32")
    adding = plan.zero is Stage.STATES and plan.accumulate > 1
    yield Item(name="gradients", bytes_per_gpu=4 * elements / (1 if adding else plan.shards),
               lives="backward to step", counted="fp32" + ", whole while micro-batches add up" * adding)
    block = block_of(plan.states, plan.block)
    counted = f"{MOMENTS[plan.optimizer]} in {plan.states}" + (f", a scale per {block}" if block else "")
    yield Item(name="states", bytes_per_gpu=states_bytes(model, plan) / plan.shards, lives="always",
               counted=counted)
    if plan.zero.keeps_parameters:
        yield Item(name="gathered weights", bytes_per_gpu=gathered, lives="forward to backward",
                   counted=_gather_format(plan))
    elif not plan.zero.keeps_parameters:
        yield Item(name="gathered weights", bytes_per_gpu=gathered * min(1.0, 2 / model.layers),
                   lives="while a layer computes",
                   counted=f"{_gather_format(plan)}, two layers of {model.layers}")
    if plan.precision == "fp8":
        yield Item(name="weight codes", bytes_per_gpu=_linear(model, plan) * _code_bytes(),
                   lives="forward to backward", counted="E4M3 of the linears, kept for dgrad")
    yield Item(name="activations", bytes_per_gpu=plan.tokens * _activation_bytes(model, plan, compute),
               lives="forward to backward", counted=f"{plan.tokens} tokens")


def _paper(model: ModelSize, plan: Plan) -> Iterator[Item]:
    elements, zero = _per_rank(model, plan), 3 if plan.zero is Stage.HYBRID else int(plan.zero.value)
    moments = MOMENTS[plan.optimizer] * CODE_BYTES[plan.states]
    for name, size, cut_from, counted in (
        ("compute copy", 2.0, 3, "bf16"), ("gradients", 2.0, 2, "bf16"), ("master", 4.0, 1, "fp32"),
        ("states", moments, 1, f"{MOMENTS[plan.optimizer]} in {plan.states}, codes only"),
    ):
        yield Item(name=name, bytes_per_gpu=size * elements / (plan.shards if zero >= cut_from else 1),
                   lives="always", counted=counted)


def _per_rank(model: ModelSize, plan: Plan) -> float:
    """Elements that one tensor-parallel rank has a part in, before they are cut into shards."""
    return sum(one.elements / (plan.tensor_parallel if one.linear else 1) for one in model.weights)


def _linear(model: ModelSize, plan: Plan) -> float:
    return sum(one.elements for one in model.weights if one.linear) / plan.tensor_parallel


def _gathered_bytes(model: ModelSize, plan: Plan, compute: float) -> float:
    coded = sum(one.elements for one in model.weights if _gathered_as_codes(one, model, plan))
    return (_per_rank(model, plan) - coded) * compute + coded * _code_bytes()


def _gathered_as_codes(one: Weights, model: ModelSize, plan: Plan) -> bool:
    """As `fp8_gather` chooses; the linears of a model of unknown shapes are taken to be fit."""
    return (plan.fp8_gather and one.linear and plan.shards > 1
            and (model.decoder is None or keeps_tiles(one.rows, plan.shards)))


def _gather_format(plan: Plan) -> str:
    return "E4M3 codes" if plan.fp8_gather else "fp32" if plan.precision == "fp32" else "bf16"


def _code_bytes() -> float:
    """Of a weight in [128,128] blocks, an element."""
    return 1 + 4 / prod((TILE, TILE))


def _activation_bytes(model: ModelSize, plan: Plan, compute: float) -> float:
    """Per token. Inputs of linears are codes and a scale for 128 tokens in fp8."""
    elements, others = model.activation_bytes
    inputs = 1 + 4 / TILE if plan.precision == "fp8" else compute
    return elements * compute + others + model.linear_input_elements * inputs


def _states_of(one: Weights, plan: Plan) -> float:
    elements = one.elements / (plan.tensor_parallel if one.linear else 1)
    small = one.rows * one.columns < SMALLEST_QUANTIZED
    states = "fp32" if one.exempt or small else plan.states
    block = block_of(states, plan.block if states == plan.states else None)
    scales = 4 * ceil(one.columns / block) / one.columns if block else 0.0
    return MOMENTS[plan.optimizer] * elements * (CODE_BYTES[states] + scales)
