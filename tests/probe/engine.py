"""Stand-ins for TransformerEngine's layers: it needs CUDA to be imported, so it cannot run in these tests.

They have the names and attributes that its sources of 2.20 show, cast as its recipes do, and move delayed
scales when it does: those of the forward pass as its autocast ends, those of the backward pass behind it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope.quantize import dequantize, quantize
from fp8scope_protocol.formats import E4M3, E5M2, MXFP8


class DType(IntEnum):
    """Its numbers of types."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


TORCH = {DType.kFloat8E4M3: (torch.float8_e4m3fn, E4M3), DType.kFloat8E5M2: (torch.float8_e5m2, E5M2)}


class Float8Quantizer:
    """Delayed: multiplies by `scale`; `amax` is what it has seen."""

    def __init__(self, scale: Tensor, amax: Tensor, dtype: DType) -> None:
        self.scale, self.amax, self.dtype = scale, amax, dtype

    def __call__(self, x: Tensor) -> Tensor:
        kind, element = TORCH[self.dtype]
        self.amax.copy_(x.abs().max())
        return (x * self.scale).clamp(-element.largest, element.largest).to(kind).float() / self.scale


class Float8CurrentScalingQuantizer:
    def __init__(self, dtype: DType) -> None:
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = dtype, False, 0.0
        self.with_amax_reduction = False

    def __call__(self, x: Tensor) -> Tensor:
        return dequantize(quantize(x, TORCH[self.dtype][1], "tensorwise"))


class Float8BlockQuantizer:
    def __init__(self, dtype: DType, dimensions: int) -> None:
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = dtype, True, 0.0
        self.block_scaling_dim = dimensions

    def __call__(self, x: Tensor) -> Tensor:
        scaling = "tile 1x128" if self.block_scaling_dim == 1 else "block 128x128"
        return dequantize(quantize(x, TORCH[self.dtype][1], scaling, power_of_two=True))


class MXFP8Quantizer:
    def __init__(self, dtype: DType) -> None:
        self.dtype, self.with_2d_quantization = dtype, False

    def __call__(self, x: Tensor) -> Tensor:
        return dequantize(quantize(x, MXFP8, "mx 1x32 rceil"))


class NVFP4Quantizer:
    dtype = None


class Recipe:
    """Makes quantizers; delayed ones share a tensor of scales, as theirs do."""

    def __init__(self, kind: str, override: str | None = None) -> None:
        self.kind, self.backward_override = kind, override
        self.scales: list[tuple[Tensor, Tensor, float]] = []

    def quantizers(self, number: int, *, forward: bool) -> list[Any]:
        e4m3 = DType.kFloat8E4M3
        if self.kind == "delayed":
            scale, amax = torch.ones(number), torch.zeros(number)
            dtype = e4m3 if forward else DType.kFloat8E5M2
            self.scales.append((scale, amax, TORCH[dtype][1].largest))
            return [Float8Quantizer(scale[i], amax[i], dtype) for i in range(number)]
        if self.kind == "current":
            return [Float8CurrentScalingQuantizer(e4m3 if forward else DType.kFloat8E5M2)
                    for _ in range(number)]
        if self.kind == "block":
            return [Float8BlockQuantizer(e4m3, 2 if forward and i % 3 == 1 else 1) for i in range(number)]
        return [MXFP8Quantizer(e4m3) for _ in range(number)]

    def update(self, *, forward: bool) -> None:
        for scale, amax, largest in self.scales[0 if forward else 1::2]:
            scale.copy_(torch.where(amax > 0, largest / amax, scale))


ACTIVE: list[Recipe] = []


@contextmanager
def autocast(recipe: Recipe) -> Iterator[None]:
    """FP8 within; delayed scales follow as it ends."""
    ACTIVE.append(recipe)
    yield
    ACTIVE.clear()
    recipe.update(forward=True)


