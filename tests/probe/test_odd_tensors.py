"""Weights, inputs and gradients that are no plain tensors: read where that can be done, else listed."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils.parametrizations import weight_norm

from fp8scope.roundtrip import round_trip
from fp8scope.scope import Scope
from fp8scope.sharding import local, unreadable
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3
from fp8scope_protocol.wire import ProbeEvent

OPERANDS = {("activation", "rowwise"), ("activation", "columnwise"),
            ("gradient", "rowwise"), ("gradient", "columnwise")}


class Stored(Tensor):
    """Codes and a scale that look like one fp32 tensor; only `linear` and `detach` know how to read them."""

    codes: Tensor
    scale: float

    @staticmethod
    def __new__(cls: type["Stored"], codes: Tensor, scale: float) -> "Stored":
        shown: Stored = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32,
                                                      device=codes.device)
        shown.codes, shown.scale = codes, scale
        return shown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return args[0] @ (args[1].codes * args[1].scale).t()
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of Stored")


def stored(device: str) -> nn.Linear:
    layer = nn.Linear(16, 5, bias=False)
    codes = torch.randint(-5, 5, (5, 16), dtype=torch.int8, device=device)
    layer.weight = nn.Parameter(Stored(codes, 0.1), requires_grad=False)
    return layer


class Packed(nn.Linear):
    """Four bits a weight, two of them in a byte of a column: the layout of 4-bit layers."""

    def __init__(self) -> None:
        super().__init__(16, 5, bias=False)
        self.weight = nn.Parameter(torch.zeros(40, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        return input @ input.new_ones(16, 5)


class Int8(nn.Linear):
    """Codes in the parameter, the scale beside them."""

    def __init__(self) -> None:
        super().__init__(16, 5, bias=False)
        self.weight = nn.Parameter(torch.ones(5, 16, dtype=torch.int8), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        return input @ (self.weight * 0.1).t()


def trained(layer: nn.Module, device: str) -> MemoryWorker:
    """Two steps of a layer before it and the layer."""
    model, worker = nn.Sequential(nn.Linear(16, 16).to(device), layer), MemoryWorker()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    with Scope(model, (optimizer,), worker=worker, every=1):
        for _ in range(2):
            model(torch.randn(3, 16, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return worker


def told(worker: MemoryWorker) -> list[ProbeEvent]:
    return [event for record in worker.records for event in record.events]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])])
@pytest.mark.parametrize(("make", "kind"), [
    (stored, "a Stored"), (lambda device: Packed().to(device), "uint8"),
    (lambda device: Int8().to(device), "int8"),
    (lambda device: weight_norm(nn.Linear(16, 5)).to(device), "parametrized")])
def test_z2_a_weight_that_cannot_be_read_is_listed(
    make: Callable[[str], nn.Module], kind: str, device: str
) -> None:
    """Z2: once, with its kind and as no fault of the probe's; the layer's other operands are measured."""
    worker = trained(make(device), device)
    (event,) = told(worker)
    assert (event.kind, event.name) == ("unobserved", "1")
    assert kind in event.text
    for step in (0, 1):
        metrics = worker.metrics(step)
        assert {key[1:] for key in metrics if key[0] == "1"} == OPERANDS
        assert metrics["1", "activation", "rowwise"]["elements"] == 3 * 16
        assert metrics["1", "gradient", "rowwise"]["elements"] == 3 * 5
        assert not [key for key in metrics if key[0].startswith("1.weight") and "weight" in key[1]]
        assert ("0.weight", "weight", "rowwise") in metrics


def test_what_wraps_another_tensor_never_reaches_a_kernel() -> None:
    """Its address is 0: a kernel would read there. Of a collective the result is taken, the rest refused."""
    flying = AsyncCollectiveTensor(torch.ones(2, 128))
    flying.completed = True
    assert flying.data_ptr() == 0
    plain = local(flying)
    assert type(plain) is Tensor
    assert plain.data_ptr() != 0
    assert not unreadable(flying)
    assert round_trip(plain, E4M3, "tile 1x128").counts[0] == 256
    assert "Stored" in unreadable(Stored(torch.ones(2, 2, dtype=torch.int8), 1.0))


class Counted(Tensor):
    """A plain tensor that notes what is done with it, as images and tracked tensors do."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_subclass_does_not_see_the_probe() -> None:
    """It is read as the tensor it is, and its own functions run as often as without a probe."""
    found = []
    for probe in (False, True):
        torch.manual_seed(0)
        model, worker = nn.Sequential(nn.Linear(16, 5)), MemoryWorker()
        scope = Scope(model, (), worker=worker, every=1) if probe else None
        x = torch.randn(3, 16).as_subclass(Counted)
        Counted.seen.clear()
        loss: Tensor = model(x).sum()
        torch.autograd.backward(loss.as_subclass(Tensor))
        found.append([getattr(one, "__name__", "") for one in Counted.seen])
        if scope is not None:
            scope.step(0)
    assert found[0] == found[1]
    assert told(worker) == []
    assert worker.metrics(0)["0", "activation", "rowwise"]["elements"] == 48


