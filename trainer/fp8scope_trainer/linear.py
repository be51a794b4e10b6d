"""A linear layer that computes in FP8 and can change its precision in a live run.

    fp8     fprop, dgrad and wgrad of quantized operands (block.py, tensorwise.py)
    bf16    operands rounded to BF16, from the tensors before quantization (rounded.py)
    shadow  computes as bf16; the observer still gets the scales that FP8 would use, and histories go on

A call captures its precision, recipe and scale in forward and keeps them in backward, whatever is set in
between. A forward that runs inside a backward pass is a recomputation: it takes the precision of the last
forward outside of one. A backward pass that is split (zero-bubble schedules) comes here twice with one and
the same tensor, for the gradients of inputs and later for those of weights; the observer hears of it once.

Rejected: saving the high-precision input (an FP8 layer would then save no memory at all); keeping a
transposed weight; reading `precision` in backward.
"""

import weakref
from typing import Any, Protocol, Self, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from fp8scope.compiled import Key
from fp8scope.observer import LinearObserver, Told
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, TILE
from fp8scope_trainer import block, gemm, rounded, tensorwise, traced
from fp8scope_trainer.call import Call, watching
from fp8scope_trainer.history import AmaxHistory
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.shared import Offer, SharedCodes

_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
          "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
          "_is_full_backward_hook")
"""Where torch keeps the hooks of a module."""


DTYPES = (torch.bfloat16, torch.float32, torch.float16)
"""Of inputs and weights. Scales and sums are fp32: fp64 would lose what it is for."""
_ACCEPTED = f"must be one of {', '.join(str(one) for one in DTYPES)}"