class Gemm(torch.autograd.Function):
    """x [M, K] w.t(), all operands through their quantizers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, owner: "Base", gemm: int) -> Tensor:
        fwd = owner.quantizers["scaling_fwd"][3 * gemm:] if owner.fp8 else None
        ctx.owner, ctx.gemm = owner, gemm
        x, w = (x, w) if fwd is None else (fwd[0](x), fwd[1](w))
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, w = ctx.saved_tensors
        if ctx.owner.fp8:
            dy = ctx.owner.quantizers["scaling_bwd"][2 * ctx.gemm](dy)
        return dy @ w, dy.t() @ x, None, None


class Base(nn.Module):
    """What their layers have in common."""

    def __init__(self, gemms: int) -> None:
        super().__init__()
        self.gemms, self.fp8 = gemms, False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}

    def prepare(self) -> None:
        """Only a forward tells a layer whether it runs in FP8, and makes its quantizers."""
        self.fp8 = bool(ACTIVE)
        if self.fp8 and self.fp8_meta.get("recipe") is not ACTIVE[-1]:
            self.fp8_meta["recipe"] = ACTIVE[-1]
            self.quantizers = {"scaling_fwd": ACTIVE[-1].quantizers(3 * self.gemms, forward=True),
                               "scaling_bwd": ACTIVE[-1].quantizers(2 * self.gemms, forward=False)}

    def product(self, x: Tensor, w: Tensor, gemm: int = 0) -> Tensor:
        y: Tensor = Gemm.apply(x, w, self, gemm)  # type: ignore[no-untyped-call]
        return y


class Linear(Base):
    def __init__(self, columns: int, rows: int, *, parts: int = 0) -> None:
        super().__init__(1)
        if parts:
            for i in range(parts):
                self.register_parameter(f"part{i}_weight", nn.Parameter(torch.randn(rows // parts, columns)))
        else:
            self.weight = nn.Parameter(torch.randn(rows, columns))
        self.bias = nn.Parameter(torch.zeros(rows))
        self.parts = parts

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        self.prepare()
        weight = torch.cat([getattr(self, f"part{i}_weight") for i in range(self.parts)]) if self.parts \
            else self.weight
        return self.product(inp, weight), self.bias


class LayerNormLinear(Base):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(1)
        self.layer_norm_weight = nn.Parameter(torch.ones(columns))
        self.weight = nn.Parameter(torch.randn(rows, columns))

    def forward(self, inp: Tensor) -> Any:
        self.prepare()
        normed = functional.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight)
        return self.product(normed, self.weight), normed


class LayerNormMLP(Base):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(2)
        self.layer_norm_weight = nn.Parameter(torch.ones(columns))
        self.fc1_weight = nn.Parameter(torch.randn(rows, columns))
        self.fc2_weight = nn.Parameter(torch.randn(columns, rows))

    def forward(self, inp: Tensor) -> Tensor:
        self.prepare()
        normed = functional.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight)
        hidden = functional.gelu(self.product(normed, self.fc1_weight))
        return self.product(hidden, self.fc2_weight, 1)


class GroupedLinear(Base):
    def __init__(self, gemms: int, columns: int, rows: int) -> None:
        super().__init__(gemms)
        for i in range(gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.randn(rows, columns) * 10.0**i))

    def forward(self, inp: Tensor, m_splits: Any) -> Tensor:
        self.prepare()
        known = isinstance(m_splits, list) or m_splits.device.type == "cpu"
        rows = [int(one) for one in m_splits] if known else [len(inp)]
        return torch.cat([self.product(x, getattr(self, f"weight{i}"), i)
                          for i, x in enumerate(inp.split_with_sizes(rows))])


class Float8Tensor(Tensor):
    """A weight that is stored as codes; operations see what they mean."""

    _data: Tensor
    _scale_inv: Tensor

    @staticmethod
    def __new__(cls: Any, data: Tensor, scale_inv: Tensor) -> "Float8Tensor":
        made: Float8Tensor = Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made._data, made._scale_inv = data, scale_inv
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale_inv)
        plain = [one._data.float() * one._scale_inv if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))
