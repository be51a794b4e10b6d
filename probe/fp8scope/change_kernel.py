"""Triton twin of `change.change`: weights and moments are read where they lie, by one launch for all parts.

A program takes one part, of which it finds the addresses in a table; at most 16,384 elements, so that one is
enough and its sums need no merging: the same input gives the same bits every time. Sums are float64, since a
square may be out of fp32's range; arithmetic up to them is the reference's, in fp32.

Addresses are those of the moment of the launch, on the stream that the optimizer used. Loads are of single
elements: a shard, or a view into a bucket, may begin anywhere.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8scope.adam import AdamForm, numbers_on, steps_of
from fp8scope.change import Change
from fp8scope.quantize_kernel import magnitude_bits
from fp8scope.sample import BLOCK, Sample
from fp8scope.sharding import local
from fp8scope.stored import MOMENTS, State, is_plain, moment

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

_ROWS = 8  # blocks at a time: with eight warps, four elements a thread and 48 registers of sums


@triton.jit(do_not_specialize=["parts"])
def _change_kernel(table_ptr: tl.tensor, corrections_ptr: tl.tensor, numbers_ptr: tl.tensor,
                   before_ptr: tl.tensor, out_ptr: tl.tensor, parts: tl.tensor, MOMENT: tl.constexpr,
                   WEIGHT: tl.constexpr, COMPARED: tl.constexpr, DECOUPLED: tl.constexpr,
                   CLIPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    part = tl.program_id(0)
    m_ptr = tl.load(table_ptr + part).to(tl.pointer_type(MOMENT))
    v_ptr = tl.load(table_ptr + parts + part).to(tl.pointer_type(MOMENT))
    w_ptr = tl.load(table_ptr + 2 * parts + part).to(tl.pointer_type(WEIGHT))
    first = tl.load(table_ptr + 3 * parts + part)
    stride = tl.load(table_ptr + 4 * parts + part)
    elements = tl.load(table_ptr + 5 * parts + part)
    start = tl.load(table_ptr + 6 * parts + part)
    first_correction = tl.load(corrections_ptr + part).to(tl.float32)
    second_correction = tl.load(corrections_ptr + parts + part).to(tl.float32)
    eps = tl.load(numbers_ptr).to(tl.float32)
    lr = tl.load(numbers_ptr + 1).to(tl.float32)
    decay = tl.load(numbers_ptr + 2).to(tl.float32)
    clip = tl.load(numbers_ptr + 3).to(tl.float32)

    lane = tl.arange(0, BLOCK)[None, :]
    none = tl.zeros([ROWS, BLOCK], tl.float64)
    update2, weight2, wanted2, got2, missed2 = none, none, none, none, none
    largest = tl.zeros([ROWS, BLOCK], tl.int32)
    vanished = largest
    for begin in range(0, tl.cdiv(elements, BLOCK).to(tl.int32), ROWS):
        block = (begin + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = block * BLOCK + lane < elements
        at = first + block * stride + lane
        m = tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=inside, other=1.0).to(tl.float32)
        w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.div_rn(tl.div_rn(m, first_correction), tl.sqrt_rn(tl.div_rn(v, second_correction)) + eps)
        if CLIPPED:  # a NaN stays
            u = tl.where(u > clip, clip, tl.where(u < -clip, -clip, u))
        u = tl.where(inside, u, 0.0)
        largest = tl.maximum(largest, magnitude_bits(u))
        vanished += ((v == 0.0) & (m != 0.0)).to(tl.int32)
        update2 += u.to(tl.float64) * u.to(tl.float64)
        weight2 += w.to(tl.float64) * w.to(tl.float64)
        if COMPARED:
            was = tl.load(before_ptr + start + block * BLOCK + lane, mask=inside, other=0.0).to(tl.float32)
            wanted = u + was * decay if DECOUPLED else u
            got = tl.where(inside, tl.div_rn(was - w, lr), 0.0)
            missed = got - wanted
            wanted2 += wanted.to(tl.float64) * wanted.to(tl.float64)
            got2 += got.to(tl.float64) * got.to(tl.float64)
            missed2 += missed.to(tl.float64) * missed.to(tl.float64)

    out_ptr += part
    tl.store(out_ptr, tl.max(largest).to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(out_ptr + parts, tl.sum(update2))
    tl.store(out_ptr + 2 * parts, tl.sum(weight2))
    tl.store(out_ptr + 3 * parts, tl.sum(vanished).to(tl.float64))
    tl.store(out_ptr + 4 * parts, tl.sum(wanted2))
    tl.store(out_ptr + 5 * parts, tl.sum(got2))
    tl.store(out_ptr + 6 * parts, tl.sum(missed2))


def in_place(sample: Sample, states: Sequence[State]) -> list[list[Tensor]] | None:
    """First moments, second moments and weights of each part, if the kernel can read all of them."""
    pairs = list(zip(sample.parts, states, strict=True))
    if not all(state and is_plain(part.parameter, state) for part, state in pairs):
        return None
    found = [[local(moment(state, key)) for state in states] for key in MOMENTS]
    found.append([local(part.parameter) for part in sample.parts])
    moments = {x.dtype for some in found[:2] for x in some}
    fits = all(type(x) is Tensor and x.is_contiguous() and x.device == sample.device
               for some in found for x in some)
    return found if fits and len(moments) == 1 and moments | {sample.dtype} <= TYPES.keys() else None


def change(sample: Sample, form: AdamForm, states: Sequence[State], before: Tensor | None, *,
           tensors: list[list[Tensor]]) -> Change:
    """See `change.change`. tensors: those of `in_place`."""
    device, parts = sample.device, len(sample.parts)
    addresses = [[x.data_ptr() for x in some] for some in tensors]
    starts = [0, *accumulate(part.elements for part in sample.parts[:-1])]
    table = torch.tensor([*addresses, [part.first for part in sample.parts],
                          [part.stride or BLOCK for part in sample.parts],
                          [part.elements for part in sample.parts], starts])
    corrections = 1 - numbers_on(device, form.betas).unsqueeze(1) ** steps_of(states, device)
    clip = inf if form.clip is None else form.clip
    numbers = numbers_on(device, (form.eps, form.lr, form.weight_decay, clip))
    out = torch.empty((len(Change._fields), parts), dtype=torch.float64, device=device)
    with torch.cuda.device_of(out):
        _change_kernel[(parts,)](
            table.to(device, non_blocking=True), corrections.expand(2, parts).contiguous(), numbers,
            out if before is None else before, out, parts, MOMENT=TYPES[tensors[0][0].dtype],
            WEIGHT=TYPES[sample.dtype], COMPARED=before is not None, DECOUPLED=form.decoupled,
            CLIPPED=form.clip is not None, ROWS=_ROWS, BLOCK=BLOCK, num_warps=8)
    return Change(*out.unbind())
