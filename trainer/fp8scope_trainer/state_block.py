"""Formats of optimizer states by name, and the blocks that each can have; needs no torch."""

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import TILE

FORMATS = ("fp32", "bf16", "int16", "fp8", "int8", "int4")

BLOCKS = {"int16": (256, 8192, 1024), "fp8": (TILE, TILE, TILE), "int8": (256, 8192, 1024),
          "int4": (64, 1024, 256)}
"""Smallest, largest and default block, in elements of a row. The others have none."""

SMALLEST_QUANTIZED = 4096
"""Parameters with fewer elements, in all, keep fp32 states: nothing to gain, much to lose."""


def block_of(name: str, block: int | None = None) -> int:
    """Elements that share a scale in states of format `name`; 0 where nothing does.

    `block` None is the format's own. `Invalid` names what is accepted.
    """
    if name not in FORMATS:
        raise Invalid("states", name, f"must be one of {', '.join(FORMATS)}")
    if name not in BLOCKS:
        if block is not None:
            raise Invalid("block", block, f"{name} states have no blocks; leave it out")
        return 0
    low, high, default = BLOCKS[name]
    if block is None:
        return default
    whole = isinstance(block, int) and not isinstance(block, bool)
    if not whole or not low <= block <= high or block & (block - 1):
        rule = f"{low}" if low == high else f"a power of two from {low} to {high}"
        raise Invalid("block", block, f"of {name} states must be {rule}")
    return block
