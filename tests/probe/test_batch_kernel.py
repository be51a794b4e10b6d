"""Many tensors from one launch against the plain-torch round trip of each: logic in Triton's interpreter,
bits on a GPU. One child process runs every case of the interpreter, whose casts to FP8 lose carries, so what
is not tiles of bf16 holds values that are codes times a power of two."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.probe.kernel_cases import differences, normal
from torch import Tensor, nn

from fp8scope import batch
from fp8scope.batch import Trip
from fp8scope.scope import Scope
from fp8scope.sums import RowSums, SumTables
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, E5M2, FORMATS, Format

pytest.importorskip("triton", reason="triton is not installed")

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="the kernels need compute capability 9.0",
)
TILES, BLOCKS = "tile 1x128", "block 128x128"
SUM_TOLERANCE = 2e-6
"""Relative, as in test_roundtrip_kernel."""

CHILD = "from tests.probe.test_batch_kernel import tell; tell()"


class One(NamedTuple):
    """A tensor of a case."""

    x: Tensor
    scaling: str = TILES
    format: str = "e4m3"
    root: bool = False


def coded(shape: tuple[int, int], format: Format = E4M3, *, root: bool = False) -> Tensor:
    """Codes times 2^-6, one in three lost, the largest code in every tile; with a row of zeros. root: their
    squares."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    dtype = torch.float8_e4m3fn if format is E4M3 else torch.float8_e5m2
    codes = torch.randint(0, 255, shape, generator=generator).to(torch.uint8).view(dtype).float()
    x = torch.where(torch.isfinite(codes), codes, 1.0)
    lost = torch.rand(shape, generator=generator) < 0.3
    x = torch.where(lost, format.smallest_subnormal * 0.25, x)
    x[:, ::128] = format.largest
    x[2:3] = 0.0
    x = x * 2.0**-6
    return x.square() if root else x


def planted(x: Tensor) -> Tensor:
    """With NaN, both infinities and minus zero, in rows of their own where there are so many."""
    x = x.clone()
    for row, value in enumerate((float("nan"), float("inf"), float("-inf"), -0.0)):
        x[row % len(x), -1 - row % x.shape[1]] = value
    return x


def light(scaling: str) -> list[One]:
    """Tiles of bf16: Gaussian, with NaN and zeros, far up and down, rows apart, none at all."""
    rows = 128 if scaling == BLOCKS else 16
    x = normal((2 * rows, 256)).bfloat16()
    some = x[:rows, 128:]  # rows are apart
    return [One(one, scaling) for one in (
        x, planted(some), x[:0], some * 0, some * 1e37, some * 1e-37, some, some.relu())]


def cases() -> dict[str, tuple[bool, list[One]]]:
    """Name -> whether with the histogram, tensors."""
    shapes = [(1, 1), (1, 300), (17, 128), (5, 200), (0, 128), (3, 0)]
    mixed = [One(coded((4, 130))), One(coded((4, 130)).bfloat16()), One(coded((4, 130)).half()),
             One(coded((4, 130)), BLOCKS), One(coded((16, 128), E5M2), TILES, "e5m2"),
             One(coded((4, 130), root=True), root=True)]
    found = {
        "light tiles": (False, light(TILES)), "light blocks": (False, light(BLOCKS)[1:4]),
        "forty": (False, [One(normal((16, 128)).bfloat16() * 2.0**i) for i in range(40)]),
        "mixed, light": (False, [*mixed, One(normal((16, 128)).bfloat16())]),
        "mixed, with histograms": (True, mixed[::-1]),
    }
    for scaling in (TILES, BLOCKS):
        found[f"ragged, {scaling}"] = (True, [One(coded(shape), scaling) for shape in shapes])
        found[f"planted, {scaling}"] = (True, [One(planted(coded((6, 260))), scaling)])
        found[f"whole, {scaling}"] = (True, [One(coded((128, 128)).bfloat16(), scaling)])
        found[f"roots, {scaling}"] = (True, [
            One(planted(coded((6, 130), root=True)).to(dtype), scaling, root=True)
            for dtype in (torch.float32, torch.bfloat16)])
    return found


CASES = cases()


def placed(x: Tensor, device: str) -> Tensor:
    """On `device`; rows that are apart stay so."""
    there = x.to(device)
    return there if x.is_contiguous() else torch.cat([there, there], 1)[:, :x.shape[1]]


def trips(some: list[One], table: SumTables, device: str) -> list[Trip]:
    """Of tensors on `device`, each into its row."""
    return [Trip(placed(one.x, device), FORMATS[one.format], one.scaling, table.row(i), one.root)
            for i, one in enumerate(some)]


