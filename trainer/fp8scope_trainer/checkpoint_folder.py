"""A folder of checkpoints, in which a whole one is always found.

    FOLDER/step-00000005/     .metadata and *.distcp as DCP writes them; fp8scope.json, the manifest
    FOLDER/latest             the name of the newest of them
    FOLDER/.fp8scope-partial  one that is being written, or that was given up half-way

A checkpoint is written beside the others, made durable, renamed to its name, and only then does `latest` name
it: at every moment `latest` names a checkpoint that is whole. One that replaces another of the same step gets
a name of its own (step-00000005.1); the older goes after `latest` has moved on.

What is not ours (see `is_whole`) is never replaced or removed. Rejected: one rename over the older
checkpoint, which no system does for folders that hold files.
"""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryFile

from fp8scope_protocol.errors import Fp8scopeError, Invalid

MANIFEST = "fp8scope.json"
LATEST = "latest"
PARTIAL = ".fp8scope-partial"
CONVERT = "fp8scope convert-checkpoint FROM TO"


class NotSaved(Fp8scopeError):
    """A checkpoint could not be written. Those before it are as they were."""


def check_writable(folder: Path) -> None:
    """`Invalid` unless files can be written in `folder`, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        raise Invalid("checkpoint folder", str(folder),
                      f"cannot be written in: {error.strerror}; name another folder") from error


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint in; what an interrupted save left there is removed.

    Raises `Invalid` if `folder` is no folder, or holds something of somebody else under our names.
    """
    if folder.exists() and not folder.is_dir():
        raise Invalid("checkpoint folder", str(folder), "is a file; name a folder")
    pointer = folder / LATEST
    if pointer.exists() and not (pointer.is_file() and _step_of(_read(pointer)) is not None):
        raise Invalid("checkpoint folder", str(folder),
                      f"holds a {LATEST} that is not ours and would be replaced; name another folder")
    foreign = [one.name for one in _of_step(folder, step) if not is_whole(one)]
    if foreign:
        raise Invalid("checkpoint folder", str(folder),
                      f"holds {', '.join(foreign)} without {MANIFEST}, which is no checkpoint of ours and "
                      "would be replaced; name another folder, or move it away")
    partial = folder / PARTIAL
    try:
        shutil.rmtree(partial, ignore_errors=not partial.exists())
        partial.mkdir(parents=True)
    except OSError as error:
        raise NotSaved(f"no checkpoint can be written in {folder}: {error.strerror}") from error
    return partial


def publish(folder: Path, step: int) -> Path:
    """Gives the checkpoint that was written in `begin`'s folder its name, and moves `latest` on to it."""
    older, partial = _of_step(folder, step), folder / PARTIAL
    final = _free_name(folder, step)
    try:
        for path in (*partial.iterdir(), partial):
            _make_durable(path)
        partial.rename(final)
        pointer = folder / f"{LATEST}.new"
        pointer.write_text(final.name + "\n")
        _make_durable(pointer)
        pointer.replace(folder / LATEST)
        _make_durable(folder)
    except OSError as error:
        raise NotSaved(f"the checkpoint of step {step} could not be finished in {folder}: "
                       f"{error.strerror}; the one before it stays the latest") from error
    for one in older:
        shutil.rmtree(one, ignore_errors=True)
    return final


def give_up(folder: Path) -> None:
    """Removes what was begun."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def newest(folder: str | Path) -> Path | None:
    """The checkpoint that `latest` names, or the one of the highest step; None if there is none yet."""
    folder = Path(folder)
    pointer = folder / LATEST
    if pointer.is_file() and _step_of(name := _read(pointer)) is not None and is_whole(folder / name):
        return folder / name
    whole = [one for one in folder.glob("step-*") if is_whole(one)]
    return max(whole, key=lambda one: (_step_of(one.name) or 0, one.name), default=None)


def find(folder: str | Path) -> Path:
    """The checkpoint meant by `folder`: itself, or the newest in it. `Invalid` says what else is there."""
    folder = Path(folder)
    if is_whole(folder):
        return folder
    if (found := newest(folder)) is not None:
        return found
    if folder.is_file():
        rule = f"is a file; what torch.save wrote is converted first: {CONVERT}"
    elif not folder.is_dir():
        rule = "does not exist"
    elif (folder / ".metadata").exists():
        rule = f"is a DCP checkpoint without {MANIFEST}; one of plain torch is converted first: {CONVERT}"
    elif (folder / PARTIAL).exists():
        rule = "holds only a checkpoint that was never finished"
    else:
        rule = "holds no checkpoint"
    raise Invalid("checkpoint", str(folder), rule)


def is_whole(path: Path) -> bool:
    """Whether `path` is a checkpoint of ours: the manifest is written last."""
    return (path / MANIFEST).is_file()


def _of_step(folder: Path, step: int) -> list[Path]:
    return [one for one in folder.glob("step-*") if _step_of(one.name) == step]


def _free_name(folder: Path, step: int) -> Path:
    name, again = f"step-{step:08d}", 0
    while (folder / name).exists():
        again += 1
        name = f"step-{step:08d}.{again}"
    return folder / name


def _step_of(name: str) -> int | None:
    digits = name.removeprefix("step-").partition(".")[0]
    return int(digits) if name.startswith("step-") and digits.isdecimal() and "/" not in name else None


def _read(pointer: Path) -> str:
    return pointer.read_bytes()[:256].decode(errors="replace").strip()


def _make_durable(path: Path) -> None:
    """Until now a loss of power could have taken it back."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
