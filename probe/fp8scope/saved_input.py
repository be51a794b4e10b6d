"""The input of a linear where autograd keeps it for the weight's gradient, looked at without keeping it.

What a layer keeps for `wgrad_row_error_max` is otherwise a copy of some columns, 2 MB at 16,384 tokens, which
lies there when most activations do. The tensor that autograd keeps lies there anyway, until the layer's own
backward pass, which begins when the gradient of its output is there. Held is a weak reference: a graph that
is dropped goes as it would.

None of it where another library packs what autograd saves (checkpointing, offloading), where the product was
made of something else (autocast's copy), or where the weight has no gradient: then columns are copied.
"""

import weakref
from typing import Protocol

import torch
from torch import Tensor

from fp8scope.gemm import WgradSample, sample_columns

VIEWS = {"ViewBackward0", "UnsafeViewBackward0"}
PRODUCTS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
"""What the node of a product calls its input."""


class Kept(Protocol):
    """What a call keeps of its input."""

    def sample(self) -> WgradSample | None:
        """Columns of it; None if they cannot be had any more."""


class SavedInput:
    """x [M, K] of one call."""

    def __init__(self, saved: Tensor) -> None:
        self._saved = weakref.ref(saved)
        self._version = saved._version

    def sample(self) -> WgradSample | None:
        """As `sample_columns(x)` would have been in the call; None if x was changed or is gone."""
        saved = self._saved()
        if saved is None or saved._version != self._version:
            return None
        return sample_columns(saved.detach())


def saved_input(output: Tensor, x: Tensor) -> SavedInput | None:
    """Where autograd keeps x [M, K], which was multiplied to give `output`, if it can be seen."""
    active = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if type(output) is not Tensor or active is None or active(True) is not None:
        return None
    node = output.grad_fn
    if node is not None and type(node).__name__ in VIEWS:
        node = node.next_functions[0][0]
    saved = getattr(node, PRODUCTS.get(type(node).__name__, ""), None)
    same = (type(saved) is Tensor and saved.shape == x.shape and saved.dtype is x.dtype
            and saved.data_ptr() == x.data_ptr() and saved.stride() == x.stride())
    return SavedInput(saved) if same and saved is not None else None
