"""Layers inside `torch.compile`: what a hook is turned into when it is traced.

Dynamo runs a hook once, while it traces, so a hook that measured would measure nothing afterwards. Traced
hooks put three opaque operations into the graph instead; their bodies run in every step and look at the
cadence there, so that a change of cadence compiles nothing again:

    fp8scope::forward_begins(key)             the model's forward begins
    fp8scope::operands(x, weight, key)        a layer was called -> token
    fp8scope::gradient(dy, token, key)        in the backward pass of its output -> nothing of interest

Who is meant. `key` is a tensor of one element, and its address stands for the hook. A number would be a
constant of the graph: blocks that are compiled one by one and share their graph would no longer share it.
`token` is a new tensor of one element; it is saved for the backward pass, and its address says which call a
gradient belongs to.

Why they stay. A compiler removes what has no result, and may compute again what is cheap. So the results
are used: the token by the gradient, and what `gradient` returns becomes the gradient of `anchor`, one tensor
for the whole scope, which nobody reads. Then every call is run once, wherever checkpointing puts it.
`forward_begins` has no result and is registered as effectful. Rejected, for layers: mutated arguments
(graphs that share them fail: each saves them for its backward pass, and the next one changes them) and
effectful operations (inside of checkpointing they do not compile in torch 2.13).

Nothing is copied: the operations take any layout. The output of a layer becomes its clone, whose backward
pass is `fp8scope::gradient`, and Inductor takes clones out of its graphs; a view could not be changed in
place any more. Where a version of torch has no effectful operations, nothing is traced, and compiled layers
are listed as not observed. So are, in a compiled region, layers without a gradient and those of a subclass of
Tensor, such as DTensor.
"""

from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.library import Library, register_fake
from torch.utils._pytree import tree_leaves, tree_map

try:
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
except ImportError:
    _EffectType = _register_effectful_op = None  # type: ignore[assignment]


class Layer(Protocol):
    """What a layer's operations tell; nothing of it may raise."""

    def operands(self, x: Tensor, weight: Tensor, call: int) -> None:
        """x [..., K] and weight [N, K] are multiplied; `call` is the same in `gradient`."""

    def gradient(self, dy: Tensor, call: int) -> None:
        """dy [..., N], of the output of that call."""


class Root(Protocol):
    """What the model's operation tells."""

    def forward_begins(self) -> None:
        """Outside of a backward pass."""


class Key:
    """Stands for one hook, or layer, in compiled graphs, as long as that lives."""

    owners: ClassVar["WeakValueDictionary[int, Any]"] = WeakValueDictionary()

    def __init__(self, owner: object, device: torch.device) -> None:
        self.tensor = torch.zeros(1, device=device)
        self.owners[self.tensor.data_ptr()] = owner


def trace_begin(key: Tensor) -> None:
    """Called by a traced pre-hook of the model."""
    if LIBRARY is not None:
        torch.ops.fp8scope.forward_begins(key)


def trace_call(key: Tensor, anchor: Tensor, weight: Tensor | None, inputs: Any, output: Any) -> Any:
    """Called by a traced forward hook. Returns the output to go on with; None: as it is."""
    if LIBRARY is None or type(weight) not in (Tensor, nn.Parameter) or weight is None:
        return None  # a DTensor, say, has its own idea of operations it does not know
    token = None
    for x in tree_leaves(inputs):
        if type(x) is Tensor and x.is_floating_point() and x.shape[-1:] == weight.shape[-1:]:
            token = torch.ops.fp8scope.operands(x.detach(), weight.detach(), key)

    def tap(y: Any) -> Any:
        wanted = type(y) is Tensor and y.requires_grad
        return _Tap.apply(y, anchor, token, key) if wanted else y  # type: ignore[no-untyped-call]

    return None if token is None else tree_map(tap, output)


class _Tap(torch.autograd.Function):
    """y -> y, and its gradient to `fp8scope::gradient`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, token: Tensor, key: Tensor) -> Tensor:
        ctx.save_for_backward(token, key)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return dy, torch.ops.fp8scope.gradient(dy, *ctx.saved_tensors), None, None


def _forward_begins(key: Tensor) -> None:
    root: Root | None = Key.owners.get(key.data_ptr())
    if root is not None and torch._C._current_graph_task_id() == -1:
        root.forward_begins()


def _operands(x: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    token = x.new_empty(1)
    layer: Layer | None = Key.owners.get(key.data_ptr())
    if layer is not None:
        layer.operands(x, weight, token.data_ptr())
    return token


def _gradient(dy: Tensor, token: Tensor, key: Tensor) -> Tensor:
    layer: Layer | None = Key.owners.get(key.data_ptr())
    if layer is not None:
        layer.gradient(dy, token.data_ptr())
    return key.new_zeros(1)


def _define() -> Library:
    """Registers the operations: their bodies, for every device, and what tracing needs to know."""
    library = Library("fp8scope", "DEF")  # type: ignore[no-untyped-call]
    # Any layout will do; and no body may become part of a CUDA graph, which would run it no more.
    names = ("flexible_layout", "cudagraph_unsafe")
    tags = [getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name)]
    for signature, body, shape_of in (
        ("forward_begins(Tensor key) -> ()", _forward_begins, lambda *_: None),
        ("operands(Tensor x, Tensor weight, Tensor key) -> Tensor", _operands, lambda x, *_: x.new_empty(1)),
        ("gradient(Tensor dy, Tensor token, Tensor key) -> Tensor", _gradient,
         lambda dy, token, key: key.new_empty(1)),
    ):
        name = signature.partition("(")[0]
        library.define(signature, tags=tags)  # type: ignore[no-untyped-call]
        library.impl(name, body, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        register_fake(f"fp8scope::{name}", shape_of, lib=library)
    _register_effectful_op(torch.ops.fp8scope.forward_begins.default, _EffectType.ORDERED)
    return library


LIBRARY = None if _register_effectful_op is None else _define()
