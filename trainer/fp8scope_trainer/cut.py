"""Which cuts of the decoder's linears give every rank whole heads, whole runs of gate and up, whole tiles.

Shapes alone decide; no torch is needed. The trainer asks before it cuts, the estimator before it counts.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import TILE

if TYPE_CHECKING:
    from fp8scope_trainer.decoder import DecoderConfig

COLUMNWISE = ("attention.qkv", "mlp.gate_up")
"""Linears whose rows are cut: each rank has some columns of the output."""
ROWWISE = ("attention.out", "mlp.down")
"""Linears whose columns are cut: each rank reads some columns of the input."""


def linears_of(config: "DecoderConfig") -> dict[str, tuple[int, int]]:
    """[N, K] of the linears of one layer."""
    attention, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    return {"attention.qkv": (attention + 2 * keys, config.width), "attention.out": (config.width, attention),
            "mlp.gate_up": (2 * config.hidden, config.width), "mlp.down": (config.width, config.hidden)}


def check_cut(config: "DecoderConfig", ranks: int, fp8: Mapping[str, tuple[int, int]]) -> None:
    """`Invalid` if tensor parallelism cannot share a layer over `ranks`; `fp8`: [N, K] of its FP8 linears."""
    least = ranks * config.run
    if config.kv_heads % ranks:
        raise Invalid("kv_heads", config.kv_heads, f"must be a multiple of {ranks}, the ranks of a layer")
    if config.hidden % least:
        raise Invalid("hidden", config.hidden, f"must be a multiple of {least} for {ranks} ranks of a layer")
    for name, shape in fp8.items():
        cut = _cut_dimension(name)
        if cut is not None and not keeps_tiles(shape[cut], ranks):
            raise Invalid(name, f"{shape[cut]} {('rows', 'columns')[cut]}",
                          f"cannot be cut for {ranks} ranks in FP8, which needs a multiple of {TILE} for "
                          "each; a filter of convert() can leave the layer out")


def has_whole_tiles(name: str, shape: tuple[int, int], ranks: int) -> bool:
    """Whether `ranks` can share a linear [N, K] in FP8: the parts of its weight are multiples of 128."""
    cut = _cut_dimension(name)
    return cut is None or keeps_tiles(shape[cut], ranks)


def keeps_tiles(size: int, ranks: int) -> bool:
    """Whether `size` rows or columns, shared evenly by `ranks`, are cut between tiles only."""
    return size % (TILE * ranks) == 0


def _cut_dimension(name: str) -> int | None:
    return 0 if name.endswith(COLUMNWISE) else 1 if name.endswith(ROWWISE) else None
