"""When `fp8scope train` saves, and what it goes on from.

The position in the data is a function of the step, so nothing of it is saved but what the function depends
on: the text, the seed and the number of sequences a step. A job that resumed with others would read some
windows again and miss some; it is refused. Other ranks with the same number of sequences are welcome.
"""

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.checkpoint import load, save
from fp8scope_trainer.checkpoint_folder import NotSaved, newest
from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.options import Saving, TrainOptions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Checkpoints:
    """Those of one job; of a job without any it does nothing."""

    saving: Saving | None
    model: nn.Module
    optimizer: StateOptimizer
    reads: dict[str, Any]
    """What the position in the data depends on, see `reads_of`."""

    def first_step(self) -> int:
        """Loads the newest checkpoint if that was asked for and there is one; the number of the next step.

        Call it on every rank, before a probe is attached.
        """
        if self.saving is None or not self.saving.resume or newest(self.saving.folder) is None:
            return 0
        at = load(self.saving.folder, self.model, self.optimizer)
        for name, value in self.reads.items():
            if (before := at.extra.get(name)) != value:
                raise Invalid(name, value, f"the checkpoint was trained with {before}; with another the data "
                              "would not go on where it stopped")
        return at.step

    def after_step(self, step: int, *, last: bool) -> None:
        """Saves if it is time. Call it on every rank, between two steps. A full disk does not end the job."""
        if self.saving is None:
            return
        done = step + 1
        if last or (self.saving.every is not None and done % self.saving.every == 0):
            try:
                save(self.saving.folder, self.model, self.optimizer, step=done, data_position=done,
                     extra=self.reads)
            except NotSaved as failed:
                print(f"fp8scope train: {failed}", file=sys.stderr, flush=True)


def reads_of(options: TrainOptions) -> dict[str, Any]:
    """What decides which windows a step reads."""
    return {"data": "standard library" if options.data is None else options.data.path,
            "seed": options.seed, "sequences_per_step": options.batch * options.accumulate * options.ranks}
