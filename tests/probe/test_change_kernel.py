"""The Triton reading of an optimizer's step against the plain-torch one.

One child process runs every case in Triton's interpreter; on a GPU the same cases run as compiled code.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope import change as reference
from fp8scope.adam import adam_form
from fp8scope.change import stored_weights_of
from fp8scope.layers import ParameterPlace
from fp8scope.sample import BLOCK, draw

triton = pytest.importorskip("triton", reason="triton is not installed")

SHAPES = ((7,), (), (128, 128), (130, 67), (700, 300), (2048, 1024), (64,), (33, 4096))

CASES: dict[str, dict[str, Any]] = {
    "bf16 weights and moments": {},
    "fp32 everything": {"dtype": torch.float32},
    "bf16 weights, fp32 moments": {"moments": torch.float32},
    "fp16": {"dtype": torch.float16, "moments": torch.float16},
    "no weights before": {"before": False},
    "coupled decay": {"decoupled": False},
    "clipped": {"clip": 0.5},
    "NaN and vanished": {"bad": True},
    "out of fp32's squares": {"dtype": torch.float32, "size": 1e25},
    "numbers on the device": {"on_device": True},
    "each its own step": {"steps": True},
    "anywhere in memory": {"offset": 3},
}


def placed(x: Tensor, offset: int) -> Tensor:
    """x at an odd place of a larger tensor."""
    found = x.new_zeros(x.numel() + offset)[offset:].view(x.shape)
    return found.copy_(x)


def compare(device: str, case: dict[str, Any]) -> list[str]:
    """What differs between kernel and reference, in words."""
    from fp8scope import change_kernel

    generator = torch.Generator().manual_seed(0)
    dtype, offset = case.get("dtype", torch.bfloat16), case.get("offset", 0)
    moments, size = case.get("moments", dtype), case.get("size", 1.0)

    def noise(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = size * torch.randn(shape, generator=generator)
        return placed(x.to(dtype).to(device), offset)

    parameters = [nn.Parameter(noise(shape, dtype)) for shape in SHAPES]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
    for i, p in enumerate(parameters):
        step = torch.tensor(float(3 + (i if case.get("steps") else 0)))
        optimizer.state[p] = {
            "step": step.to(device) if case.get("on_device") else step,
            "exp_avg": noise(tuple(p.shape), moments), "exp_avg_sq": noise(tuple(p.shape), moments).abs()}
    if case.get("bad"):
        first, last = (optimizer.state[parameters[i]] for i in (0, -1))
        first["exp_avg"][0] = torch.nan
        last["exp_avg_sq"][:, 1] = 0.0
    places = {id(p): ParameterPlace(name=str(i), aliases=(), module="", depth=0, index=0)
              for i, p in enumerate(parameters)}
    (sample,) = draw(parameters, places, rank=0, world=1)
    form = adam_form(optimizer, optimizer.param_groups[0])
    assert form is not None
    form = replace(form, decoupled=case.get("decoupled", True), clip=case.get("clip"))
    if case.get("on_device"):
        form = replace(form, lr=torch.tensor(1e-3, device=device))
    before = stored_weights_of(sample) if case.get("before", True) else None
    with torch.no_grad():
        for p in parameters:
            p.sub_(noise(tuple(p.shape), dtype) * 1e-3)
    states = [optimizer.state[part.parameter] for part in sample.parts]
    tensors = change_kernel.in_place(sample, states)
    assert tensors is not None
    ours = change_kernel.change(sample, form, states, before, tensors=tensors)
    again = change_kernel.change(sample, form, states, before, tensors=tensors)
    found = [f"{name} is not repeated" for name, x, y in zip(ours._fields, ours, again, strict=True)
             if not torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))]
    for name, x, y in zip(ours._fields, ours, reference.change(sample, form, states, before), strict=True):
        if not torch.allclose(x, y, rtol=1e-6, atol=0.0, equal_nan=True):
            found.append(f"{name}: {x.tolist()} and {y.tolist()}")
    return found


def tell() -> dict[str, list[str]]:
    """Every case on the CPU; `interpreted` calls it in a process of its own."""
    return {name: compare("cpu", case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_reads_what_the_reference_reads(name: str, interpreted: dict[str, list[str]]) -> None:
    """To the rounding of fp32, and the same bits when it is asked again."""
    assert interpreted[name] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_the_same_on_a_gpu(name: str) -> None:
    """As compiled code."""
    assert compare("cuda", CASES[name]) == []


def test_what_cannot_be_read_in_place_is_left_to_the_reference() -> None:
    """Views with gaps, moments of two kinds, and states that do not exist yet."""
    from fp8scope.change_kernel import in_place

    parameter = nn.Parameter(torch.zeros(64, 64))
    places = {id(parameter): ParameterPlace(name="a", aliases=(), module="", depth=0, index=0)}
    (sample,) = draw([parameter], places, rank=0, world=1)
    whole, gaps = torch.zeros(64, 64), torch.zeros(64, 128)[:, ::2]
    assert in_place(sample, [{"exp_avg": whole, "exp_avg_sq": whole}]) is not None
    assert in_place(sample, [{"exp_avg": whole, "exp_avg_sq": gaps}]) is None
    assert in_place(sample, [{"exp_avg": whole, "exp_avg_sq": whole.bfloat16()}]) is None
    assert in_place(sample, [{"exp_avg": whole.double(), "exp_avg_sq": whole.double()}]) is None
    assert in_place(sample, [{}]) is None


@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles(capability: int) -> None:
    """No GPU is needed: ptxas comes with Triton."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope import change_kernel

    kernel = change_kernel._change_kernel
    constants: dict[str, Any] = {
        "MOMENT": triton.language.bfloat16, "WEIGHT": triton.language.bfloat16, "COMPARED": True,
        "DECOUPLED": True, "CLIPPED": True, "ROWS": change_kernel._ROWS, "BLOCK": BLOCK}
    kinds = {"table_ptr": "*i64", "before_ptr": "*bf16", "parts": "i32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp64") for name in names}
    source = ASTSource(fn=kernel, signature=signature,
                       constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert compiled.asm["cubin"]
