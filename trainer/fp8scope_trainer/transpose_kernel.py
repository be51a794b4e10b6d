"""Transposes a matrix of bytes at the speed of a copy.

A program has a tile of [128, 128] bytes. Rows 4 r + j are loaded as four tensors of words, j = 0..3, so a
thread holds 4 x 4 bytes, which eight byte permutations transpose in registers; words are then exchanged
between threads and leave in whole lines of 128 bytes. H200, share of the bandwidth of a copy: 92 % at
8192 x 8192 and 14336 x 4096, 98 % at 4096 x 4096, where `t().contiguous()` moves bytes one by one: 9 %.

Rejected, at 8192 x 8192: tiles of [128, 64] (87 %), [64, 64] (85 %); [256, 128] with eight warps is as good.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.launch_kernel import BoundLauncher, Launcher

_EDGE = 128


@triton.jit
def _turned(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor,
            ASM: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Four words, rows of a 4 x 4 matrix of bytes, as its columns; the lowest byte comes first."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 p, q, u, v;
            prmt.b32 p, $4, $5, 0x5140;
            prmt.b32 q, $6, $7, 0x5140;
            prmt.b32 u, $4, $5, 0x7362;
            prmt.b32 v, $6, $7, 0x7362;
            prmt.b32 $0, p, q, 0x5410;
            prmt.b32 $1, p, q, 0x7632;
            prmt.b32 $2, u, v, 0x5410;
            prmt.b32 $3, u, v, 0x7632;
            }
            """, "=&r,=&r,=&r,=&r,r,r,r,r", [a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        a, b, c, d = (_column(a, b, c, d, 0), _column(a, b, c, d, 8), _column(a, b, c, d, 16),
                      _column(a, b, c, d, 24))
    return a, b, c, d


@triton.jit
def _column(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    low = ((a >> SHIFT) & 0xFF) | (((b >> SHIFT) & 0xFF) << 8)
    return low | (((c >> SHIFT) & 0xFF) << 16) | (((d >> SHIFT) & 0xFF) << 24)


@triton.jit
def _transpose_kernel(x_ptr: tl.tensor, y_ptr: tl.tensor, R4: tl.tensor, C4: tl.tensor, EDGE: tl.constexpr,
                      ASM: tl.constexpr) -> None:
    """x [4 R4, 4 C4] bytes, y its transpose."""
    tiles = C4 // (EDGE // 4)
    i, j = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles).to(tl.int64)
    four = tl.arange(0, EDGE // 4)
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + (i * EDGE + 4 * four)[:, None] * C4
    x_ptr += (j * (EDGE // 4) + four)[None, :]
    a, b = tl.load(x_ptr), tl.load(x_ptr + C4)
    c, d = tl.load(x_ptr + 2 * C4), tl.load(x_ptr + 3 * C4)
    a, b, c, d = _turned(a, b, c, d, ASM)
    y_ptr = y_ptr.to(tl.pointer_type(tl.int32)) + (j * EDGE + 4 * four)[:, None] * R4
    y_ptr += (i * (EDGE // 4) + four)[None, :]
    tl.store(y_ptr, tl.trans(a))
    tl.store(y_ptr + R4, tl.trans(b))
    tl.store(y_ptr + 2 * R4, tl.trans(c))
    tl.store(y_ptr + 3 * R4, tl.trans(d))


def fits(codes: Tensor) -> bool:
    """Whether codes [R, C] are contiguous, aligned bytes and both sizes multiples of 128."""
    return (
        codes.dim() == 2 and codes.element_size() == 1 and codes.is_contiguous() and codes.numel() > 0
        and codes.shape[0] % _EDGE == 0 and codes.shape[1] % _EDGE == 0 and codes.data_ptr() % 16 == 0
    )


def transposed(codes: Tensor) -> Tensor:
    """codes [R, C], which `fits` -> [C, R]."""
    rows, columns = codes.shape
    turned = codes.new_empty((columns, rows))
    _transpose(codes.is_cuda)((rows // _EDGE) * (columns // _EDGE), codes.view(torch.uint8),
                              turned.view(torch.uint8), rows // 4, columns // 4)
    return turned


@cache
def _transpose(compiled: bool) -> BoundLauncher:
    return Launcher(_transpose_kernel).bound({"EDGE": _EDGE, "ASM": compiled}, num_warps=4)
