"""The Triton quantizers against the plain-torch ones: logic in Triton's interpreter, bits on a GPU.

The interpreter must be chosen before Triton is imported, so one child process runs every case and saves what
the kernels returned. Its cast to E4M3 loses carries, so inputs here are codes times powers of two: exact.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8scope import backend, quantize, roundtrip
from fp8scope.quantize import Quantized
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, E5M2, FORMATS

pytest.importorskip("triton", reason="triton is not installed")

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="bit-exactness needs a CUDA device of compute capability 8.9",
)

SHAPES = {"one tile": (1, 128), "ragged": (133, 200), "one element": (1, 1), "one column": (130, 1),
          "no rows": (0, 5), "no columns": (5, 0)}

CHILD = """
import sys, torch
from fp8scope import quantize_kernel
from fp8scope_protocol.formats import FORMATS
cases, answers = torch.load(sys.argv[1]), {}
for key, (function, x, format, options) in cases.items():
    got = getattr(quantize_kernel, function)(x, FORMATS[format], **options)
    answers[key] = got.codes.view(torch.uint8).clone(), got.scales.clone()
torch.save(answers, sys.argv[2])
"""

Case = tuple[str, Tensor, str, dict[str, Any]]
Answer = tuple[Tensor, Tensor]


def exact(shape: tuple[int, int], dtype: torch.dtype, format: str = "e4m3") -> Tensor:
    """Values that the format holds exactly under a power-of-two scale: every tile and block holds the largest
    code times 1/4, 1 or 4, the rest are small integers times a power of two."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    bound, unit = (16, 16.0) if format == "e4m3" else (8, 1024.0)  # 4 and 3 significant bits
    x = torch.randint(1 - bound, bound, shape, generator=generator) * unit
    x[:, ::128] = FORMATS[format].largest
    x[::128] = FORMATS[format].largest
    return (x * 4.0 ** (torch.arange(shape[0]) % 3 - 1).unsqueeze(1)).to(dtype)


def planted(dtype: torch.dtype) -> Tensor:
    """[133, 200] with a zero tile, NaN, both infinities, minus zero."""
    x = exact((133, 200), dtype)
    x[2] = 0.0
    x[3, 7], x[4, 140], x[5, 199] = float("nan"), float("inf"), float("-inf")
    x[6, 0] = -0.0
    return x


def cases() -> dict[str, Case]:
    out: dict[str, Case] = {}
    for name, shape in SHAPES.items():
        x = exact(shape, torch.float32)
        for function in ("quantize_tiles", "quantize_blocks"):
            out[f"{function} {name}"] = (function, x, "e4m3", {"power_of_two": True})
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for function in ("quantize_tiles", "quantize_blocks"):
            out[f"{function} planted {dtype}"] = (function, planted(dtype), "e4m3", {"power_of_two": True})
    x = planted(torch.float32)
    for function in ("quantize_tiles", "quantize_blocks"):
        tall = 133 if function == "quantize_tiles" else 2
        scales = 2.0 ** torch.randint(-2, 3, (tall, 2), generator=torch.Generator().manual_seed(1)).float()
        out[f"{function} transposed"] = (function, x.t(), "e4m3", {"power_of_two": True})
        out[f"{function} strided"] = (function, x[::2, 1::3], "e4m3", {"power_of_two": True})
        out[f"{function} given scales"] = (function, x, "e4m3", {"scales": scales})
        out[f"{function} one given scale"] = (function, x, "e4m3", {"scales": torch.full((1, 1), 2.0)})
        out[f"{function} e5m2"] = (function, exact((5, 130), torch.float32, "e5m2"), "e5m2", {})
    return out


