"""Writing and reading through DCP: what fails is one clear error on every rank."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer import checkpoint_folder, manifest
from fp8scope_trainer.checkpoint_folder import NotSaved
from fp8scope_trainer.checkpoint_progress import LoadPlanner, Meter, SavePlanner
from fp8scope_trainer.checksum import SummedFiles
from fp8scope_trainer.manifest import Manifest
from fp8scope_trainer.rank_agreement import merged, on_first_rank

Content = dict[str, Any]
"""Nested dictionaries with tensors, DTensors of one mesh among them, in their leaves."""


def save_content(root: Path, content: Content, record: Manifest) -> Path:
    """A checkpoint of `content` in the folder `root`, which is its newest from then on; on every rank."""
    partial = on_first_rank(lambda: checkpoint_folder.begin(root, record.step))
    try:
        checksums = merged(write(content, partial, name=f"save step {record.step}"))
        return on_first_rank(lambda: _finish(root, partial, replace(record, crc32=checksums)))
    except NotSaved as failed:
        on_first_rank(lambda: checkpoint_folder.give_up(root))
        raise NotSaved(f"the checkpoint of step {record.step} could not be written in {root}: {failed}; "
                       "those before it are untouched") from failed


def write(content: Content, folder: Path, *, name: str) -> dict[str, str]:
    """DCP's files in `folder`; the checksums of those of this rank. `NotSaved` says why not."""
    writer = FileSystemWriter(folder)
    writer.fs = files = SummedFiles()
    try:
        with Meter(name) as meter, _quiet():
            state_dict_saver.save(content, storage_writer=writer,
                                  planner=SavePlanner(meter), no_dist=not dist.is_initialized())
    except CheckpointException as failed:
        raise NotSaved(_cause(failed)) from failed
    return files.checksums


def read(content: Content, reader: FileSystemReader, *, name: str) -> None:
    """Fills the tensors of `content`, in place; `Invalid` says what could not be read."""
    try:
        with Meter(name) as meter, _quiet():
            state_dict_loader.load(content, storage_reader=reader, planner=LoadPlanner(meter),
                                   no_dist=not dist.is_initialized())
    except CheckpointException as failed:
        raise Invalid("checkpoint", str(reader.checkpoint_id),
                      f"is damaged, and what was loaded of it must not be used: {_cause(failed)}") from failed


def records(reader: FileSystemReader) -> Metadata:
    """DCP's own records of a checkpoint; `Invalid` if they cannot be read."""
    try:
        return reader.read_metadata()
    except Exception as error:  # of many kinds, by what is wrong with the pickle
        raise Invalid("checkpoint", str(reader.checkpoint_id),
                      f"has a .metadata that cannot be read: {type(error).__name__}: {error}; copy it again, "
                      "or load an older checkpoint") from error


def _finish(root: Path, partial: Path, record: Manifest) -> Path:
    try:
        manifest.write(partial, replace(record, files=manifest.sizes(partial)))
    except OSError as error:
        raise NotSaved(str(error.strerror)) from error
    return checkpoint_folder.publish(root, record.step)


def _cause(failed: CheckpointException) -> str:
    rank, (error, _) = next(iter(failed.failures.items()))
    while error.__cause__ or error.__context__:  # a full disk, under what torch's writer made of it
        error = error.__cause__ or error.__context__ or error
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{text.splitlines()[0] if text else type(error).__name__} (rank {rank})"


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns that one process is one process, and of what torch itself has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
