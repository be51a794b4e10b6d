"""The callback for the Trainer of transformers, in real trainings of a small Llama."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import fp8scope
from fp8scope.huggingface import ScopeCallback
from fp8scope.scope import Scope
from fp8scope_protocol.errors import Invalid

STEPS, ACCUMULATE, ROWS, LENGTH, WIDTH = 4, 2, 3, 16, 32

Train = Callable[..., Trainer]


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(64, (60, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, tie_word_embeddings=tied, use_cache=False,
    ))


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains a Llama for STEPS steps, with a callback on `run` unless that is None."""

    def call(run: str | None, *, model: nn.Module | None = None, every: int = 1, resume: str | None = None,
             **arguments: Any) -> Trainer:
        wanted: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"), "max_steps": STEPS, "per_device_train_batch_size": ROWS,
            "gradient_accumulation_steps": ACCUMULATE, "max_grad_norm": 0.1, "logging_steps": 1,
            "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        callbacks: list[TrainerCallback] = []
        if run is not None:
            callbacks.append(
                ScopeCallback(run=run, every=every, detail_every=1, collector="offline",
                              spool=tmp_path / "spool"))
        trainer = Trainer(model or llama(), TrainingArguments(**(wanted | arguments)), train_dataset=Tokens(),
                          eval_dataset=Tokens(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return call


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def linears(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_each_optimizer_step_is_a_step_with_every_linear(train: Train, spooled: Any, tmp_path: Path) -> None:
    """With accumulation, and evaluations in between: the right steps, all series, the trainer's numbers."""
    trainer = train("a", every=2, eval_strategy="steps", eval_steps=1)
    steps = spooled(tmp_path / "spool", "a")
    assert [step.header.step for step in steps] == list(range(STEPS))
    assert [bool(step.series) for step in steps] == [True, False, True, False]
    names = linears(llama())
    assert len(names) == 15
    for step in (steps[0], steps[2]):
        for name in names:
            for role in ("activation", "gradient"):
                for orientation in ("rowwise", "columnwise"):
                    found = step.metrics[name, role, orientation]
                    assert found["calls"] == ACCUMULATE
                    assert found["elements"] % (ACCUMULATE * ROWS * LENGTH) == 0
            for role in ("weight", "exp_avg", "exp_avg_sq"):
                assert step.metrics[f"{name}.weight", role, "rowwise"]["elements"] > 0
        head = step.metrics["lm_head", "activation", "rowwise"]
        assert head["elements"] == ACCUMULATE * ROWS * LENGTH * WIDTH
    for key, ours in (("loss", "loss"), ("grad_norm", "grad_norm"), ("learning_rate", "lr")):
        found = [step.header.sentinels[ours] for step in steps]
        assert found == pytest.approx(logged(trainer, key), rel=1e-6)
    assert all(math.isfinite(value) for step in steps for value in step.header.sentinels.values())
    assert min(logged(trainer, "grad_norm")) > 0.1, "nothing was clipped"
    assert [event for step in steps for event in step.header.events] == []
    assert not any(step.header.skipped for step in steps)
    assert {one.name for one in steps[0].hello.unobserved} == {"model.embed_tokens"}


def test_training_is_the_same_to_the_bit(train: Train) -> None:
    """Losses and final weights with the probe equal those without."""
    models = llama(), llama()
    watched, bare = train("a", model=models[0]), train(None, model=models[1])
    assert logged(watched, "loss") == logged(bare, "loss")
    assert len(logged(bare, "loss")) == STEPS
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_checkpointing_autocast_and_a_tied_head(
    train: Train, spooled: Any, tmp_path: Path, checkpointing: bool | None, bf16: bool
) -> None:
    """What checkpointing computes again counts once; a tied weight has one name, and the other as alias."""
    again: dict[str, Any] = {"activation_checkpointing": checkpointing is not None}
    if checkpointing is not None:
        again["activation_checkpointing_kwargs"] = {"use_reentrant": checkpointing}
    train("a", model=llama(tied=True), max_steps=1, bf16=bf16, **again)
    (step,) = spooled(tmp_path / "spool", "a")
    assert step.header.events == ()
    for name in linears(llama()):
        for role in ("activation", "gradient"):
            assert step.metrics[name, role, "rowwise"]["calls"] == ACCUMULATE
    tied = [one for one in step.series if one.name == "model.embed_tokens.weight"]
    assert {one.role for one in tied} == {"weight", "exp_avg", "exp_avg_sq"}
    assert {one.module for one in tied} == {"lm_head"}
    assert {one.aliases for one in tied} == {("lm_head.weight",)}


def test_a_resumed_training_goes_on_counting(train: Train, spooled: Any, tmp_path: Path) -> None:
    """From a checkpoint after step 1 the first number is 2, and the run is continued."""
    train("a", max_steps=2, save_strategy="steps", save_steps=2)
    train("a", resume=str(tmp_path / "out" / "checkpoint-2"))
    steps = spooled(tmp_path / "spool", "a")
    assert [(step.header.step, step.hello.resume) for step in steps] == [
        (0, False), (1, False), (2, True), (3, True)]
    assert steps[0].header.attempt != steps[3].header.attempt


def test_sparse_logs_do_not_mix_two_norms(train: Train, spooled: Any, tmp_path: Path) -> None:
    """Every second step logged: the loss is there, the norm is the clipped one in all steps."""
    trainer = train("a", logging_steps=2)
    steps = [step.header.sentinels for step in spooled(tmp_path / "spool", "a")]
    assert ["loss" in step for step in steps] == [False, True, False, True]
    assert [step["loss"] for step in steps[1::2]] == pytest.approx(logged(trainer, "loss"))
    assert [step["grad_norm"] for step in steps] == pytest.approx([0.1] * STEPS, rel=1e-3)


def test_no_fault_of_the_probe_reaches_training(
    train: Train, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A model that has a probe already, a scope that breaks in every step: trained to the end, and told."""
    model = llama()
    with fp8scope.attach(model, run="other", collector="offline", spool=tmp_path / "spool"):
        assert train("a", model=model).state.global_step == STEPS

    def broken(self: Scope, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Scope, "_close_step", broken)
    with caplog.at_level(logging.WARNING, "fp8scope"):
        assert train("a").state.global_step == STEPS
    told = [record for record in caplog.records if record.name == "fp8scope"]
    assert "attaching failed" in told[0].message
    assert "has a probe already" in told[0].message
    assert [record.message for record in told if "step failed" in record.message] == [
        "fp8scope: step failed: broken"] * STEPS
    assert sum(bool(record.exc_info) for record in told) == 2


@pytest.mark.parametrize("options", [{}, {"run": ""}, {"run": "a", "evry": 1}, {"run": "a", "every": 0},
                                     {"run": "a", "start_step": 3}, {"run": "a", "collector": "ftp://x"},
                                     {"run": "a", "rename": "stage1."}])
def test_wrong_options_are_refused_before_training(options: dict[str, Any]) -> None:
    """When the callback is made."""
    with pytest.raises((Invalid, TypeError)):
        ScopeCallback(**options)
