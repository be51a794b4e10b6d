"""The processes of a training job: starting N ranks, joining them, stopping all at one step."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fp8scope_protocol.errors import Invalid


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among the ranks of its job."""

    rank: int
    size: int
    device: torch.device

    @property
    def sharded(self) -> bool:
        """Whether there is a process group: always on a GPU, where FSDP also keeps the fp32 master."""
        return dist.is_initialized()

    def agree(self, loss: torch.Tensor, stop: bool) -> tuple[float, bool]:
        """The mean loss, and whether any rank wants to stop: the same answer on every rank."""
        both = torch.stack((loss.detach().double(), torch.tensor(float(stop), device=loss.device)))
        if self.size > 1:
            dist.all_reduce(both)
        mean, stopping = both.tolist()
        return mean / self.size, stopping > 0


@dataclass(slots=True)
class StopSignal:
    """Set by SIGINT and SIGTERM, and when the process that started this rank has died."""

    number: int = 0
    parent: int = field(default_factory=os.getppid)

    @property
    def asked(self) -> bool:
        return self.number != 0 or os.getppid() != self.parent

    @property
    def exit_code(self) -> int:
        return 128 + (self.number or signal.SIGTERM)


def launched() -> bool:
    """Whether this process is one of the ranks of a launcher."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "WORLD_SIZE" in os.environ


def launch(ranks: int, argv: list[str]) -> int:
    """Runs `fp8scope train ARGV` as `ranks` processes of this machine; returns the job's exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(ranks)))
    command = ["--nnodes", "1", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "--max-restarts", "0",
               "--module", "--",  # what follows has options that look like torchrun's own
               "fp8scope_trainer.train", *argv]
    try:
        torchrun.main(command)
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        _, failure = failed.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


@contextmanager
def joined(ranks: int) -> Iterator[World]:
    """The world of this process; the process group is left on the way out."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    here = int(os.environ.get("LOCAL_RANK", "0"))
    if size != max(ranks, 1) and launched():
        raise Invalid("--ranks", ranks, f"must be {size}, the number of processes that were launched")
    device = _device(ranks, here)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    elif device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        yield World(rank=rank, size=size, device=device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Has torch replace what adds in no fixed order, such as a GPU's backward of embedding and attention.

    It refuses what it cannot replace. Enter it before the first product on a GPU: that fixes cuBLAS' setting.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Turns SIGINT and SIGTERM into a flag that the loop reads; a second SIGINT interrupts at once."""
    stop = StopSignal()

    def note(number: int, _: FrameType | None) -> None:
        if stop.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        stop.number = number

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """Ends a rank without the interpreter's teardown.

    A gloo thread frees the tensors of finished work, for which it needs the GIL, whenever it comes to it, and
    nothing joins it as long as FSDP holds its group. Python ends threads that ask for the GIL while it
    finalizes, torch turns that into an abort, and a job that had done everything failed: 1 exit in 15 on two
    busy cores.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _device(ranks: int, local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks > torch.cuda.device_count():
        raise Invalid("--ranks", ranks, f"must be at most {torch.cuda.device_count()}, the number of GPUs; "
                                        "CUDA_VISIBLE_DEVICES= trains on the CPU")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _threads(ranks: int) -> int:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // ranks)
