"""Jobs that are built unlike most: the probe changes nothing in them, raises nothing, invents no number."""

import inspect
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8scope
from fp8scope.scope import Scope
from fp8scope.segment import segment_paths, spool_folder
from fp8scope.settings import OFFLINE, ProbeSettings, read_settings
from fp8scope.spool import Spool
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.commands import Command, Precision, SetPrecision
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.wire import Batch, decode_batch

Loss = Callable[[nn.Module], Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 4, bias=False))


def plain(model: nn.Module) -> Tensor:
    y: Tensor = model(torch.randn(6, 8))
    return y.square().mean()


def errors(worker: MemoryWorker) -> list[str]:
    return [event.text for record in worker.records for event in record.events if event.kind == "probe_error"]


def spooled(scope: Scope) -> list[Batch]:
    """What a closed scope left on disk."""
    worker: Any = scope._worker
    spool = Spool(worker._spool.folder, limit=2**30, memory_limit=0)
    batches = []
    while (record := spool.peek()) is not None:
        batches.append(decode_batch(record.payload))
        spool.ack(record)
    spool.close()
    return batches


def assert_unchanged(make: Callable[[], nn.Module], loss: Loss) -> MemoryWorker:
    """Trains with and without a probe: losses, parameters, buffers, random numbers are equal to the bit."""
    found: list[list[Tensor]] = []
    worker = MemoryWorker()
    for probe in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scope = Scope(model, (optimizer,), worker=worker, every=1) if probe else None
        losses = []
        for _ in range(3):
            value = loss(model)
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach())
        if scope is not None:
            scope.close()
        found.append([*losses, *(p.detach() for p in model.parameters()), *model.buffers(),
                      torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return worker


def test_a_parametrized_weight_is_not_computed() -> None:
    """Reading the weight under spectral norm moves its buffers: it is left alone, and listed."""
    worker = assert_unchanged(lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4)), plain)
    assert "parametrized" in next(e.text for e in worker.record(0).events if e.name == "0")
    assert ("1.weight", "weight", "rowwise") in worker.metrics(0)


