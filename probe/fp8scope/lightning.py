"""fp8scope in the Trainer of Lightning.

    from fp8scope.lightning import ScopeCallback
    trainer = Trainer(..., callbacks=[ScopeCallback(run="pretrain-7b", every=10)])

A step is a batch after which an optimizer has stepped, with all batches whose gradients it accumulates.
"""

from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor
from torch.optim import Optimizer

from fp8scope.hosted import AttachOptions, HostedScope
from fp8scope.scope import Scope

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:  # the older name of the same package
        from pytorch_lightning import Callback


class ScopeCallback(Callback):
    """Attaches when training begins and closes when it ends. Options: those of `fp8scope.attach`."""

    def __init__(self, **options: Unpack[AttachOptions]) -> None:
        self._hosted = HostedScope(options)
        self._global_step = 0
        """The trainer's count when the step under way began; it counts every optimizer's steps."""

    @property
    def scope(self) -> Scope | None:
        """The scope, while training runs."""
        return self._hosted.scope

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """The model is wrapped, and a checkpoint loaded."""
        self._global_step = trainer.global_step
        first = trainer.global_step // max(1, len(trainer.optimizers))
        self._hosted.begin(pl_module, trainer.optimizers, step=first)

    def on_before_optimizer_step(
        self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Optimizer
    ) -> None:
        """After unscaling and before clipping."""
        self._hosted.read_gradients(optimizer)

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the batch's loss; closes the step if it was the last batch of one."""
        self._hosted.log(loss=_loss(trainer, pl_module, outputs))
        if trainer.global_step > self._global_step:
            self._global_step = trainer.global_step
            self._hosted.step()

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Training is over."""
        self._hosted.end()

    def on_exception(
        self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException
    ) -> None:
        """So is it here: what led there is sent."""
        self._hosted.end()


def _loss(trainer: "Trainer", pl_module: "LightningModule", outputs: Any) -> Tensor | None:
    """The loss that `training_step` returned; Lightning has divided it by the number of batches in a step."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return loss.detach() * (trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1)
