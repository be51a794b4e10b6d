"""Codes that layers of the same input keep once: query, key and value; gate and up.

Each of them saves for its backward the codes of X^T. Where the last one that quantized the very same input
did so by the same recipe, the next takes its codes instead of making and saving its own: three layers save
one byte an element together, where BF16 would share two.

The same input is the same tensor object at the same version: a write in place counts the version up, also
through a view. Nothing is kept alive: input and codes are weak references. The codes die with the last
backward pass that holds them, or at once where a hook stores saved tensors elsewhere (checkpointing,
offloading); then the next layer makes its own. Only under current scaling: a delayed scale is a layer's own.

Rejected: keeping the codes of X itself as well, which the forward of the next layer could use: they would
have to live as long as the input does, which can be until backward. A write that torch does not count
(through `.data`, by a kernel of the job's own) between two layers of one input goes unnoticed; autograd's own
check of saved tensors has the same limit.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope_trainer.recipe import Recipe


class _Kept(NamedTuple):
    """The last input and the codes that were saved of it."""

    input: "weakref.ref[Tensor]"
    version: int
    recipe: Recipe
    dtype: torch.dtype
    codes: "weakref.ref[Tensor]"
    scales: "weakref.ref[Tensor]"


class SharedCodes:
    """The place where layers that may have the same input look first. Copies and pickles are empty."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def offer(self, input: Tensor, recipe: Recipe, dtype: torch.dtype) -> "Offer":
        """For one forward of `input`, quantized as `dtype` by `recipe`."""
        kept, found = self._kept, None
        if (
            kept is not None and kept.input() is input and kept.version == input._version
            and kept.recipe is recipe and kept.dtype == dtype
        ):
            codes, scales = kept.codes(), kept.scales()
            found = None if codes is None or scales is None else (codes, scales)
        return Offer(self, input, recipe, dtype, found)

    def keep(self, kept: _Kept) -> None:
        """Replaces what is known."""
        self._kept = kept

    def __reduce__(self) -> tuple[type["SharedCodes"], tuple[()]]:
        return SharedCodes, ()


class Offer:
    """What one forward finds, and where it says what it saves. To be dropped when the forward ends."""

    def __init__(
        self, shared: SharedCodes, input: Tensor, recipe: Recipe, dtype: torch.dtype,
        found: tuple[Tensor, Tensor] | None,
    ) -> None:
        self.found = found
        """Codes of X^T and their scales."""
        self._shared = shared
        self._input = input
        self._recipe = recipe
        self._dtype = dtype

    def keep(self, codes: Tensor, scales: Tensor) -> None:
        """These are saved for backward."""
        self._shared.keep(_Kept(weakref.ref(self._input), self._input._version, self._recipe, self._dtype,
                                weakref.ref(codes), weakref.ref(scales)))