def save_products(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpointing_does_not_see_the_probe() -> None:
    """It hands saved products back by their number; those of the probe must not be among them."""
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = partial(
        create_selective_checkpoint_contexts, save_products)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(6, 8, requires_grad=True)
        y: Tensor = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        return y.square().mean()

    worker = assert_unchanged(network, loss)
    assert worker.metrics(0)["0", "activation", "rowwise"]["gemm_error"] > 0


class Bare(torch.optim.Optimizer):
    """State without a mapping, no learning rate, and an entry that belongs to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] = 1  # type: ignore[index]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter] = parameter.grad.clone()
                parameter.sub_(parameter.grad.sign(), alpha=1e-3)


def test_any_optimizer_may_step(tmp_path: Path) -> None:
    """States that are tensors, no learning rate: nothing is raised, and the gradient norm is still there."""
    model, worker = network(), MemoryWorker()
    optimizer = Bare(model.parameters())
    with Scope(model, (optimizer,), worker=worker, every=1):
        plain(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert errors(worker) == []
    assert worker.sentinels(0)["grad_norm"] > 0
    assert "lr" not in worker.sentinels(0)
    fp8scope.attach(model, optimizer, run="r", collector=OFFLINE, spool=tmp_path).close()


def test_updates_of_sparse_gradients_are_known() -> None:
    """SparseAdam counts its steps with a plain integer."""
    model, worker = nn.Sequential(nn.Embedding(8, 4, sparse=True)), MemoryWorker()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    with Scope(model, (optimizer,), worker=worker, every=1):
        model(torch.arange(3)).sum().backward()
        optimizer.step()  # type: ignore[no-untyped-call]
    assert errors(worker) == []
    assert worker.sentinels(0)["update_max"] == pytest.approx(1.0, rel=1e-3)


def test_no_gradient_is_no_norm_of_zero() -> None:
    """An optimizer that steps without gradients says nothing about their norm or their health."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Scope(model, (optimizer,), worker=worker, every=1):
        optimizer.step()
    assert set(worker.sentinels(0)) == {"lr"}


def test_complex_gradients_have_a_norm() -> None:
    """Beside real ones in one optimizer."""
    model, worker = nn.Linear(1, 1, bias=False), MemoryWorker()
    other = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    model.weight.grad, other.grad = torch.full((1, 1), 2.0), torch.full((1,), 1.0 + 2.0j)
    with Scope(model, (optimizer,), worker=worker, every=1):
        optimizer.step()
    assert worker.sentinels(0)["grad_norm"] == 3.0


def test_a_step_may_close_in_inference_mode() -> None:
    """`scope.step` beside a validation under `inference_mode`: the next steps are measured all the same."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.Adam(model.parameters())
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for step in range(2):
            plain(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.inference_mode():
                scope.step(step, loss=plain(model))
    assert errors(worker) == []
    assert worker.metrics(1)["0", "activation", "rowwise"]["elements"] == 48
    assert worker.sentinels(1)["grad_norm"] > 0


def test_transforms_of_torch_func_are_listed() -> None:
    """Inside `grad` a tensor has no value that could be read: nothing is measured, and that is said."""
    model, worker = network(), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        values = {name: p.detach() for name, p in model.named_parameters()}
        grad(lambda p: functional_call(model, p, (torch.randn(2, 8),)).sum())(values)
        scope.step(0)
    assert errors(worker) == []
    assert worker.metrics(0) == {}
    assert {e.name for e in worker.record(0).events if "torch.func" in e.text} == {"0", "2"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    """A job may set it to anything; values of 1e30 have an error all the same."""
    model, worker = network(), MemoryWorker()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with Scope(model, (), worker=worker, every=1) as scope:
            model(torch.ones(2, 8, dtype=torch.float32) * 1e30).sum().backward()
            scope.step(0)
    finally:
        torch.set_default_dtype(before)
    row = worker.metrics(0)["0", "activation", "rowwise"]
    assert (row["amax"], row["gemm_error"]) == (pytest.approx(1e30), pytest.approx(0.03, abs=0.03))


def test_layers_in_a_part_called_module_are_apart() -> None:
    """`model.module.fc` and `model.fc` are two layers; neither is added to the other."""
    model, worker = nn.Module(), MemoryWorker()
    model.module = nn.ModuleDict({"fc": nn.Linear(8, 16, bias=False)})
    model.fc = nn.Linear(16, 4, bias=False)
    with Scope(model, (), worker=worker, every=1) as scope:
        model.fc(model.module["fc"](torch.randn(3, 8))).sum().backward()
        scope.step(0)
    elements = {key[0]: row["elements"] for key, row in worker.metrics(0).items() if key[1] == "weight"}
    assert elements == {"module.fc.weight": 128, "fc.weight": 64}


def test_inputs_that_hold_themselves_end() -> None:
    """A context object that refers to itself is looked through once."""
    class WithContext(nn.Linear):
        def forward(self, input: Tensor, context: Any = None) -> Tensor:
            return super().forward(input)

    model, worker = nn.Sequential(WithContext(8, 8)), MemoryWorker()
    context: dict[str, Any] = {"x": torch.randn(2, 8)}
    context["self"] = [context]
    with Scope(model, (), worker=worker, every=1) as scope:
        model[0](torch.randn(3, 8), context=context).sum().backward()
        scope.step(0)
    assert worker.metrics(0)["0", "activation", "rowwise"]["elements"] == 5 * 8


def lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyConv1d(6, 1), nn.LazyLinear(4))


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Conv1d(6, 6, 1), nn.Linear(8, 4))


@pytest.mark.parametrize("make", [lazy_model, meta_model])
def test_parameters_may_come_later(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """A lazy model, and one that is built on `meta` and filled after the probe was attached."""
    model = make()
    scope = fp8scope.attach(model, run="r", every=1, collector=OFFLINE, spool=tmp_path)
    if make is meta_model:
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    model(torch.randn(3, 6, 8)).sum().backward()
    scope.step(0)
    scope.close()
    (batch,) = spooled(scope)
    assert batch.header.columns == 5
    assert batch.header.events == ()


WRONG: list[dict[str, Any]] = [
    {"start_step": "3"}, {"start_step": 1.5}, {"start_step": True}, {"every": "2"}, {"formats": None},
    {"formats": ()}, {"spool": 5}, {"collector": "http://h:99999"}, {"collector": "http://h:x"},
    {"collector": "http://[h"}, {"collector": 5}, {"optimizers": None}, {"optimizers": [3]}, {"model": [1]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_argument_is_one_line(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Whatever is handed over, the message names the argument."""
    right: dict[str, Any] = {"model": network(), "run": "r", "spool": tmp_path, "collector": OFFLINE}
    with pytest.raises(Invalid) as caught:
        fp8scope.attach(**(right | wrong))
    assert next(iter(wrong)) in str(caught.value)
    assert "\n" not in str(caught.value)


class Raises:
    """Whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __iter__(self) -> Any:
        raise RuntimeError("iter")

    def __repr__(self) -> str:
        raise RuntimeError("repr")


class Itself:
    """Its optimizer is itself, as mocks and some wrappers have it."""

    @property
    def optimizer(self) -> Any:
        return self


ODD: dict[str, Any] = {
    "raises": Raises(), "itself": Itself(), "array": np.ones(2), "tensor": torch.ones(2), "list": [[1]],
    "meta": torch.ones((), device="meta"), "bytes": b"x", "complex": 1j, "class": nn.Linear,
    "surrogate": "\ud800", "null": "a\0b", "fails": lambda name: 1 / 0, "nobody": lambda name: None,
}


@pytest.mark.parametrize("odd", ODD)
def test_whatever_attach_is_given_is_refused_by_name_or_works(odd: str, tmp_path: Path) -> None:
    """Every argument in turn: `Invalid`, which names it, and nothing else; no hook is left in the model."""
    for name in inspect.signature(fp8scope.attach).parameters:
        model = network()
        right: dict[str, Any] = {"model": model, "run": "r", "spool": tmp_path, "collector": OFFLINE}
        refused = name
        try:
            fp8scope.attach(**(right | {name: ODD[odd]})).close()
        except Invalid as error:
            refused = str(error)
        assert name.rstrip("s") in refused  # one format of several
        assert not model[0]._forward_pre_hooks


def test_arguments_may_be_of_numpy_and_single(tmp_path: Path) -> None:
    """Step numbers of NumPy are numbers; one format need not be in a tuple, and one that is there twice is
    measured once."""
    for formats in ("e4m3", ("e4m3", "e4m3")):
        model = network()
        scope = fp8scope.attach(model, run="r", every=np.int64(1), start_step=np.int64(3),  # type: ignore[arg-type]
                                formats=formats, collector=OFFLINE, spool=tmp_path)
        plain(model).backward()  # type: ignore[no-untyped-call]
        scope.step(np.int64(3))  # type: ignore[arg-type]
        scope.close()
        (batch,) = spooled(scope)
        assert batch.header.step == 3
        assert set(batch.arrays["calls"].flatten().tolist()) == {1}


@pytest.mark.parametrize("value", [None, "1", torch.ones(2), 1j])
def test_what_is_no_number_cannot_be_logged(value: Any) -> None:
    """The message names it, and the step's other numbers stay."""
    worker = MemoryWorker()
    with Scope(network(), (), worker=worker, every=1) as scope:
        scope.log(loss=2.0)
        with pytest.raises(Invalid, match="loss"):
            scope.log(loss=value)
        scope.step(0)
    assert worker.sentinels(0)["loss"] == 2.0


def test_the_job_has_its_random_numbers_for_itself(tmp_path: Path, until: Callable[..., None],
                                                   caplog: pytest.LogCaptureFixture) -> None:
    """Pauses of the sender are random, and drawn from a generator of its own."""
    random.seed(0)
    before = random.getstate()
    scope = fp8scope.attach(network(), run="r", collector="http://127.0.0.1:9", spool=tmp_path)
    scope.step(0)
    until(lambda: "no answer" in caplog.text)
    assert random.getstate() == before
    scope.close()


@pytest.mark.parametrize("token", ["tök", "a\nb"])
def test_a_token_that_no_header_can_hold_stops_nothing(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    until: Callable[..., None],
) -> None:
    """The sender goes on trying and says what is wrong; batches stay on disk."""
    monkeypatch.setenv("FP8SCOPE_TOKEN", token)
    scope = fp8scope.attach(network(), run="r", collector="http://127.0.0.1:9", spool=tmp_path)
    scope.step(0)
    until(lambda: "no answer" in caplog.text)
    scope.close()
    assert "the sender stopped" not in caplog.text


def test_the_job_may_change_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative spool stays where it was when the probe attached."""
    monkeypatch.chdir(tmp_path)
    scope = fp8scope.attach(network(), run="r", collector=OFFLINE, spool="here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    scope.step(0)
    scope.close()
    assert len(spooled(scope)) == 1
    assert read_settings({"FP8SCOPE_SPOOL": "~/x"}).spool == Path.home() / "x"


def test_a_long_name_has_a_folder(tmp_path: Path) -> None:
    """128 characters of any script: 1152 bytes once escaped, more than a file system takes."""
    names = ["训练" * 64, "训练" * 63 + "训训"]
    folders = {spool_folder(tmp_path, name, "a", "all") for name in names}
    assert len(folders) == 2
    for folder in folders:
        spool = Spool(folder, limit=2**20, memory_limit=0)
        assert not spool.trouble
        spool.close()


def test_a_file_of_somebody_else_is_no_segment(tmp_path: Path) -> None:
    """A stray file in the folder neither stops the spool nor is touched."""
    (tmp_path / "notes.f8ss").write_text("mine")
    Spool(tmp_path, limit=2**20, memory_limit=0).close()
    assert segment_paths(tmp_path) == []
    assert (tmp_path / "notes.f8ss").read_text() == "mine"


def test_what_was_only_in_memory_is_said_to_be_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a disk and a collector nobody is told that a folder keeps the batches."""
    (tmp_path / "file").touch()
    scope = fp8scope.attach(network(), run="r", collector=OFFLINE, spool=tmp_path / "file")
    scope.step(0)
    scope.close()
    assert "1 batches are lost" in caplog.text
    assert "keeps them" not in caplog.text


def test_it_runs_from_a_folder(tmp_path: Path) -> None:
    """On PYTHONPATH without being installed it has no version, and attaches."""
    code = ("import importlib.metadata as m\n"
            "def absent(name): raise m.PackageNotFoundError(name)\n"
            "m.version = absent\n"
            "import fp8scope, torch\n"
            f"fp8scope.attach(torch.nn.Linear(2, 2), run='r', collector='offline', spool={str(tmp_path)!r})"
            ".close()")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


class Switch(nn.Linear):
    """A layer with a precision."""

    precision: Precision = "fp8"

    def set_precision(self, precision: Precision) -> None:
        self.precision = precision


def test_the_report_on_the_last_boundary_is_sent() -> None:
    """A command that is applied as the last step closes is reported when the scope does."""
    model, worker = nn.Sequential(Switch(8, 8)), MemoryWorker()
    action = SetPrecision(modules=("0",), precision="bf16")
    worker.commands[0] = (Command(id=1, action=action, issued_by="user"),)
    with Scope(model, (), worker=worker, every=1) as scope:
        scope.step(0)
        scope.step(1)
    last = worker.records[-1]
    assert [(report.id, report.state, report.step) for report in last.reports] == [(1, "applied", 2)]
    assert last.tables is None
    assert worker.sentinels(last.step) == {}


def test_settings_name_what_is_no_folder() -> None:
    """A spool is a path."""
    with pytest.raises(Invalid, match="folder"):
        ProbeSettings(spool=5)  # type: ignore[arg-type]
