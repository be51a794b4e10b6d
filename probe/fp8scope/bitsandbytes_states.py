"""Moments of bitsandbytes' 8-bit Adam and AdamW, paged ones included.

A parameter's state has `state1` (m) and `state2` (v) in uint8, `qmap1` and `qmap2` with what the codes
mean, and `absmax1`, `absmax2` with the largest magnitude of each run of 256 elements. Parameters of fewer
than 4,096 elements have them in fp32. Read from bitsandbytes 0.50.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8scope.codes import Codes

NUMBERS = {"exp_avg": 1, "exp_avg_sq": 2}


def bitsandbytes_codes(state: Mapping[str, Any], key: str) -> Codes | None:
    """The moment `key` (exp_avg or exp_avg_sq) of one parameter, None if it is not one of bitsandbytes'."""
    number = NUMBERS[key]
    codes, values, scales = (state.get(f"{name}{number}") for name in ("state", "qmap", "absmax"))
    if not (isinstance(codes, Tensor) and isinstance(values, Tensor) and isinstance(scales, Tensor)):
        return None
    if codes.dtype != torch.uint8 or not scales.numel():
        return None
    block = 256 if scales.numel() == -(-codes.numel() // 256) else 0
    return Codes(codes=codes, scales=scales, block=block, values=values, format="dynamic8") if block else None
