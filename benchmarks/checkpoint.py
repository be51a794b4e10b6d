"""What the checksums of a checkpoint cost: saving and loading beside PyTorch's DCP alone, on this disk.

    python benchmarks/checkpoint.py [--quick] [--json] [--folder DIR]

One process saves and loads a model of random fp32 weights, in turns by DCP alone, which sums nothing, and by
`checkpoint.save` and `load`; the fastest of the rounds. Loading comes after saving, so what is read is in the
page cache where there is memory for it: there checksums cost the most. `crc32` is zlib's own speed on bytes
in memory.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from fp8scope_trainer.checkpoint import load, save


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, float]:
    """MB/s of each way; a MB is 10^6 bytes."""
    model = nn.Linear(1000, megabytes * 250, bias=False)
    state = {"model": model.state_dict()}
    data = model.weight.detach().numpy().tobytes()
    times: dict[str, list[float]] = {}
    for number in range(1, rounds + 1):
        alone = str(folder / f"alone-{number}")
        for name, work in {
            "save, DCP alone": partial(state_dict_saver.save, state, checkpoint_id=alone, no_dist=True),
            "save": partial(save, folder, model, step=number),
            "load, DCP alone": partial(state_dict_loader.load, state, checkpoint_id=alone, no_dist=True),
            "load, not verified": partial(load, folder, model, verify=False),
            "load": partial(load, folder, model),
            "crc32": partial(zlib.crc32, data),
        }.items():
            times.setdefault(name, []).append(seconds(work))
    return {name: megabytes / min(one) for name, one in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100 MB, 3 rounds, instead of 500 MB, 5 rounds")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    parser.add_argument("--folder", help="on the disk to be measured (the one for temporary files)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # DCP says that one process is one process
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(Path(folder), *((100, 3) if arguments.quick else (500, 5)))
    for name, speed in results.items():
        print(f"{name:20} {speed:7.0f} MB/s")
    if arguments.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__}
        print(json.dumps({"benchmark": "checkpoint", "machine": machine, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
