"""The round trip's kernel compiles for what it may meet. No GPU is needed: ptxas comes with Triton."""

from typing import Any

import pytest

triton = pytest.importorskip("triton")


@pytest.mark.parametrize(("capability", "packed"), [(89, False), (90, True)])
@pytest.mark.parametrize("layout", ["_COLUMNS_ADJACENT", "_ROWS_ADJACENT"])
@pytest.mark.parametrize("flagged", [False, True])
def test_round_trip_compiles(capability: int, packed: bool, layout: str, flagged: bool) -> None:
    """Ada (8.9) cannot compare two 16-bit integers at once, Hopper can: each gets code that it runs, also for
    CUDA graphs (`flagged`)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope import roundtrip_kernel

    kernel = roundtrip_kernel._round_trip_kernel
    constants: dict[str, Any] = {
        "LARGEST": 448.0, "SUBNORMAL": 2.0**-9, "BAD": 0.01, "CODE": triton.language.float8e4nv,
        "BLOCK": False, "GIVEN": False, "CODED": False, "STOCHASTIC": False, "POWER_OF_TWO": False,
        "HISTOGRAM": True, "EVEN": True, "PACKED": packed, "FLAGGED": flagged,
        "stride_r" if layout == "_ROWS_ADJACENT" else "stride_c": 1,
        **getattr(roundtrip_kernel, layout),
    }
    kinds = {"x_ptr": "*bf16", "scales_ptr": "*bf16", "codes_ptr": "*bf16", "ints_ptr": "*i32",
             "flag_ptr": "*i32", "reals_ptr": "*fp64", "stride_r": "i64", "stride_c": "i64"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature,
                       constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
    assert compiled.asm["cubin"]
