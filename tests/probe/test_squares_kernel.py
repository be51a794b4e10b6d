"""Sums of squares of many tensors: the Triton kernel against plain torch, in the interpreter and on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8scope import squares as reference

triton = pytest.importorskip("triton", reason="triton is not installed")

SIZES = (1, 7, 2048, 65_536, 65_537, 131_072, 200_001)


def placed(x: Tensor, offset: int) -> Tensor:
    """x that begins some elements after where an allocator would."""
    return x.new_zeros(x.numel() + offset)[offset:].copy_(x)


def given(name: str, device: str) -> list[Tensor]:
    """The tensors of one case."""
    generator = torch.Generator().manual_seed(0)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name.split()[0], torch.float32)
    found = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    if name == "fp32 out of range":
        found = [x * 10.0 ** (30 if i % 2 else -30) for i, x in enumerate(found)]
    if name == "bf16 not finite":
        found[1][3], found[4][65_536], found[5][70_000] = torch.nan, torch.inf, -torch.inf
    here = [x.to(device) for x in found]
    return [placed(x, 1 + i) for i, x in enumerate(here)] if name == "bf16 anywhere" else here


CASES = ("fp32", "bf16", "fp16", "bf16 anywhere", "bf16 not finite", "fp32 out of range")


def compare(name: str, device: str) -> list[str]:
    """What differs between kernel and reference, in words."""
    from fp8scope import squares_kernel

    tensors = given(name, device)
    assert squares_kernel.is_readable(tensors)
    ours, again = squares_kernel.squares(tensors), squares_kernel.squares(tensors)
    wanted = torch.stack([x.double().square().sum() for x in tensors])
    found = []
    if not torch.equal(ours.nan_to_num(7.0), again.nan_to_num(7.0)):
        found.append("is not repeated")
    for what, other in (("float64", wanted), ("the reference", reference.squares(tensors))):
        if not torch.allclose(ours, other, rtol=1e-12, atol=0.0, equal_nan=True):
            found.append(f"{what}: {ours.tolist()} and {other.tolist()}")
    return found


def tell() -> dict[str, list[str]]:
    """Every case on the CPU; `interpreted` calls it in a process of its own."""
    return {name: compare(name, "cpu") for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_plain_torch(name: str, interpreted: dict[str, list[str]]) -> None:
    """To the rounding of float64, at any size and magnitude, and the same bits when asked again."""
    assert interpreted[name] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_the_same_on_a_gpu(name: str) -> None:
    """As compiled code."""
    assert compare(name, "cuda") == []


def test_other_tensors_are_left_to_the_reference() -> None:
    """Gaps, and types that the kernel does not read."""
    from fp8scope.squares_kernel import is_readable

    whole = torch.ones(4, 4)
    assert is_readable([whole, whole.view(16)])
    assert not is_readable([whole, whole[:, ::2]])
    assert not is_readable([whole.double()])


@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_to_wide_loads(capability: int) -> None:
    """No GPU is needed: ptxas comes with Triton. Sixteen bytes at a time where tensors are aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope import squares_kernel

    def ptx(aligned: bool) -> Any:
        kernel = squares_kernel._squares_kernel
        constants: dict[str, Any] = {
            "TYPE": triton.language.bfloat16, "ALIGNED": aligned, "PIECE": squares_kernel.PIECE,
            "BLOCK": squares_kernel._BLOCK, "UNROLL": squares_kernel._UNROLL}
        kinds = {"table_ptr": "*i64", "tensor_ptr": "*i32", "out_ptr": "*fp64", "tensors": "i32"}
        names = kernel.arg_names
        source = ASTSource(fn=kernel, signature={**dict.fromkeys(constants, "constexpr"), **kinds},
                           constexprs={(names.index(name),): value for name, value in constants.items()})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert compiled.asm["cubin"]
        return compiled.asm["ptx"]

    assert "v4.b32" in ptx(aligned=True)
    assert "v4.b32" not in ptx(aligned=False)
