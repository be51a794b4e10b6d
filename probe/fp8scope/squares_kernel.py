"""Triton twin of `squares.squares`: every tensor is read once, by one launch for all of them.

A program takes 64 Ki elements of one tensor, whose address it finds in a table, and leaves one number; those
of a tensor are added up afterwards, always in the same order, so the same input gives the same bits. Whole
pieces are read 16 bytes at a time where all tensors begin at a multiple of that, as those of an allocator do.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.change_kernel import TYPES

PIECE = 65_536

_BLOCK = 1024  # with four warps 8 elements a thread, and 16 registers of sums
_UNROLL = 8  # loads of 16 bytes that a thread may have on their way


@triton.jit(do_not_specialize=["tensors"])
def _squares_kernel(table_ptr: tl.tensor, tensor_ptr: tl.tensor, out_ptr: tl.tensor, tensors: tl.tensor,
                    TYPE: tl.constexpr, ALIGNED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
                    UNROLL: tl.constexpr) -> None:
    program = tl.program_id(0)
    tensor = tl.load(tensor_ptr + program)
    x_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    elements = tl.load(table_ptr + tensors + tensor)
    begin = (program - tl.load(table_ptr + 2 * tensors + tensor)) * PIECE
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    if begin + PIECE <= elements:  # no mask, which would forbid wide loads
        for k in tl.range(0, PIECE, BLOCK, loop_unroll_factor=UNROLL):
            x = tl.load(x_ptr + begin + k + lane).to(tl.float64)
            total += x * x
    else:
        for k in range(0, PIECE, BLOCK):
            at = begin + k + lane
            x = tl.load(x_ptr + at, mask=at < elements, other=0.0).to(tl.float64)
            total += x * x
    tl.store(out_ptr + program, tl.sum(total, axis=0))


def is_readable(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel reads tensors of this type that lie like this; of other classes nobody knows how."""
    return all(type(x) is Tensor and x.dtype in TYPES and x.is_contiguous() for x in tensors)


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """See `squares.squares`."""
    device = tensors[0].device
    sizes = torch.tensor([x.numel() for x in tensors])
    pieces = (sizes + (PIECE - 1)) // PIECE
    addresses = [x.data_ptr() for x in tensors]
    table = torch.stack([torch.tensor(addresses), sizes, pieces.cumsum(0) - pieces])
    each = torch.repeat_interleave(torch.arange(len(tensors), dtype=torch.int32), pieces)
    out = torch.empty(len(each), dtype=torch.float64, device=device)
    with torch.cuda.device_of(out):
        _squares_kernel[(len(each),)](
            table.to(device, non_blocking=True), each.to(device, non_blocking=True), out, len(tensors),
            TYPE=TYPES[tensors[0].dtype], ALIGNED=all(address % 16 == 0 for address in addresses),
            PIECE=PIECE, BLOCK=_BLOCK, UNROLL=_UNROLL, num_warps=4)
    return torch.segment_reduce(out, "sum", lengths=pieces.to(device, non_blocking=True), unsafe=True)
