"""What the operations of compiled graphs do when they run (see traced.py): the eager code, found by key.

Hooks do not run in compiled code, so a body tells the observer that a forward begins and ends. What the
observer wants kept until the backward pass is known by the address of the codes that this pass gets.

Scales leave in one layout, whatever device and shape, because a graph is told it beforehand; and nothing
leaves that is somebody else's, because a graph may write over it.
"""

from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8scope.compiled import Key
from fp8scope.gemm import WgradSample
from fp8scope.observer import GraphObserver
from fp8scope.quantize import Quantized
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer import block, rounded, tensorwise
from fp8scope_trainer.call import Call
from fp8scope_trainer.recipe import Recipe, quantize_for_wgrad, quantize_weight, recipe_of, sanitized
from fp8scope_trainer.tensor import TensorCodes, quantize_tensor

if TYPE_CHECKING:
    from fp8scope_trainer.linear import Fp8Linear


def codes_of_x(x: Tensor, key: Tensor | None, text: str) -> tuple[Tensor, Tensor]:
    """Codes [K, M] of x.t() for wgrad, and scales: of tiles [M/128, K], of blocks [K/128, M/128]."""
    recipe, scale = recipe_of(text), _delayed_scale(key)
    q = quantize_for_wgrad(sanitized(x, recipe), recipe, scale)
    scales = q.scales.t() if recipe.wgrad_activation == "tile" else q.scales
    if scale is not None:  # else one of a single block is the history's
        return q.codes, scales.clone(memory_format=torch.contiguous_format)
    return q.codes, scales.contiguous()


