"""What the probe keeps, takes and launches for optimizers: bytes of tensors and operations, counted on the
CPU."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8scope.layers import parameter_places
from fp8scope.rows import Rows
from fp8scope.sample import MOST_KEPT, MOST_OF_ONE
from fp8scope.scope import Scope
from fp8scope.sentinels import Sentinels
from fp8scope.sums import RowSums
from fp8scope.testing import MemoryWorker
from fp8scope.twins import Twins
from fp8scope.updates import Samples, Updates
from fp8scope.watch import Watch

KIB = 1024
VIEWS = {"aten.detach.default", "aten.view.default", "aten.select.int", "aten.slice.Tensor",
         "aten.as_strided.default", "aten.lift_fresh.default", "aten.unbind.int", "aten.expand.default"}


class Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that operations under it made and that are still there, and names the operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, int] = {}
        self.most = 0
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func) not in (*VIEWS, "aten._local_scalar_dense.default"):
            self.launched.append(str(func))
        from_data = func is torch.ops.aten.lift_fresh.default  # `torch.tensor`: its storage is new
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not from_data}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (key := _key(x)) not in given and key not in self.live:
                self.live[key] = x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self.live.pop, key, None)
        self.most = max(self.most, self.now)
        return out

    @property
    def now(self) -> int:
        return sum(self.live.values())


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


class Job:
    """Some matrices under AdamW, and what of the probe deals with optimizers."""

    def __init__(self, matrices: int, rows: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.model = nn.Sequential(*(nn.Linear(1024, rows, bias=False, dtype=dtype, device=device)
                                     for _ in range(matrices)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        here = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.watch = Watch(Rows(here), recipes=(), rank=0, world=1)
        self.sentinels = Sentinels(here, world=1)
        places = parameter_places(self.model)
        self.updates = Updates(self.watch, Samples(self.watch, places), self.sentinels)
        self.twins = Twins(self.watch, places)
        self.bytes = Bytes()

    @torch.no_grad()
    def step(self, *, sampling: bool, detailed: bool) -> tuple[int, int]:
        """Bytes at most during the step beyond those from before it, and bytes afterwards."""
        self.watch.begin(sampling=sampling, detailed=detailed)
        before = self.bytes.most = self.bytes.now
        with self.bytes:
            if sampling:
                self.updates.before(self.optimizer)
            self.sentinels.read_gradients(self.optimizer, sampled=sampling)
            self.twins.before(self.optimizer, ready=True)
        self.optimizer.step()
        with self.bytes:
            self.sentinels.after_step(self.optimizer)
            if sampling:
                self.updates.after(self.optimizer)
            self.twins.after(self.optimizer)
            self.sentinels.take()
            if sampling:
                self.watch.rows.collect()
        return self.bytes.most - before, self.bytes.now


KINDS = {"off cadence": (False, False), "light": (True, False), "detailed": (True, True)}


def measured(matrices: int, rows: int, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """Kind of a step -> bytes at most and afterwards, once everything is there."""
    job = Job(matrices, rows, dtype)
    for sampling, detailed in (*KINDS.values(), *KINDS.values()):
        job.step(sampling=sampling, detailed=detailed)
    return {kind: job.step(sampling=sampling, detailed=detailed)
            for kind, (sampling, detailed) in KINDS.items()}


def test_what_is_kept_and_taken_does_not_grow_with_a_parameter() -> None:
    """Sixteen times the elements, the same bytes, but for the few blocks by which samples differ in size."""
    small, large = (measured(2, rows, torch.bfloat16) for rows in (256, 4096))
    for kind in KINDS:
        assert large[kind] == pytest.approx(small[kind], rel=0.1)


def test_a_parameter_in_fp32_keeps_a_kibibyte() -> None:
    """Its moments have no twins: lengths and weights of the sample, the rows of its series, no more."""
    few, many = (measured(matrices, 256, torch.float32) for matrices in (4, 36))
    for kind in KINDS:
        assert (many[kind][1] - few[kind][1]) / 32 <= KIB


def test_a_parameter_in_bf16_keeps_its_twins() -> None:
    """8 bytes for each element of their sample, 6 KiB at most, and rows of two series with room to grow."""
    few, many = (measured(matrices, 256, torch.bfloat16) for matrices in (4, 36))
    for kind in KINDS:
        assert (many[kind][1] - few[kind][1]) / 32 <= 8 * MOST_KEPT + 1.5 * KIB


def test_what_a_step_takes_is_a_few_bytes_an_element_of_the_sample() -> None:
    """Until it is over. On a GPU the light step takes 2 of its 20 bytes for it."""
    found = measured(8, 256, torch.bfloat16)
    for kind, most in {"off cadence": 0.5, "light": 20, "detailed": 20}.items():
        assert found[kind][0] <= 8 * most * MOST_OF_ONE


def held(model: nn.Module, x: Tensor, *, probe: bool) -> tuple[dict[int, int], int]:
    """Step -> bytes of all tensors when its forward is over, and the number of series; every second step is
    detailed."""
    optimizer, worker, found, series = torch.optim.AdamW(model.parameters()), MemoryWorker(), {}, 0
    scope = Scope(model, (optimizer,), worker=worker, every=1, detail_every=2) if probe else None
    for step in range(18):
        loss = model(x).square().mean()
        worker.records.clear()  # on the host
        found[step] = live()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        series = scope.series if scope else 0
    if scope is not None:
        scope.close()
    return found, series


def live() -> int:
    """Bytes of the storages of all tensors that Python knows."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def test_what_is_held_while_activations_are_is_a_kibibyte_and_a_row_a_series() -> None:
    """In detailed steps too, whichever layers have their turn; tables of rows have up to twice the room."""
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Linear(256, 256) for _ in range(16))).bfloat16() for _ in range(2)]
    x = torch.randn(256, 256).bfloat16()
    (bare, _), (found, series) = held(models[0], x, probe=False), held(models[1], x, probe=True)
    extra = {step: found[step] - bare[step] for step in range(2, 18)}
    row = sum(part.nbytes for part in RowSums.zeros("cpu"))
    assert max(extra.values()) <= series * (KIB + 2 * row)
    assert max(extra.values()) - min(extra.values()) <= 16 * KIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2 * KIB), (torch.bfloat16, 4 * MOST_OF_ONE)])
