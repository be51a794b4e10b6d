"""Codes under one scale: the reference against its definition, the kernels against the reference, in Triton's
interpreter and on a GPU. One child process runs every case of the interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.probe.kernel_cases import normal
from torch import Tensor

from fp8scope.quantize import decode, quantize
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, E5M2, FORMATS, INT8
from fp8scope_trainer.tensor import TensorCodes, quantize_tensor, reference

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="the kernels need compute capability 9.0",
)

CHILD = """
import sys, torch
from fp8scope_protocol.formats import FORMATS
from fp8scope_trainer import tensor_kernel
answers = {}
for key, (x, format, options) in torch.load(sys.argv[1]).items():
    assert tensor_kernel.fits(x), key
    q = tensor_kernel.quantize_tensor(x, FORMATS[format], turned=True, **options)
    answers[key] = (q.codes.view(torch.uint8), q.turned.view(torch.uint8), q.scale, q.amax)
for odd in (x[:, :64], x[:64], x.float(), x.t()):
    assert not tensor_kernel.fits(odd.contiguous() if odd.shape[0] == 64 else odd)
torch.save(answers, sys.argv[2])
"""

Case = tuple[Tensor, str, dict[str, Any]]


def delayed(value: float) -> dict[str, Any]:
    return {"scale": torch.full((1, 1), value)}


def cases() -> dict[str, Case]:
    x = normal((128, 256))
    planted = x.clone()
    planted[:, 2], planted[6, 0], planted[:, 130], planted[3, 7] = 0.0, -0.0, -0.0, 1e-38
    found: dict[str, Case] = {
        "normal": (normal((256, 256)), "e4m3", {}), "e5m2": (normal((256, 128)), "e5m2", {}),
        "planted": (planted, "e4m3", {}), "zeros": (torch.zeros(128, 128), "e4m3", {}),
        "huge": (x * 1e37, "e4m3", {}), "denormal": (x * 1e-40, "e4m3", {}),
        "power of two": (x, "e5m2", {"power_of_two": True}),
        "delayed": (x, "e4m3", delayed(float(x.bfloat16().abs().max()) / 448)),
        "delayed, saturating": (x, "e4m3", delayed(2.0**-12)),
        "delayed, e5m2": (x, "e5m2", delayed(2.0**-16)),
        "delayed, huge": (x * 1e37, "e4m3", delayed(2.0**110)),
    }
    return {key: (one.bfloat16(), format, options) for key, (one, format, options) in found.items()}


CASES = cases()
BAD = [float("nan"), float("inf"), float("-inf")]


def bits(q: TensorCodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert q.turned is not None
    return q.codes.view(torch.uint8), q.turned.view(torch.uint8), q.scale, q.amax


@pytest.mark.parametrize("key", CASES)
def test_codes_are_those_of_the_one_scale_policy(key: str) -> None:
    """As `quantize` in `tensorwise` scaling computes them; those of x.t() are the transpose."""
    x, format, options = CASES[key]
    expected = quantize(x, FORMATS[format], "tensorwise", scales=options.get("scale"),
                        power_of_two=options.get("power_of_two", False))
    codes, turned, scale, amax = bits(reference(x, FORMATS[format], turned=True, **options))
    assert torch.equal(codes, expected.codes.view(torch.uint8))
    assert torch.equal(scale, expected.scales)
    assert torch.equal(turned, codes.t())
    assert amax.item() == x.abs().max().item()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("scale", [None, torch.ones(1, 1)])
def test_what_is_not_finite_makes_the_scale_nan(bad: float, scale: Tensor | None) -> None:
    """Every decoded value is then NaN, also under a delayed scale that knew nothing of it."""
    x = normal((5, 130))
    x[3, 7] = bad
    q = quantize_tensor(x, E4M3, scale=scale)
    assert bool((decode(q.codes) * q.scale).isnan().all())
    assert bool(q.amax.isnan())


def test_traps() -> None:
    """Q2, Q4, Q8: nothing but zeros, the largest magnitude negative, odd shapes, no elements, -0."""
    assert quantize_tensor(torch.zeros(3, 5), E4M3).scale.item() == 1.0
    assert quantize_tensor(torch.tensor([[-5.0, -1.0, 3.0]]), E4M3).amax.item() == 5.0
    odd = quantize_tensor(normal((130, 67)), E5M2, turned=True)
    assert odd.turned is not None
    assert (odd.codes.shape, odd.turned.shape) == ((130, 67), (67, 130))
    empty = quantize_tensor(torch.empty(0, 128), E4M3, turned=True)
    assert (empty.scale.item(), empty.amax.item()) == (1.0, 0.0)
    assert quantize_tensor(torch.tensor([[-0.0, 1.0]]), E4M3).codes.view(torch.uint8)[0, 0].item() == 0x80
    with pytest.raises(Invalid, match="must be e4m3 or e5m2"):
        quantize_tensor(torch.zeros(3, 5), INT8)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, ...]]:
    pytest.importorskip("triton", reason="triton is not installed")
    folder: Path = tmp_path_factory.mktemp("tensor")
    ours, theirs = folder / "cases.pt", folder / "answers.pt"
    torch.save(CASES, ours)
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD, str(ours), str(theirs)], check=True,
                   env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=290)
    found: dict[str, tuple[Tensor, ...]] = torch.load(theirs)
    return found


@pytest.mark.parametrize("key", CASES)
def test_the_kernels_are_the_reference_in_the_interpreter(
    key: str, answers: dict[str, tuple[Tensor, ...]]
) -> None:
    """Codes of both orientations, scale and amax, to the bit."""
    x, format, options = CASES[key]
    for ours, theirs in zip(answers[key], bits(reference(x, FORMATS[format], turned=True, **options)),
                            strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("turned", [False, True])
def test_the_kernels_are_the_reference_to_the_bit(key: str, turned: bool) -> None:
    """On the GPU, with and without the other orientation; the same twice."""
    x, format, options = CASES[key]
    x, options = x.cuda(), {name: one.cuda() if isinstance(one, Tensor) else one
                            for name, one in options.items()}
    expected = reference(x, FORMATS[format], turned=turned, **options)
    for _ in range(2):
        found = quantize_tensor(x, FORMATS[format], turned=turned, **options)
        assert (found.turned is None) is not turned
        for ours, theirs in zip(found, expected, strict=True):
            if ours is not None:
                assert theirs is not None
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.gpu
@needs_hopper
def test_every_shape_of_program_writes_the_same() -> None:
    """Columns and warps are a matter of speed."""
    from fp8scope_trainer import tensor_kernel

    x = normal((512, 1024)).bfloat16().cuda()
    expected = bits(reference(x, E4M3, turned=True))
    for shape in tensor_kernel.SHAPES:
        found = bits(tensor_kernel.quantize_tensor(x, E4M3, turned=True, shape=shape))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda one: one.name)
def test_every_bf16_under_every_bf16_amax(element: Any) -> None:
    """All finite values, under scales from 128 significands and 5 exponents."""
    values = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = torch.where(values.isfinite(), values, 0.0).view(128, 512)
    for exponent in (-100, -7, 0, 40, 99):
        for amax in range(128, 256):
            scale = torch.full((1, 1), amax * 2.0**exponent, device="cuda") / torch.full(
                (1, 1), element.largest, device="cuda")
            ours = quantize_tensor(x, element, scale=scale, turned=True)
            theirs = reference(x, element, scale=scale, turned=True)
            assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("policy", ["current", "delayed"])
def test_one_bad_element_makes_everything_nan_on_the_gpu(bad: float, policy: str) -> None:
    """The scale, so every decoded value, and the amax."""
    x = normal((512, 1024)).bfloat16().cuda()
    x[301, 777] = bad
    q = quantize_tensor(x, E4M3, scale=torch.ones(1, 1, device="cuda") if policy == "delayed" else None)
    assert bool(q.scale.isnan().all())
    assert bool(q.amax.isnan().all())


@pytest.mark.gpu
@needs_hopper
def test_more_than_two_to_the_31_elements() -> None:
    """Offsets are 64-bit: the last rows and columns are right, and the largest |x| is found there."""
    x = torch.zeros(2**18, 2**13 + 128, device="cuda", dtype=torch.bfloat16)
    x[-128:, -128:] = normal((128, 128)).bfloat16().cuda()
    expected = reference(x[-128:, -128:], E4M3, turned=True)
    q = quantize_tensor(x, E4M3, turned=True)
    assert q.turned is not None
    assert expected.turned is not None
    assert torch.equal(q.scale, expected.scale)
    assert torch.equal(q.codes[-128:, -128:].view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(q.turned[-128:, -128:].view(torch.uint8), expected.turned.view(torch.uint8))