def test_a_default_device_is_the_jobs() -> None:
    """One without values at that: the numbers are those of a job that has set none."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model, worker = nn.Sequential(nn.Linear(16, 5)), MemoryWorker()
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.device(device), Scope(model, (optimizer,), worker=worker, every=1) as scope:
            for step in range(3):
                model(torch.ones(3, 16, device="cpu")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                scope.step(step, loss=1.0)
        assert told(worker) == []
        found.append([(worker.metrics(step), worker.sentinels(step)) for step in range(3)])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(("inputs", "kind"), [
    (lambda: torch.eye(16).to_sparse_csr(), "sparse_csr"),
    (lambda: torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(3, 16)]), "nested"),
    (lambda: torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(3, 16)], layout=torch.jagged),
     "a NestedTensor"),
])
def test_inputs_without_rows_are_listed(inputs: Callable[[], Tensor], kind: str) -> None:
    """Sparse and nested tensors: training goes on as it did, the layer is named with the kind of input."""
    model, worker = nn.Sequential(nn.Linear(16, 5)), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        y = model(inputs())
        y = y.values() if y.is_nested and y.layout is torch.jagged else y.to_padded_tensor(0.0) if (
            y.is_nested) else y
        y.sum().backward()
        scope.step(0)
    events = told(worker)
    assert {event.kind for event in events} == {"unobserved"}
    assert any(kind in event.text for event in events)
    assert model[0].weight.grad is not None
    assert ("activation", "rowwise") not in {key[1:] for key in worker.metrics(0)}
    assert worker.metrics(0)["0.weight", "weight", "rowwise"]["elements"] == 80


def test_integers_beside_the_input_are_no_inputs() -> None:
    """Masks and positions are passed over in silence."""
    class Masked(nn.Linear):
        def forward(self, input: Tensor, mask: Any = None) -> Tensor:
            return super().forward(input)

    model, worker = nn.Sequential(Masked(16, 5)), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        model[0](torch.randn(3, 16), mask=torch.ones(3, 16, dtype=torch.bool)).sum().backward()
        scope.step(0)
    assert told(worker) == []
    assert worker.metrics(0)["0", "activation", "rowwise"]["calls"] == 1


class Hostile(Tensor):
    """Every function of it raises, its shape's too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("not here")


class Silent:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("nor here")


ONE = torch.ones(())
NO_NUMBERS: dict[str, Callable[[], Any]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "sparse": lambda: ONE.to_sparse(), "csr": lambda: torch.eye(1).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8),
    "meta": lambda: ONE.to("meta"), "fake": lambda: FakeTensorMode().from_tensor(ONE),
    "hostile": lambda: ONE.as_subclass(Hostile), "wrapper": lambda: Stored(ONE.to(torch.int8), 1.0),
    "many": lambda: torch.ones(2), "none": lambda: torch.empty(0), "complex": lambda: ONE * 1j,
    "NumPy's complex": lambda: np.complex64(1j), "NumPy's many": lambda: np.ones(2), "text": lambda: "1",
    "NumPy's text": lambda: np.str_("1"), "signalling": lambda: Decimal("sNaN"), "huge": lambda: 10**400,
    "silent": Silent, "list": lambda: [1.0], "nothing": lambda: None,
}


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.parametrize("make", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_whatever_is_no_number_is_refused_by_name(make: Callable[[], Any]) -> None:
    """`step` and `log` raise `Invalid` and nothing else; what was refused left nothing behind, also not what
    came with it, and the step can be closed with other values."""
    worker, value = MemoryWorker(), make()
    with Scope(nn.Sequential(nn.Linear(8, 8)), (), worker=worker, every=1) as scope:
        for call in (scope.step, scope.log):
            with pytest.raises(Invalid, match=r"loss = .*: must be one real number"):
                call(lr=0.5, loss=value)
        scope.step(0, loss=2.0)
    assert worker.sentinels(0) == {"loss": 2.0, "nonfinite_count": 0.0}
    assert told(worker) == [event for event in told(worker) if event.kind == "unobserved"]


@pytest.mark.parametrize("value", [
    np.float32(1.5), np.array(1.5), np.array([1.5]), Decimal("1.5"), Fraction(3, 2), nn.Parameter(ONE * 1.5),
    torch.tensor([[1.5]]), (ONE * 1.5).to(torch.float8_e4m3fn), (ONE * 1.5).as_subclass(Counted)], ids=repr)
def test_a_number_may_be_of_many_classes(value: Any) -> None:
    """Python's, NumPy's, and tensors of one element."""
    worker = MemoryWorker()
    with Scope(nn.Sequential(nn.Linear(8, 8)), (), worker=worker, every=1) as scope:
        scope.step(0, loss=value)
    assert worker.sentinels(0)["loss"] == 1.5


def test_a_loss_inside_of_a_transform() -> None:
    """Under `grad` it has one value, which is taken; under `vmap` one for each row, which are refused."""
    worker = MemoryWorker()
    with Scope(nn.Sequential(nn.Linear(8, 8)), (), worker=worker, every=1) as scope:
        def loss(x: Tensor) -> Tensor:
            scope.log(loss=x.sum())
            return x.sum()

        torch.func.grad(loss)(torch.ones(3))
        for rows in (loss, torch.func.grad(loss)):
            with pytest.raises(Invalid, match="must be one real number"):
                torch.func.vmap(rows)(torch.ones(2, 3))
        scope.step(0)
    assert worker.sentinels(0)["loss"] == 3.0


def test_a_rank_s_part_of_a_loss_is_not_taken_for_it(tmp_path: Path) -> None:
    """A DTensor that all ranks hold alike is a number; one to be summed or put together is refused, on every
    rank alike, with what to call."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        worker = MemoryWorker()
        with Scope(nn.Sequential(nn.Linear(8, 8)), (), worker=worker, every=1) as scope:
            for local_part, placement in ((ONE, Partial()), (ONE.view(1), Shard(0))):
                with pytest.raises(Invalid, match="full_tensor"):
                    scope.log(loss=DTensor.from_local(local_part, mesh, [placement]))
            scope.step(0, loss=DTensor.from_local(ONE * 2, mesh, [Replicate()]))
        assert worker.sentinels(0)["loss"] == 2.0
    finally:
        dist.destroy_process_group()
