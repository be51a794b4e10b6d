"""Products inside `torch.compile`: opaque operations whose bodies are the eager code (bodies.py).

    codes_of_x(x, key?)        what wgrad keeps of x in the block recipe
    tensor_codes(x, key?)      codes of x and x.t() in the tensorwise recipe
    weight_codes(weight)       codes of the weight
    block, tensorwise, rounded Y of those, or of operands rounded to BF16; ..._gradients: dX and dW

An operation that quantizes is a function of its inputs: of equal ones a compiler keeps one, so layers of one
input share its codes as they do outside of a graph (shared.py). Under delayed scaling, where the scale is the
layer's own, it takes the layer's key as well. Compilers compute none of them twice unless checkpointing asks
for it, so what a graph keeps for its backward pass are codes.

Whom they mean. `key` is a tensor, and its address stands for the layer (compiled.py has the reasons). By it
bodies find the observer and the histories of now, which are no part of the graph. The recipe is a text.
What a graph holds for good is whether its layer computes in FP8: a switch compiles it once more, and the way
back finds the first graph again.

Rejected: handing the histories in as mutated arguments (a graph would copy them, and for its backward pass
keep them); one operation for a whole layer (inputs would not be shared); a mutable state for each call in
place of saved tensors (checkpointing would not know of it).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from fp8scope_protocol.formats import TILE
from fp8scope_trainer import bodies
from fp8scope_trainer.recipe import recipe_of

if TYPE_CHECKING:
    from fp8scope_trainer.linear import Fp8Linear

CODES = torch.float8_e4m3fn


def product(layer: "Fp8Linear", x: Tensor, weight: Tensor) -> Tensor:
    """Y [M, N] of x [M, K] and weight [N, K], as `layer` computes it; to be traced."""
    operations, key, text = torch.ops.fp8scope_trainer, layer.key, layer.recipe.text
    graded = torch.is_grad_enabled()
    if not layer.in_fp8:
        y: Tensor = operations.rounded(x, x.detach().bfloat16(), weight, key, graded, text)
        return y
    delayed = layer.recipe.policy == "delayed"
    own = key if delayed else None
    kept = graded and weight.requires_grad
    w_codes, w_scales = operations.weight_codes(weight.detach(), text)
    if layer.recipe.scaling == "block":
        codes, scales = operations.codes_of_x(x.detach(), own, text) if kept else (None, None)
        y = operations.block(x, weight, codes, scales, w_codes, w_scales, key, graded, text)
        return y
    q = operations.tensor_codes(x.detach(), own, kept, text)
    ahead = operations.gradient_scale(key) if kept and delayed else None
    y = operations.tensorwise(x, weight, *q, w_codes, w_scales, ahead, key, graded, text)
    return y


def _tiles(size: Any) -> Any:
    return (size + TILE - 1) // TILE


def _fake_codes_of_x(x: Tensor, key: Tensor | None, text: str) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    rows = (_tiles(tokens), width) if recipe_of(text).wgrad_activation == "tile" else (
        _tiles(width), _tiles(tokens))
    return x.new_empty((width, tokens), dtype=CODES), x.new_empty(rows, dtype=torch.float32)


def _fake_tensor_codes(x: Tensor, key: Tensor | None, turned: bool, text: str) -> tuple[Tensor, ...]:
    codes = x.new_empty(x.shape, dtype=CODES)
    other = codes.new_empty((x.shape[1], x.shape[0]) if turned else (0,))
    return codes, other, x.new_empty((1, 1), dtype=torch.float32), x.new_empty(1, dtype=torch.float32)


def _fake_weight_codes(weight: Tensor, text: str) -> tuple[Tensor, Tensor]:
    blocks = recipe_of(text).scaling == "block"
    scales = (_tiles(weight.shape[0]), _tiles(weight.shape[1])) if blocks else (1, 1)
    return weight.new_empty(weight.shape, dtype=CODES), weight.new_empty(scales, dtype=torch.float32)


def _fake_product(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _fake_gradients(
    dy: Tensor, weight: Tensor, for_x: bool, for_weight: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    dx = dy.new_empty((dy.shape[0], weight.shape[1]) if for_x else (0,))
    return dx, dy.new_empty(weight.shape, dtype=dtype) if for_weight else dy.new_empty(0)


def _save_block(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, *kept, _, ctx.text = inputs
    ctx.save_for_backward(*kept)
    ctx.dtype = weight.dtype


def _block_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.fp8scope_trainer.block_gradients(
        dy, *ctx.saved_tensors, ctx.text, *ctx.needs_input_grad[:2], ctx.dtype)
    return *_needed(ctx, found), *7 * [None]


def _save_tensorwise(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, _, turned, scale, _, *kept, _, ctx.text = inputs
    ctx.save_for_backward(turned, scale, *kept)
    ctx.dtype = weight.dtype


def _tensorwise_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.fp8scope_trainer.tensorwise_gradients(
        dy, *ctx.saved_tensors, ctx.text, *ctx.needs_input_grad[:2], ctx.dtype)
    return *_needed(ctx, found), *10 * [None]


def _save_rounded(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *kept, _, ctx.text = inputs
    ctx.save_for_backward(*kept)


def _rounded_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    dx, dw = torch.ops.fp8scope_trainer.rounded_gradients(dy, *ctx.saved_tensors, ctx.text, *needed)
    return dx if needed[0] else None, None, dw if needed[1] else None, None, None, None


def _needed(ctx: Any, found: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    return tuple(one if needed else None for one, needed in zip(found, ctx.needs_input_grad[:2], strict=True))


_W = "Tensor w_codes, Tensor w_scales"
_CALL = "Tensor key, bool counts, str text"
_ASKED = "Tensor key, str text, bool for_x, bool for_weight"
_OPERATIONS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("codes_of_x(Tensor x, Tensor? key, str text) -> (Tensor, Tensor)", bodies.codes_of_x, _fake_codes_of_x),
    ("tensor_codes(Tensor x, Tensor? key, bool turned, str text) -> (Tensor, Tensor, Tensor, Tensor)",
     bodies.tensor_codes, _fake_tensor_codes),
    ("weight_codes(Tensor weight, str text) -> (Tensor, Tensor)", bodies.weight_codes, _fake_weight_codes),
    ("gradient_scale(Tensor key) -> Tensor", bodies.gradient_scale, lambda key: key.new_empty((1, 1))),
    (f"block(Tensor x, Tensor weight, Tensor? codes, Tensor? scales, {_W}, {_CALL}) -> Tensor",
     bodies.block_product, _fake_product),
    (f"block_gradients(Tensor dy, Tensor? codes, Tensor? scales, {_W}, {_ASKED}, ScalarType dtype)"
     " -> (Tensor, Tensor)", bodies.block_gradients,
     lambda dy, codes, scales, w, ws, key, text, *asked: _fake_gradients(dy, w, *asked)),
    (f"tensorwise(Tensor x, Tensor weight, Tensor codes, Tensor turned, Tensor scale, Tensor amax, {_W}, "
     f"Tensor? ahead, {_CALL}) -> Tensor", bodies.tensor_product, _fake_product),
    (f"tensorwise_gradients(Tensor dy, Tensor turned, Tensor scale, {_W}, Tensor? ahead, {_ASKED}, "
     "ScalarType dtype) -> (Tensor, Tensor)", bodies.tensor_gradients,
     lambda dy, turned, scale, w, ws, ahead, key, text, *asked: _fake_gradients(dy, w, *asked)),
    (f"rounded(Tensor x, Tensor x16, Tensor weight, {_CALL}) -> Tensor", bodies.rounded_product,
     lambda x, x16, weight, *_: _fake_product(x, weight)),
    (f"rounded_gradients(Tensor dy, Tensor x16, Tensor weight, {_ASKED}) -> (Tensor, Tensor)",
     bodies.rounded_gradients,
     lambda dy, x16, w, key, text, for_x, for_weight: _fake_gradients(dy, w, for_x, for_weight, w.dtype)),
)
"""Signature, body, and what tracing is told of the results."""


def _define() -> Library:
    library = Library("fp8scope_trainer", "DEF")  # type: ignore[no-untyped-call]
    # Any layout will do; and no body may become part of a CUDA graph, which would run it no more.
    names = ("flexible_layout", "cudagraph_unsafe")
    tags = [getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name)]
    for signature, body, fake in _OPERATIONS:
        name = signature.partition("(")[0]
        library.define(signature, tags=tags)  # type: ignore[no-untyped-call]
        library.impl(name, body, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        register_fake(f"fp8scope_trainer::{name}", fake, lib=library)
    for name, backward, save in (("block", _block_backward, _save_block),
                                 ("tensorwise", _tensorwise_backward, _save_tensorwise),
                                 ("rounded", _rounded_backward, _save_rounded)):
        register_autograd(f"fp8scope_trainer::{name}", backward, setup_context=save, lib=library)
    return library


LIBRARY = _define()
