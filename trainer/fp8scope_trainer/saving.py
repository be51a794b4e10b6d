"""When `fp8scope train` saves, and what it goes on from.

The position in the data is a function of the step, so nothing of it is saved but what the function depends
on: the text, the seed and the number of sequences a step. A job that resumed with others would read some
windows again and miss some; it is refused. Other ranks with the same number of sequences are welcome.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.checkpoint import load, save
from fp8scope_trainer.checkpoint_folder import NotSaved, check_writable, newest
from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.options import Saving, TrainOptions
from fp8scope_trainer.rank_agreement import on_first_rank

LOST = 1
"""Exit code of a job whose last checkpoint could not be saved."""


@dataclass(kw_only=True, slots=True, eq=False)
class Checkpoints:
    """Those of one job; of a job without any it does nothing."""

    saving: Saving | None
    model: nn.Module
    optimizer: StateOptimizer
    reads: dict[str, Any]
    """What the position in the data depends on, see `reads_of`."""
    rank: int = 0
    failed: bool = False
    """Whether the last one could not be saved, so that what was trained since is lost."""

    def first_step(self) -> int:
        """Loads the newest checkpoint if that was asked for and there is one; the number of the next step.

        `Invalid` if none could be written. Call it on every rank, before a probe is attached.
        """
        if self.saving is None:
            return 0
        folder = Path(self.saving.folder)
        on_first_rank(lambda: check_writable(folder))
        if not self.saving.resume or newest(folder) is None:
            return 0
        at = load(self.saving.folder, self.model, self.optimizer)
        for name, value in self.reads.items():
            if (before := at.extra.get(name)) != value:
                raise Invalid(name, value, f"the checkpoint was trained with {before}; with another the data "
                              "would not go on where it stopped")
        return at.step

    def after_step(self, step: int, *, last: bool) -> None:
        """Saves if it is time. Call it on every rank, between two steps.

        What cannot be saved does not end the job: it is told at once and counts in the exit code.
        """
        if self.saving is None:
            return
        done = step + 1
        if last or (self.saving.every is not None and done % self.saving.every == 0):
            try:
                save(self.saving.folder, self.model, self.optimizer, step=done, data_position=done,
                     extra=self.reads)
                self.failed = False
            except (NotSaved, Invalid) as failed:
                self.failed = True
                if self.rank == 0:
                    print(f"fp8scope train: {failed}; {_outlook(last)}", file=sys.stderr, flush=True)


def _outlook(last: bool) -> str:
    if last:
        return f"the job ends with exit code {LOST}"
    return f"training goes on, and ends with exit code {LOST} unless a later checkpoint is saved"


def reads_of(options: TrainOptions) -> dict[str, Any]:
    """What decides which windows a step reads."""
    return {"data": "standard library" if options.data is None else options.data.path,
            "seed": options.seed, "sequences_per_step": options.sequences_per_step}
