"""What tests of round-trip kernels share: inputs, the interpreter's child process, and the comparison."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8scope.sums import COUNT_COLUMNS, MAX_COLUMNS, SUM_COLUMNS, RowSums

CHILD = """
import sys, torch
from importlib import import_module
from fp8scope_protocol.formats import FORMATS
kernel, answers = import_module(f"fp8scope.{sys.argv[3]}"), {}
for key, (x, format, scaling, options) in torch.load(sys.argv[1]).items():
    row = kernel.round_trip(x, FORMATS[format], scaling, **options)
    if key.endswith("twice"):
        kernel.round_trip(x, FORMATS[format], scaling, out=row, **options)
    answers[key] = tuple(part.clone() for part in row)
torch.save(answers, sys.argv[2])
"""

Case = tuple[Tensor, str, str, dict[str, Any]]
"""x, format, scaling, options of `round_trip`; a key that ends with `twice` goes into one row twice."""


def normal(shape: tuple[int, int], *, decades: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian values whose columns span `decades`, so that some underflow."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    spread = torch.logspace(-decades, 0, shape[1])
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def interpreted(module: str, cases: dict[str, Case], folder: Path) -> dict[str, RowSums]:
    """The rows that `round_trip` of a kernel module fills in Triton's interpreter, in one child process."""
    torch.save(cases, folder / "cases.pt")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(folder / "cases.pt"), str(folder / "answers.pt"),
         module],
        check=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=290,
    )
    return {key: RowSums(*parts) for key, parts in torch.load(folder / "answers.pt").items()}


def differences(ours: RowSums, reference: RowSums, *, tolerance: float) -> list[str]:
    """What differs, in words; counts, histogram and extremes exactly, sums within `tolerance`: relative, and
    of `xe`, a sum of mixed signs, to sqrt(sum x^2 sum e^2)."""
    found = []
    for name, a, b in zip(COUNT_COLUMNS, ours.counts.tolist(), reference.counts.tolist(), strict=True):
        if a != b:
            found.append(f"{name}: {a} and {b}")
    sums = dict(zip(SUM_COLUMNS, reference.sums.tolist(), strict=True))
    for name, a in zip(SUM_COLUMNS, ours.sums.tolist(), strict=True):
        size = math.sqrt(sums["coded_x2"] * sums["e2"]) if name == "xe" else abs(sums[name])
        if not abs(a - sums[name]) <= tolerance * size:
            found.append(f"{name}: {a} and {sums[name]}")
    for name, a, b in zip(MAX_COLUMNS, ours.maxes.tolist(), reference.maxes.tolist(), strict=True):
        if a != b and not abs(a - b) <= 1e-12 * max(1.0, abs(b)):
            found.append(f"{name}: {a} and {b}")
    if not torch.equal(ours.histogram, reference.histogram):
        found.append(f"histogram: {ours.histogram.tolist()} and {reference.histogram.tolist()}")
    return found
