"""Moments of torchao's `AdamW8bit`, `AdamW4bit` and `AdamWFp8` (and of their Adam twins).

Their states are tensors of a class of their own with `codes`, `scale`, `block_size` and, but for FP8,
`qmap` and `signed`. 8 bits: the dynamic map, which has a code of zero, in v too. 4 bits: a dynamic map for
m, for v sixteen even steps without zero. Read from torchao 0.18; small or odd parameters have ordinary
states.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8scope.codes import Codes
from fp8scope.sharding import local

EMPTY = 1e-12 * (1 + 2**-20)
"""torchao raises the amax of a block of zeros to 1e-12."""
LARGEST_FP8 = 448.0


def torchao_codes(state: Mapping[str, Any], key: str) -> Codes | None:
    """The moment `key` (exp_avg or exp_avg_sq) of one parameter, None if it is not one of torchao's."""
    found = state.get(key)
    if not isinstance(found, Tensor):
        return None
    one: Any = local(found)
    if not all(hasattr(one, name) for name in ("codes", "scale", "block_size")):
        return None
    values = getattr(one, "qmap", None)
    if values is None:
        return Codes(codes=one.codes, scales=one.scale, block=one.block_size, values=None, format="e4m3",
                     empty_scale=EMPTY / LARGEST_FP8)
    packed = values.numel() == 16
    format = "dynamic8" if not packed else "dynamic4" if one.signed else "linear4"
    return Codes(codes=one.codes, scales=one.scale, block=one.block_size, values=values, packed=packed,
                 empty_scale=EMPTY, format=format)
