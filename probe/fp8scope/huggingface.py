"""fp8scope in the Trainer of Hugging Face's transformers.

    from fp8scope.huggingface import ScopeCallback
    trainer = Trainer(..., callbacks=[ScopeCallback(run="finetune-8b", every=10)])

A step is an optimizer step, whatever the accumulation, with the trainer's own number: what the trainer calls
step 1 when it has ended is step 0 here. It closes when the next one begins, as the trainer logs in between.
"""

from typing import Any, Unpack

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fp8scope.hosted import AttachOptions, HostedScope
from fp8scope.scope import Scope


class ScopeCallback(TrainerCallback):
    """Attaches when training begins and closes when it ends. Options: those of `fp8scope.attach`."""

    def __init__(self, **options: Unpack[AttachOptions]) -> None:
        self._hosted = HostedScope(options)
        self._finished: int | None = None
        """Number of the step that has ended and is not closed."""
        self._logs_all = False
        """Whether the trainer logs after every step."""

    @property
    def scope(self) -> Scope | None:
        """The scope, while training runs."""
        return self._hosted.scope

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model is wrapped, and a checkpoint loaded."""
        self._finished = None
        self._logs_all = args.logging_strategy == "steps" and state.logging_steps == 1
        self._hosted.begin(kwargs["model"], (kwargs["optimizer"],), step=state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first micro-batch of a step."""
        self._close_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimizer has stepped, or would have; logging, evaluation and saving follow."""
        self._finished = state.global_step - 1

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, Any] | None = None, **kwargs: Any,
    ) -> None:
        """Loss: the trainer's, a mean since it logged last. The norm before clipping, if known for all."""
        if self._finished is not None and logs is not None:
            norm = logs.get("grad_norm") if self._logs_all else None
            self._hosted.log(loss=logs.get("loss"), grad_norm=norm)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training is over; an exception does not come by here, then the process's exit closes the scope."""
        self._close_step()
        self._hosted.end()

    def _close_step(self) -> None:
        finished, self._finished = self._finished, None
        if finished is not None:
            self._hosted.step(finished)