def test_a_light_step_takes_no_copies_on_a_gpu(dtype: torch.dtype, most: int) -> None:
    """By the allocator's own account, the optimizer's step included: moments and weights are read in place.
    BF16 has its weights before the step in copy, and the twins' gradients."""
    job = Job(36, 4096, dtype, "cuda")
    for sampling, detailed in (*KINDS.values(), *KINDS.values()):
        job.step(sampling=sampling, detailed=detailed)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    job.step(sampling=True, detailed=False)
    torch.cuda.synchronize()
    assert (torch.cuda.max_memory_allocated() - before) / 36 <= most


@pytest.mark.parametrize("kind", ["off cadence", "light"])
def test_launches_do_not_grow_with_the_number_of_parameters(kind: str) -> None:
    """What a step launches for three matrices it launches for thirty; views, and steps that the host counts,
    are no launches."""
    counts = []
    for matrices in (3, 30):
        job = Job(matrices, 32, torch.bfloat16)
        for sampling, detailed in (*KINDS.values(), *KINDS.values()):
            job.step(sampling=sampling, detailed=detailed)
        job.bytes.launched.clear()
        sampling, detailed = KINDS[kind]
        job.step(sampling=sampling, detailed=detailed)
        counts.append(Counter(job.bytes.launched))
    assert counts[0] == counts[1]
    assert counts[0].total() <= {"off cadence": 16, "light": 100}[kind]