CASES = cases()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What the kernels return for `CASES` in the interpreter."""
    folder: Path = tmp_path_factory.mktemp("interpreter")
    torch.save(CASES, folder / "cases.pt")
    subprocess.run(
        [sys.executable, "-c", CHILD, str(folder / "cases.pt"), str(folder / "answers.pt")],
        check=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=240,
    )
    loaded: dict[str, Answer] = torch.load(folder / "answers.pt")
    return loaded


def expected(case: Case) -> Answer:
    function, x, format, options = case
    got = getattr(quantize, function)(x, FORMATS[format], **options)
    return got.codes.view(torch.uint8), got.scales


@pytest.mark.parametrize("key", CASES)
def test_kernel_agrees_with_reference_in_the_interpreter(key: str, answers: dict[str, Answer]) -> None:
    """Codes and scales of exactly representable values are equal: masks, strides, NaN, Inf, zeros, given
    scales, empty tensors."""
    codes, scales = expected(CASES[key])
    assert torch.equal(answers[key][1], scales)
    assert torch.equal(answers[key][0], codes)


def test_cases_hold_the_policy_they_are_meant_to_test() -> None:
    """A NaN or Inf makes its own tile NaN, with scale 1, and no other; a zero tile has scale 1; exact inputs
    come back exactly. Guards the cases above against testing nothing."""
    q = quantize.quantize_tiles(planted(torch.float32), E4M3, power_of_two=True)
    nan_tiles = torch.zeros(133, 2, dtype=torch.bool)
    nan_tiles[3, 0] = nan_tiles[4, 1] = nan_tiles[5, 1] = True
    is_nan = torch.isnan(quantize.dequantize(q))
    assert torch.equal(is_nan[:, :128].all(dim=1), nan_tiles[:, 0])
    assert torch.equal(is_nan[:, 128:].all(dim=1), nan_tiles[:, 1])
    assert int(is_nan.sum()) == 128 + 72 + 72
    assert bool((q.scales[nan_tiles] == 1).all())
    assert q.scales[2].tolist() == [1.0, 1.0]
    x = exact((133, 200), torch.float32)
    assert torch.equal(quantize.dequantize(quantize.quantize_tiles(x, E4M3, power_of_two=True)), x)


def test_kernel_refuses_what_is_not_a_matrix() -> None:
    """A [2, 3, 4] tensor is an error that says what to do, before anything is launched."""
    from fp8scope import quantize_kernel

    with pytest.raises(Invalid, match="flatten leading dimensions"):
        quantize_kernel.quantize_tiles(torch.zeros(2, 3, 4), E4M3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(257, 1000), (128, 128), (1, 4096), (4096, 1), (0, 5), (5, 0)])
def test_kernel_equals_reference_to_the_bit(
    shape: tuple[int, int], dtype: torch.dtype, power_of_two: bool
) -> None:
    """On a GPU, codes and scales of random values (denormals, NaN, Inf and zeros among them) are equal to the
    bit for both formats, transposes included."""
    from fp8scope import quantize_kernel

    x = torch.randn(shape, device="cuda") * torch.logspace(-40, 3, shape[1], device="cuda")
    if min(shape) > 7:
        x[3], x[5, 17], x[7, -1] = 0.0, float("nan"), float("-inf")
    for element in (E4M3, E5M2):
        for source in (x.to(dtype), x.to(dtype).t()):
            for function in ("quantize_tiles", "quantize_blocks"):
                same(getattr(quantize_kernel, function)(source, element, power_of_two=power_of_two),
                     getattr(quantize, function)(source, element, power_of_two=power_of_two))


def same(ours: Quantized, reference: Quantized) -> None:
    assert torch.equal(ours.scales, reference.scales)
    assert torch.equal(ours.codes.view(torch.uint8), reference.codes.view(torch.uint8))


def test_backend_takes_plain_torch_for_cpu_tensors() -> None:
    """On the CPU every function of `backend` answers as the reference does, given scales included."""
    x, scales = planted(torch.float32), torch.full((1, 1), 0.5)
    assert not backend.runs_kernels(x, E4M3)
    same(backend.quantize_tiles(x, E4M3, scales=scales), quantize.quantize_tiles(x, E4M3, scales=scales))
    same(backend.quantize_blocks(x, E4M3, scales=scales), quantize.quantize_blocks(x, E4M3, scales=scales))
    row = backend.round_trip(x, E4M3, "tile 1x128", scales=scales)
    reference = roundtrip.round_trip(x, E4M3, "tile 1x128", scales=scales)
    assert all(torch.equal(a, b) for a, b in zip(row, reference, strict=True))