def compare(device: str, histogram: bool, some: list[One]) -> list[str]:
    """What differs between the kernels and the reference; on a GPU also a second call, of other bits."""
    from fp8scope import batch_kernel

    def fill(round_trips: Callable[..., None], **options: Any) -> SumTables:
        table = SumTables.zeros(len(some), device)
        round_trips(trips(some, table, device), histogram=histogram, **options)
        return table

    assert all(map(batch_kernel.fits, trips(some, SumTables.zeros(len(some), device), device)))
    ours, expected = fill(batch_kernel.round_trips, plans={}), fill(batch.round_trips)
    again = fill(batch_kernel.round_trips, plans={}) if device == "cuda" else ours
    found = []
    for i in range(len(some)):
        found += [f"{i}: {text}" for text in
                  differences(ours.row(i), expected.row(i), tolerance=SUM_TOLERANCE)]
        if not all(torch.equal(a, b) for a, b in zip(ours.row(i), again.row(i), strict=True)):
            found.append(f"{i} is not repeated")
    return found


def tell() -> None:
    """In the child process: every case on the CPU, and one whose plan is used twice."""
    from fp8scope import batch_kernel

    found: dict[str, Any] = {name: compare("cpu", *case) for name, case in CASES.items()}
    plans: dict[Any, Any] = {}
    some, table = CASES["light tiles"][1][-3:], SumTables.zeros(3)
    mine = trips(some, table, "cpu")
    for _ in range(2):
        batch_kernel.round_trips(mine, histogram=False, plans=plans)
    found["calls"], found["plans"] = table.counts[:, 1].tolist(), len(plans)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """Case -> differences in Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD], check=True, capture_output=True, text=True,
        timeout=580, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_references_in_the_interpreter(name: str, interpreted: dict[str, Any]) -> None:
    """Counts, histogram and extremes to the bit, sums to fp32 rounding: ragged and empty tensors, one row,
    tiles of zeros, NaN, Inf, square roots, both scalings, forty at once; and the same bits when asked again.
    """
    assert interpreted[name] == []


def test_a_plan_serves_until_something_moves(interpreted: dict[str, Any]) -> None:
    """The second call adds to the same rows, with the tables of the first."""
    assert interpreted["calls"] == [2] * 3
    assert interpreted["plans"] == 1


def test_what_does_not_fit_is_left_to_others() -> None:
    """Other formats, scalings and types, columns that are contiguous, and more than two dimensions."""
    from fp8scope.batch_kernel import fits

    row, x = RowSums.zeros("cpu"), torch.zeros(16, 256)
    assert fits(Trip(x, E4M3, TILES, row))
    assert fits(Trip(x[3:5, 7:9], E5M2, BLOCKS, row))
    for one in (x.double(), x.t(), x[:, ::2], x[0], x.view(2, 8, 256), x.to_sparse()):
        assert not fits(Trip(one, E4M3, TILES, row))
    assert not fits(Trip(x, FORMATS["int8"], TILES, row))
    assert not fits(Trip(x, E4M3, "rowwise", row))


def test_rows_must_be_different() -> None:
    """Two tensors that were added to one row at the same time would lose counts."""
    from fp8scope import batch_kernel

    row, x = RowSums.zeros("cpu"), torch.zeros(16, 128)
    with pytest.raises(Invalid, match="row of its own"):
        batch_kernel.round_trips([Trip(x, E4M3, TILES, row)] * 2, histogram=False, plans={})
    assert row.counts.eq(0).all()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_references_on_the_gpu(name: str) -> None:
    """The same cases as compiled code."""
    assert compare("cuda", *CASES[name]) == []


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("histogram", [False, True])
@pytest.mark.parametrize("scaling", [TILES, BLOCKS])
def test_three_hundred_tensors_on_the_gpu(scaling: str, histogram: bool) -> None:
    """Of mixed sizes, types and formats, Gaussian with underflow; the same bits twice."""
    generator = torch.Generator().manual_seed(0)
    some = []
    for i in range(300):
        rows, columns = torch.randint(1, 700, (2,), generator=generator).tolist()
        if i % 3:  # whole
            rows, columns = (rows // 128 + 1) * 128, (columns // 128 + 1) * 128
        x = normal((rows, columns)).to((torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)[i % 4])
        some.append(One(x.abs() if i % 5 == 0 else x, scaling, ("e4m3", "e5m2")[i % 7 == 0], i % 5 == 0))
    assert compare("cuda", histogram, some) == []


@pytest.mark.gpu
@needs_hopper
@pytest.mark.filterwarnings("ignore::UserWarning")  # the profiler's
def test_the_weights_of_a_light_step_take_two_launches() -> None:
    """24 linears: one launch measures all weights and one merges them, where each took two of its own; what
    is left are those of activations and gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(24))).cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scope = Scope(model, (optimizer,), worker=MemoryWorker(), every=1, detail_every=1000)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(3):
        with torch.profiler.profile(activities=kinds) as profile:
            model(x).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
        scope.step()
    scope.close()
    launched = Counter(event.name for event in profile.events() if event.device_type.name == "CUDA")
    assert launched["_batch_tile_kernel"] == 1
    assert launched["_batch_merge_kernel"] == 1
    assert launched["_tile_kernel"] == launched["_merge_kernel"] == 48