class Fp8Linear(nn.Linear):
    """`nn.Linear` with FP8 GEMMs: same parameters, same `state_dict` keys.

    Any number of tokens; both feature sizes multiples of 128. `observer` is set by a probe.
    """

    observer: LinearObserver | None
    shared: SharedCodes | None
    """Of layers that may be given the same input; `convert` sets it."""
    history: AmaxHistory | None
    """Of the activation, under delayed scaling."""
    gradient_history: AmaxHistory | None
    """Of the gradient of the output, under delayed tensorwise scaling."""
    key: Tensor
    """Stands for the layer in compiled graphs."""
    in_fp8: bool
    """Whether `precision` is fp8: all that graphs depend on."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe: Recipe | None = None,
        precision: Precision = "fp8", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if self.weight.dtype not in DTYPES:
            raise Invalid("dtype", self.weight.dtype, _ACCEPTED)
        if reason := unsuitable(in_features, out_features):
            raise Invalid("in_features, out_features", (in_features, out_features), reason)
        self.recipe = recipe or Recipe()
        self.observer = None
        self.shared = None
        self.key = _key_of(self)
        self._make_histories(device)
        self.set_precision(precision)
        self._running = self.precision

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, recipe: Recipe, precision: Precision = "fp8") -> Self:
        """An FP8 layer that owns the very parameters and hooks of `linear`."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, recipe=recipe,
                    precision=precision, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        for key in _HOOKS:  # the very dicts, so that handles still remove theirs
            layer.__dict__[key] = linear.__dict__[key]
        layer._make_histories(linear.weight.device)
        return layer.train(linear.training)

    def operands(self) -> dict[tuple[str, str], Told]:
        """What the observer is told of in FP8 and in shadow."""
        withheld = self.withheld()
        return {key: told for key, told in self.recipe.operands().items() if key[0] not in withheld}

    def withheld(self) -> dict[str, str]:
        """What the observer is not told of in FP8, by role, and why."""
        shard = getattr(self.weight, "_local_tensor", self.weight)  # to_local() would make it a plain tensor
        if not hasattr(shard, "gathers_fp8"):  # see fp8_gather
            return {}
        return {"weight": "it is gathered as FP8 codes, and nothing else of it is there; nor is gemm_error "
                          "of its layer"}

    @property
    def precision_reason(self) -> str:
        """Why FP8 runs in another way than asked; empty where it does not."""
        kind = self.weight.device.type
        if self.precision != "fp8" or gemm.runs_natively(self.weight.device, self.recipe.scaling):
            return ""
        return ("requested fp8, running fp32 products of FP8 codes: "
                f"no {self.recipe.scaling} FP8 GEMM on this {kind}")

    def set_precision(self, precision: Precision) -> None:
        """Takes effect with the next forward. Call at a step boundary, on all ranks alike."""
        if precision not in get_args(Precision):
            raise Invalid("precision", precision, f"must be one of {', '.join(get_args(Precision))}")
        self.precision: Precision = precision
        self.in_fp8 = precision == "fp8"

    def forward(self, input: Tensor) -> Tensor:
        shape, weight, bias = input.shape, self.weight, self.bias  # each look at a module is a microsecond
        if shape[-1:] != (self.in_features,) or input.dtype not in DTYPES:
            raise self._misfit(input)
        if input.numel() == 0:
            return nn.functional.linear(input, weight, bias)
        kind, x = input.device.type, input
        if torch.is_autocast_enabled(kind):
            x = input.to(torch.get_autocast_dtype(kind))
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        if weight.dtype not in DTYPES:
            raise Invalid("weight.dtype", weight.dtype, _ACCEPTED)
        if not torch.compiler.is_compiling():
            y = self._product(input, x, weight)
        elif type(weight) in (Tensor, nn.Parameter):
            y = traced.product(self, x.reshape(-1, self.in_features), weight)
        else:  # gathered as codes, which a compiler cannot see into
            y = _outside_of_graphs(self, input, x, weight)
        if len(shape) != 2:
            y = y.view(*shape[:-1], self.out_features)
        return y if bias is None else y + bias.to(y.dtype)

    def extra_repr(self) -> str:
        return (f"{super().extra_repr()}, precision={self.precision}, "
                f"scaling={self.recipe.scaling}, policy={self.recipe.policy}")

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled layer is unobserved: the observer belongs to the attached model."""
        return self.__dict__ | {"observer": None, "key": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.key = _key_of(self)

    def _make_histories(self, device: torch.device | str | None) -> None:
        recipe = self.recipe
        delayed = {"history": recipe.policy, "gradient_history": recipe.gradient_policy}
        elements = {"history": E4M3, "gradient_history": recipe.gradient_element}
        for name, policy in delayed.items():
            setattr(self, name, AmaxHistory(
                recipe.history_length, margin=recipe.margin, element=elements[name], device=device,
            ) if policy == "delayed" else None)

    def _product(self, input: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Y [M, N] of x [..., K], which is the input or its copy in another dtype."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise Invalid("Fp8Linear", "a transform of torch.func",
                          "has no FP8 product; call the layer outside of it, or keep it a Linear")
        call, offer = self._call(torch.is_grad_enabled() and weight.requires_grad), None
        if self.shared is not None and call.shareable and not input.is_inference():
            offer = self.shared.offer(input, self.recipe, x.dtype)
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        y: Tensor = _Product.apply(rows, weight, call, offer)  # type: ignore[no-untyped-call]
        return y

    def _misfit(self, input: Tensor) -> Invalid:
        """What is wrong with an input."""
        if input.shape[-1:] != (self.in_features,):
            return Invalid("input.shape", tuple(input.shape), f"must end in {self.in_features}, in_features")
        return Invalid("input.dtype", input.dtype, _ACCEPTED)

    def _call(self, differentiable: bool) -> Call:
        if self._running != self.precision and torch._C._current_graph_task_id() == -1:
            self._running = self.precision  # outside of a backward pass
        return self.call_of(self.recipe, self._running, differentiable=differentiable)

    def call_of(self, recipe: Recipe, precision: Precision, *, differentiable: bool) -> Call:
        """What a forward that begins now follows; in compiled code a backward pass, too."""
        observer, history = self.observer, self.history
        watcher = None if observer is None else watching(observer, precision)
        if history is None or precision == "bf16":
            return Call(precision, recipe, observer, watcher, None, None, None, None, differentiable)
        ahead, training = self.gradient_history, self.training
        return Call(precision, recipe, observer, watcher, history.scale(),
                    None if ahead is None else ahead.scale(), history if training else None,
                    ahead if training else None, differentiable)


def unsuitable(in_features: int, out_features: int) -> str:
    """Why a layer of this size cannot run in FP8; empty if it can."""
    odd = [f"{name} {size}" for name, size in (("in_features", in_features), ("out_features", out_features))
           if size % TILE or not size]
    return f"{' and '.join(odd)}: not a multiple of {TILE}" if odd else ""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_of_graphs(layer: Fp8Linear, input: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return layer._product(input, x, weight)


def _key_of(layer: Fp8Linear) -> Tensor:
    """On the CPU, wherever the layer is and goes: only its address is read, so it is never a fake one."""
    with _disable_current_modes():
        return Key(layer, torch.device("cpu")).tensor


class _Product(torch.autograd.Function):
    """Y [M, N] = X [M, K] W^T, W [N, K], in the precision and recipe of its call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call, offer: Offer | None) -> Tensor:
        ctx.call, ctx.weight_dtype, ctx.told = call, weight.dtype, _nothing
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):  # it must not round emulated operands
                return _product_of(call).forward(ctx, x, weight, call, offer)
        return _product_of(call).forward(ctx, x, weight, call, offer)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise Invalid("create_graph", True, "Fp8Linear has no second derivative; accepted: False")
        call: Call = ctx.call
        if call.observer is not None:
            call, ctx.told = call.in_backward(heard=ctx.told() is dy), weakref.ref(dy)
        if torch.is_autocast_enabled(dy.device.type):
            with torch.autocast(dy.device.type, enabled=False):
                dx, dw = _product_of(call).backward(ctx, dy, call)
        else:
            dx, dw = _product_of(call).backward(ctx, dy, call)
        return dx, dw if dw is None or dw.dtype == ctx.weight_dtype else dw.to(ctx.weight_dtype), None, None


class _Computation(Protocol):
    """A module that computes products."""

    def forward(self, ctx: Any, x: Tensor, weight: Tensor, call: Call, offer: Offer | None) -> Tensor:
        """Y."""

    def backward(self, ctx: Any, dy: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
        """dX and dW."""


def _product_of(call: Call) -> _Computation:
    """The module that computes it."""
    if call.precision != "fp8":
        return rounded
    return block if call.recipe.scaling == "block" else tensorwise


def _nothing() -> None:
    """The gradient before the first one."""