def tensor_codes(
    x: Tensor, key: Tensor | None, turned: bool, text: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [M, K], codes of x.t() (empty unless `turned`), scale [1, 1], amax [1]."""
    recipe = recipe_of(text)
    q = quantize_tensor(sanitized(x, recipe), E4M3, scale=_delayed_scale(key),
                        power_of_two=recipe.power_of_two, turned=turned)
    return q.codes, q.codes.new_empty(0) if q.turned is None else q.turned, q.scale, q.amax


def weight_codes(weight: Tensor, text: str) -> tuple[Tensor, Tensor]:
    """Codes [N, K], and scales [N/128, K/128] or [1, 1]."""
    recipe = recipe_of(text)
    if recipe.scaling == "block":
        q = quantize_weight(weight, recipe)
        return q.codes, q.scales.contiguous()
    whole = quantize_tensor(weight, E4M3, power_of_two=recipe.power_of_two)
    return whole.codes, whole.scale


def gradient_scale(key: Tensor) -> Tensor:
    """The delayed scale [1, 1] of the gradient that will come."""
    ahead = _layer(key).gradient_history
    assert ahead is not None
    return ahead.scale().clone()


def block_product(
    x: Tensor, weight: Tensor, codes: Tensor | None, scales: Tensor | None, w_codes: Tensor, w_scales: Tensor,
    key: Tensor, counts: bool, text: str,
) -> Tensor:
    """Y [M, N]."""
    recipe = recipe_of(text)
    w, column = Quantized(w_codes, w_scales, block.WEIGHT), _column(codes, scales, recipe)
    with _Forward(key, recipe, "fp8", counts) as forward:
        y, _, sample = block.product(x, weight, forward.call, w, column)
        forward.keep(w_codes if codes is None else codes, sample)
    return y


def block_gradients(
    dy: Tensor, codes: Tensor | None, scales: Tensor | None, w_codes: Tensor, w_scales: Tensor, key: Tensor,
    text: str, for_x: bool, for_weight: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """dX [M, K] and dW [N, K] in `dtype`; empty where not asked for."""
    recipe = recipe_of(text)
    call, sample = _backward(key, recipe, "fp8", w_codes if codes is None else codes)
    w, column = Quantized(w_codes, w_scales, block.WEIGHT), _column(codes, scales, recipe)
    return _both(dy, block.gradients(dy, call, (None, None) if column is None else column[:2], w, sample,
                                     needed=(for_x, for_weight), dtype=dtype))


def tensor_product(
    x: Tensor, weight: Tensor, codes: Tensor, turned: Tensor, scale: Tensor, amax: Tensor, w_codes: Tensor,
    w_scale: Tensor, ahead: Tensor | None, key: Tensor, counts: bool, text: str,
) -> Tensor:
    """Y [M, N]; `ahead` is for the backward pass."""
    q = TensorCodes(codes, turned if turned.numel() else None, scale, amax)
    with _Forward(key, recipe_of(text), "fp8", counts) as forward:
        y, sample = tensorwise.product(x, weight, forward.call, q, TensorCodes(w_codes, None, w_scale, amax))
        forward.keep(turned if turned.numel() else w_codes, sample)
    return y


def tensor_gradients(
    dy: Tensor, turned: Tensor, scale: Tensor, w_codes: Tensor, w_scale: Tensor, ahead: Tensor | None,
    key: Tensor, text: str, for_x: bool, for_weight: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """dX [M, K] and dW [N, K] in `dtype`; empty where not asked for. ahead: the delayed scale of dy."""
    call, sample = _backward(key, recipe_of(text), "fp8", turned if turned.numel() else w_codes)
    call = call._replace(gradient_scale=ahead)
    return _both(dy, tensorwise.gradients(dy, call, (turned, scale), (w_codes, w_scale), sample,
                                          needed=(for_x, for_weight), dtype=dtype))


def rounded_product(x: Tensor, x16: Tensor, weight: Tensor, key: Tensor, counts: bool, text: str) -> Tensor:
    """Y [M, N]; `x16` is x in BF16, for the backward pass."""
    with _Forward(key, recipe_of(text), None, counts) as forward:
        y, sample = rounded.product(x, weight, forward.call)
        forward.keep(x16, sample)
    return y


def rounded_gradients(
    dy: Tensor, x16: Tensor, weight: Tensor, key: Tensor, text: str, for_x: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    """dX [M, K] and dW [N, K] in the weight's dtype; empty where not asked for."""
    call, sample = _backward(key, recipe_of(text), None, x16)
    dx, dw = rounded.gradients(dy, call, x16, weight, sample, needed=(for_x, for_weight))
    return _both(dy, (dx, None if dw is None else dw.to(weight.dtype)))


class _Forward:
    """A forward of the layer of `key`, told to its observer if it `counts`: if there are gradients.

    precision: None is that of now.
    """

    def __init__(self, key: Tensor, recipe: Recipe, precision: Precision | None, counts: bool) -> None:
        self._layer, self._recipe = _layer(key), recipe
        self._precision: Precision = precision or self._layer.precision
        observer = self._layer.observer if counts else None
        self._observer = observer if isinstance(observer, GraphObserver) else None

    def __enter__(self) -> "_Forward":
        if self._observer is not None:
            self._observer.begins()
        self.call = self._layer.call_of(self._recipe, self._precision, differentiable=False)
        return self

    def keep(self, kept: Tensor, sample: WgradSample | None) -> None:
        """For the backward pass that gets `kept`."""
        if self._observer is not None and self.call.watcher is not None:
            self._observer.keep(kept.data_ptr(), sample)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._observer is not None:
            self._observer.ends()


def _backward(
    key: Tensor, recipe: Recipe, precision: Precision | None, kept: Tensor
) -> tuple[Call, WgradSample | None]:
    """The call of a backward pass, and what its forward kept."""
    layer = _layer(key)
    call = layer.call_of(recipe, precision or layer.precision, differentiable=True)
    sample = call.watcher.kept(kept.data_ptr()) if isinstance(call.watcher, GraphObserver) else None
    return call, sample


def _layer(key: Tensor) -> "Fp8Linear":
    layer: Fp8Linear = Key.owners[key.data_ptr()]
    return layer


def _delayed_scale(key: Tensor | None) -> Tensor | None:
    history = None if key is None else _layer(key).history
    return None if history is None else history.scale()


def _column(codes: Tensor | None, scales: Tensor | None, recipe: Recipe) -> Quantized | None:
    """x.t(), of what `codes_of_x` made of it."""
    if codes is None or scales is None:
        return None
    tiles = recipe.wgrad_activation == "tile"
    return Quantized(codes, scales.t() if tiles else scales, recipe.wgrad_scaling)


def _both(dy: Tensor, found: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor]:
    dx, dw = (dy.new_empty(0) if one is None else one for one in found)
    return dx, dw
