"""SwiGLU forward and backward at the speed of a copy: the twin of `swiglu.plain`.

A program takes a run of numbers of y; as a run of gate and one of up lie side by side, the place of gate is
known from the place in y. H200, [16384, 5376] in bf16, share of the bandwidth of a copy: see docs/log.md.
"""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from fp8scope.launch_kernel import Launcher

_SPAN = 2048


@triton.jit
def _places(elements: tl.tensor, RUN: tl.constexpr, SPAN: tl.constexpr
            ) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of y and of gate, and whether they are there."""
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    return at, at + at // RUN * RUN, at < elements


@triton.jit
def _forward_kernel(x_ptr: tl.tensor, y_ptr: tl.tensor, elements: tl.tensor, RUN: tl.constexpr,
                    SPAN: tl.constexpr) -> None:
    """y of `elements`."""
    at, place, there = _places(elements, RUN, SPAN)
    g = tl.load(x_ptr + place, mask=there, other=0.0).to(tl.float32)
    u = tl.load(x_ptr + place + RUN, mask=there, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, g * tl.sigmoid(g) * u, mask=there)


@triton.jit
def _gradient_kernel(dy_ptr: tl.tensor, x_ptr: tl.tensor, dx_ptr: tl.tensor, elements: tl.tensor,
                     RUN: tl.constexpr, SPAN: tl.constexpr) -> None:
    """dx of twice as many."""
    at, place, there = _places(elements, RUN, SPAN)
    dy = tl.load(dy_ptr + at, mask=there, other=0.0).to(tl.float32)
    g = tl.load(x_ptr + place, mask=there, other=0.0).to(tl.float32)
    u = tl.load(x_ptr + place + RUN, mask=there, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dx_ptr + place, dy * u * (s * (1.0 + g * (1.0 - s))), mask=there)
    tl.store(dx_ptr + place + RUN, dy * (g * s), mask=there)


def forward(x: Tensor, run: int) -> Tensor:
    """x [..., 2 H], contiguous -> [..., H]."""
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if y.numel():
        _launcher("forward")(-(-y.numel() // _SPAN), x, y, y.numel(), constants={"RUN": run, "SPAN": _SPAN},
                             num_warps=8)
    return y


def gradient(dy: Tensor, x: Tensor, run: int) -> Tensor:
    """dx [..., 2 H] of dy [..., H] and x, all contiguous."""
    dx = x.new_empty(x.shape)
    if dy.numel():
        _launcher("gradient")(-(-dy.numel() // _SPAN), dy, x, dx, dy.numel(),
                              constants={"RUN": run, "SPAN": _SPAN}, num_warps=8)
    return dx


@cache
def _launcher(name: str) -> Launcher:
    return Launcher(_forward_kernel if name == "forward" else _gradient_kernel)
