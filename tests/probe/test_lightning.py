"""The callback for Lightning, in real trainings under both names of the package."""

import logging
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fp8scope.lightning import ScopeCallback
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*is deprecated"),  # Lightning's own use of torch
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),  # advice on data loading
]

STEPS, ACCUMULATE, ROWS, WIDTH, CLIP = 4, 2, 3, 16, 0.01

Train = Callable[..., Any]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4))


def loader(rows: int = 60) -> DataLoader[Any]:
    inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), batch_size=ROWS)


def module(package: str, optimizers: int = 1) -> Any:
    """A LightningModule of `package`; with several optimizers each steps by hand in every batch."""

    class Regression(import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.losses: list[float] = []
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.network(batch[0]).square().mean()
            self.losses.append(loss.item())
            if not self.automatic_optimization:
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.network(batch[0])

        def configure_optimizers(self) -> Any:
            made = [torch.optim.AdamW(self.network[2 * i].parameters(), lr=0.01) for i in range(optimizers)]
            return made if optimizers > 1 else torch.optim.AdamW(self.parameters(), lr=0.01)

    return Regression()


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains for STEPS steps, with a callback on `run` unless that is None; returns module and trainer."""

    def call(run: str | None, *, package: str = "lightning.pytorch", optimizers: int = 1,
             checkpoint: Path | None = None, rows: int = 60, callbacks: tuple[Any, ...] = (),
             every: int = 1, **arguments: Any) -> Any:
        if run is not None:
            one = ScopeCallback(run=run, every=every, detail_every=1, collector="offline",
                                spool=tmp_path / "spool")
            callbacks = (*callbacks, one)
        wanted: dict[str, Any] = {
            "max_steps": STEPS, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP,
            "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
        }
        trainer = import_module(package).Trainer(**(wanted | arguments), callbacks=list(callbacks))
        model = module(package, optimizers)
        trainer.fit(model, loader(rows), loader(), ckpt_path=checkpoint)
        return model, trainer

    return call


@pytest.fixture
def alone() -> MemoryWorker:
    """The same training in a plain loop."""
    model, worker, batches = network(), MemoryWorker(), iter(loader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Scope(model, (optimizer,), worker=worker, every=2) as scope:
        for step in range(STEPS):
            optimizer.zero_grad()
            for _ in range(ACCUMULATE):
                loss = model(next(batches)[0]).square().mean()
                (loss / ACCUMULATE).backward()
                scope.log(loss=loss.detach())
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scope.step(step, grad_norm=norm)
    return worker


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_it_measures_what_a_plain_loop_does(
    package: str, train: Train, spooled: Any, alone: MemoryWorker, tmp_path: Path
) -> None:
    """Under accumulation, clipping and validation in between: the same steps, series and numbers."""
    train("a", package=package, every=2, limit_val_batches=1, val_check_interval=1)
    steps = spooled(tmp_path / "spool", "a")
    assert [step.header.step for step in steps] == list(range(STEPS))
    assert [bool(step.series) for step in steps] == [True, False, True, False]
    for n, step in enumerate(steps):
        assert all(math.isfinite(value) for value in step.header.sentinels.values())
        wanted = alone.sentinels(n)
        if not step.series:  # read from the gradients, in every fourth step; the plain loop logs it
            del wanted["grad_norm"]
        for key, value in wanted.items():
            assert step.header.sentinels[key] == pytest.approx(value, rel=1e-5), (n, key)
        assert step.header.events == ()
        assert not step.header.skipped
    assert steps[0].header.sentinels["grad_norm"] > CLIP, "nothing was clipped"
    for n in (0, 2):
        for (name, role, orientation), metrics in alone.metrics(n).items():
            found = steps[n].metrics[f"network.{name}", role, orientation]
            assert found["calls"] == metrics["calls"]
            assert found["amax"] == pytest.approx(metrics["amax"], rel=1e-5)
        assert len(steps[n].metrics) == len(alone.metrics(n)) == 2 * (2 * 2 + 3)


def test_training_is_the_same_to_the_bit(train: Train) -> None:
    """Losses and final weights with the probe equal those without."""
    (watched, _), (bare, _) = train("a"), train(None)
    assert watched.losses == bare.losses
    assert len(bare.losses) == STEPS * ACCUMULATE
    for ours, theirs in zip(watched.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_last_step_of_an_epoch_may_be_short(train: Train, spooled: Any, tmp_path: Path) -> None:
    """Three batches an epoch: steps of two and of one, each with the mean of its own losses."""
    model, _ = train("a", rows=3 * ROWS)
    steps = spooled(tmp_path / "spool", "a")
    assert [step.metrics["network.0", "activation", "rowwise"]["calls"] for step in steps] == [2, 1, 2, 1]
    a, b, c = model.losses[:3]
    assert [step.header.sentinels["loss"] for step in steps[:2]] == pytest.approx([(a + b) / 2, c])


def test_optimizers_that_step_by_hand(train: Train, spooled: Any, tmp_path: Path) -> None:
    """Two optimizers that both step in every batch: a batch is a step."""
    model, trainer = train("a", optimizers=2, max_steps=2 * STEPS, accumulate_grad_batches=1,
                           gradient_clip_val=None)
    assert trainer.global_step == 2 * STEPS
    steps = spooled(tmp_path / "spool", "a")
    assert [step.header.step for step in steps] == list(range(STEPS))
    assert [step.header.sentinels["loss"] for step in steps] == pytest.approx(model.losses)
    assert {name for name, role, _ in steps[0].metrics if role == "exp_avg"} == {
        "network.0.weight", "network.2.weight"}


def test_a_step_that_the_scaler_skips_is_marked(train: Train, spooled: Any, tmp_path: Path) -> None:
    """FP16 with a loss scale: gradients are read unscaled; Lightning counts the skipped step, so do we."""
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    train("a", plugins=[MixedPrecision("16-mixed", "cpu", scaler)], max_steps=20)
    steps = spooled(tmp_path / "spool", "a")
    assert [step.header.step for step in steps] == list(range(20))
    skipped = [step.header.skipped for step in steps]
    assert skipped == sorted(skipped, reverse=True)
    assert 0 < sum(skipped) < 20
    for step in steps:
        assert (step.header.sentinels["nonfinite_count"] > 0) == step.header.skipped
        assert step.header.skipped or 0 < step.header.sentinels["grad_norm"] < 10


def test_a_resumed_training_goes_on_counting(train: Train, spooled: Any, tmp_path: Path) -> None:
    """From a checkpoint after step 1 the first number is 2, and the run is continued."""
    _, trainer = train("a", max_steps=2, rows=2 * ACCUMULATE * ROWS)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    train("a", checkpoint=tmp_path / "checkpoint", rows=2 * ACCUMULATE * ROWS)
    steps = spooled(tmp_path / "spool", "a")
    assert [(step.header.step, step.hello.resume) for step in steps] == [
        (0, False), (1, False), (2, True), (3, True)]


def test_an_exception_ends_the_scope_and_loses_no_step(train: Train, spooled: Any, tmp_path: Path) -> None:
    """What led to a crash is in the spool, and the model is left as it was."""
    from lightning.pytorch import Callback

    class Crash(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                self.model = pl_module
                raise RuntimeError("crash")

    crash = Crash()
    with pytest.raises(RuntimeError, match="crash"):
        train("a", callbacks=(crash,))
    assert [step.header.step for step in spooled(tmp_path / "spool", "a")] == [0, 1, 2]
    assert not crash.model.network[0]._forward_pre_hooks


def test_no_fault_of_the_probe_reaches_training(
    train: Train, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scope that breaks in every step: trained to the end, and told."""
    def broken(self: Scope, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Scope, "_close_step", broken)
    with caplog.at_level(logging.WARNING, "fp8scope"):
        _, trainer = train("a")
    assert trainer.global_step == STEPS
    assert "fp8scope: step failed: broken" in caplog.text
