"""A job of test_checkpoint_folder.py that does nothing but save: `python saving_job.py FOLDER STEPS`.

All weights of step N are N. Prints JSON: the error that ended it, if any, and what is loaded after it.
"""

import json
import sys

import torch
from torch import nn

from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_trainer.checkpoint import load, save


def filled(step: int, megabytes: int = 1) -> nn.Module:
    """A model of that size whose every weight is `step`."""
    model = nn.Linear(512, 512 * megabytes, bias=False)
    torch.nn.init.constant_(model.weight, step)
    return model


def main(folder: str, steps: int, megabytes: int) -> None:
    error = ""
    try:
        for step in range(1, steps + 1):
            save(folder, filled(step, megabytes), step=step)
    except Fp8scopeError as failed:
        error = f"{type(failed).__name__}: {failed}"
    model = filled(0, megabytes)
    at = load(folder, model).step
    values = model.state_dict()["weight"].unique().tolist()
    print(json.dumps({"error": error, "step": at, "values": values}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
