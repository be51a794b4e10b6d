"""Starts the ranks of a test as forks of a server that has imported torch, which takes an interpreter 3 s."""

import multiprocessing
import os
import runpy
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

IMPORTED = (
    "pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "fp8scope.attachment", "fp8scope.scope", "fp8scope_trainer.adamw",
    "fp8scope_trainer.checkpoint", "fp8scope_trainer.convert", "fp8scope_trainer.decoder",
    "fp8scope_trainer.shard",
)


def forked(target: Callable[..., object], *args: Any, **named: Any) -> ForkServerProcess:
    """A process of that server, started. Its environment is that of the server's own start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=target, args=args, kwargs=named)
    process.start()
    return process


def run_ranks(function: Callable[..., object], *args: Any, ranks: int, patience: float = 280.0) -> None:
    """Runs `function(rank, *args)` once a rank, with the environment of this process, until all have ended.

    An AssertionError has the traceback of the ranks that failed; the others, which may wait for them, are
    ended then, and so are all after `patience` seconds. Not for CUDA.
    """
    with TemporaryDirectory() as folder:
        said = [Path(folder, str(rank)) for rank in range(ranks)]
        processes = [forked(_run, said[rank], dict(os.environ), function, rank, args)
                     for rank in range(ranks)]
        try:
            _wait(processes, time.monotonic() + patience)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        told = "\n".join(path.read_text() for path in said if path.exists())
        assert codes == [0] * ranks, f"exit codes {codes}, None: still alive after {patience} s\n{told}"


def run_job(file: Path, *arguments: object, ranks: int, strict: bool = False) -> None:
    """Runs the script `file` as `file RANK RANKS ARGUMENTS` once a rank, see `run_ranks`; with `strict`
    warnings are errors."""
    run_ranks(_script, str(file), ranks, [str(one) for one in arguments], strict, ranks=ranks)


def _wait(processes: list[ForkServerProcess], until: float) -> None:
    """Until all have ended, or one has failed."""
    while alive := [process for process in processes if process.exitcode is None]:
        left = until - time.monotonic()
        if left < 0 or any(process.exitcode for process in processes):
            return
        wait([process.sentinel for process in alive], left)


def _run(
    said: Path, environment: dict[str, str], function: Callable[..., object], rank: int, args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        function(rank, *args)
    except BaseException:
        said.write_text(traceback.format_exc())
        raise


def _script(rank: int, file: str, ranks: int, arguments: list[str], strict: bool) -> None:
    if strict:
        warnings.simplefilter("error")
    sys.argv = [file, str(rank), str(ranks), *arguments]
    runpy.run_path(file, run_name="__main__")
