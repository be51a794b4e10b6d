"""The round trip's kernels compile for what they may meet. No GPU is needed: ptxas comes with Triton."""

from typing import Any

import pytest

triton = pytest.importorskip("triton")


@pytest.mark.parametrize(("capability", "packed"), [(89, False), (90, True)])
@pytest.mark.parametrize("layout", ["COLUMNS_ADJACENT", "ROWS_ADJACENT"])
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
        "stride_r" if layout == "ROWS_ADJACENT" else "stride_c": 1,
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


@pytest.mark.parametrize(("scaling", "coded", "flagged"), [
    ("tile 1x128", False, False), ("tile 1x128", False, True), ("tile 1x128", True, False),
    ("block 128x128", False, False)])
def test_tiles_compile(scaling: str, coded: bool, flagged: bool) -> None:
    """For Hopper, reading 16 bytes a thread and load."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope import tile_kernel
    from fp8scope_protocol.formats import E4M3

    kernel = tile_kernel._tile_kernel
    constants = tile_kernel.constants_of(E4M3, scaling, False, coded=coded, flagged=flagged,
                                         compiled=True)
    kinds = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp32", "ints_ptr": "*i32",
             "flag_ptr": "*i32", "reals_ptr": "*fp64"}
    names = kernel.arg_names
    assert list(constants) == names[-len(constants):]  # a launch hands them over in this order
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = [name for name in names if name in kinds or name == "stride"]
    source = ASTSource(fn=kernel, signature=signature,
                       constexprs={(names.index(name),): value for name, value in constants.items()},
                       attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned})
    options = {"num_warps": constants["ROWS"] // 16} | ({} if coded else {"maxnreg": tile_kernel.REGISTERS})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "ld.global.v4.b32" in ptx  # 16 bytes a thread and load


@pytest.mark.parametrize("scaling", ["tile 1x128", "block 128x128"])
@pytest.mark.parametrize("light", [True, False])
def test_batches_compile(light: bool, scaling: str) -> None:
    """Light: bf16 of which no histogram is asked, else roots of fp32; reading 16 bytes a thread and load."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope import batch_kernel, tile_kernel
    from fp8scope_protocol.formats import E4M3

    dtype = torch.bfloat16 if light else torch.float32
    kind = batch_kernel.Kind(light, dtype, E4M3, scaling, not light, False, True)
    constants = batch_kernel.constants_of(kind, histogram=not light, compiled=True, packed=light)
    kernel = batch_kernel._batch_tile_kernel if light else batch_kernel._batch_kernel
    kinds = {"table_ptr": "*i64", "tensor_ptr": "*i32", "ints_ptr": "*i32", "reals_ptr": "*fp64"}
    names = kernel.arg_names
    assert set(constants) == set(names[7:])
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature,
                       constexprs={(names.index(name),): value for name, value in constants.items()},
                       attrs={(names.index(name),): [["tt.divisibility", 16]] for name in kinds})
    warps = tile_kernel.warps_of(tile_kernel.ROWS[scaling]) if light else 1
    options = {"num_warps": warps} | ({"maxnreg": tile_kernel.REGISTERS} if light else {})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "ld.global.v4.b32" in ptx


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_codes_of_a_tensor_compile(format: str, given: bool, turned: bool) -> None:
    """One scale a tensor, for Hopper: 16 bytes a thread, load and store."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope_protocol.formats import FORMATS
    from fp8scope_trainer import tensor_kernel

    kernel = tensor_kernel._codes_kernel
    constants = tensor_kernel.constants_of(FORMATS[format], False, given=given, turned=turned,
                                           width=tensor_kernel.SHAPE[0], compiled=True)
    kinds = {"x_ptr": "*bf16", "codes_ptr": "*u8", "turned_ptr": "*u8", "scale_ptr": "*fp32",
             "amax_ptr": "*fp32", "partials_ptr": "*i32"}
    names = kernel.arg_names
    assert list(constants) == names[-len(constants):]
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = [name for name in names if name in kinds or name in ("R", "C")]
    source = ASTSource(fn=kernel, signature=signature,
                       constexprs={(names.index(name),): value for name, value in constants.items()},
                       attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                              options={"num_warps": tensor_kernel.SHAPE[1]})
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert f"cvt.rn.satfinite.{format}x2.f32" in compiled.asm["ptx"]


@pytest.mark.parametrize("name", ["_amax_kernel", "_close_kernel"])
def test_maxima_of_a_tensor_compile(name: str) -> None:
    """What comes before and after the codes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope_trainer import tensor_kernel

    kernel = getattr(tensor_kernel, name)
    constants = {"BLOCK": 4096, "ASM": True} if name == "_amax_kernel" else {"BLOCK": 1024}
    kinds = {"x_ptr": "*bf16", "partials_ptr": "*i32", "scale_ptr": "*fp32", "used_ptr": "*fp32",
             "amax_ptr": "*fp32"}
    names = kernel.arg_names
    signature = {one: "constexpr" if one in constants else kinds.get(one, "i32") for one in names}
    source = ASTSource(fn=kernel, signature=signature,
                       constexprs={(names.index(one),): value for one, value in constants.items()},
                       attrs={(names.index(one),): [["tt.divisibility", 16]] for one in {*kinds} & {*names}})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["cubin"]


@pytest.mark.parametrize("block", [False, True])
def test_columns_compile(block: bool) -> None:
    """Tiles and blocks of x.t(), for Hopper: 16 bytes a thread, load and store of codes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope import pack_kernel
    from fp8scope_protocol.formats import E4M3

    kernel = pack_kernel._columns_kernel
    constants = pack_kernel.constants_of(E4M3, False, True) | {"WIDTH": 128 if block else 64, "BLOCK": block}
    kinds = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp32"}
    names = kernel.arg_names
    assert list(constants) == names[-len(constants):]
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = [name for name in names if name not in constants]
    source = ASTSource(fn=kernel, signature=signature,
                       constexprs={(names.index(name),): value for name, value in constants.items()},
                       attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                         options={"num_warps": 4 if block else 2}).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


def test_both_orientations_compile() -> None:
    """Of tiles in one launch, for Hopper: 16 bytes a thread, load and store of codes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope import both_kernel, pack_kernel
    from fp8scope_protocol.formats import E4M3

    kernel = both_kernel._both_kernel
    constants = pack_kernel.constants_of(E4M3, False, True) | {"EDGE": pack_kernel.WIDTH}
    kinds = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp32", "turned_ptr": "*u8",
             "turned_scales_ptr": "*fp32"}
    names = kernel.arg_names
    assert list(constants) == names[-len(constants):]
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned = [name for name in names if name not in constants]
    source = ASTSource(fn=kernel, signature=signature,
                       constexprs={(names.index(name),): value for name, value in constants.items()},
                       attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                         options={"num_warps": 4, "maxnreg": 80}).asm["ptx"]
    assert ptx.count("st.global.v4.b32") >= 2
    assert "ld.global.v4.b32" in ptx
