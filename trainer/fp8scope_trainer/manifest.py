"""What a checkpoint says of itself: `fp8scope.json`, small, readable, and checked when it is loaded.

DCP knows names, shapes and dtypes. It does not know that bytes are codes, of which format, in which blocks,
by which optimizer and with which options, and would load any of them into any other of the same shape.
"""

import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import torch

from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.checkpoint_folder import MANIFEST

LAYOUT = 1
"""Goes up when an older fp8scope could not load a checkpoint any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimized:
    """One parameter in the optimizer."""

    number: int | None
    """Its place in the optimizer, which names its random numbers; None: written by something else."""
    group: int
    """Index into `Job.groups`."""
    states: str
    """Format of its moments: `fp32`, `int8 in blocks of 1024`."""
    stored: dict[str, str] = field(default_factory=dict)
    """Dtype of each state; empty before the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer whose precision can be switched."""

    precision: Precision
    recipe: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model and its optimizer, as far as a checkpoint depends on them. Of a job, or of a checkpoint."""

    model: dict[str, str]
    """Entries of the state_dict: `float32[128, 256]`."""
    layers: dict[str, Layer] = field(default_factory=dict)
    histories: dict[str, int] = field(default_factory=dict)
    """Length of each amax history."""
    optimizer: str = ""
    """Library and class: `fp8scope_trainer.AdamW`, `torch.AdamW`; empty without one."""
    rule: str = ""
    """The update rule by the optimizer's own name for it, if it has one."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Options of each parameter group."""
    optimized: dict[str, Optimized] = field(default_factory=dict)
    embeddings: list[str] = field(default_factory=list)
    """Parameters of embeddings, which keep fp32 moments when states are converted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A whole `fp8scope.json`."""

    layout: int = LAYOUT
    step: int
    """Optimizer steps that have been made; the number of the next one."""
    data_position: int | None = None
    """Where the data goes on, in units of whoever reads it."""
    world_size: int
    versions: dict[str, str]
    job: Job
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each file."""
    crc32: dict[str, str] = field(default_factory=dict)
    """Of each file, in hexadecimal; empty in checkpoints that were written before there were checksums."""
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_whole("step", self.step)
        if self.data_position is not None:
            check_whole("data_position", self.data_position)
        try:
            json.dumps(self.extra, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise Invalid("extra", self.extra, f"must be what JSON can hold: {error}") from error


def read(path: Path) -> Manifest:
    """The manifest of the checkpoint in `path`; `Invalid` if it is no manifest or a newer one."""
    try:
        data = (path / MANIFEST).read_bytes()
        layout = msgspec.json.decode(data, type=dict[str, Any]).get("layout")
        if isinstance(layout, int) and layout > LAYOUT:
            raise Invalid("checkpoint", str(path), f"has layout {layout}, of a newer fp8scope; this one "
                                                   f"({versions()['fp8scope']}) knows up to {LAYOUT}")
        return msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        raise Invalid("checkpoint", str(path), f"cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise Invalid("checkpoint", str(path), f"has no {MANIFEST} that can be read: {error}") from error


def write(path: Path, manifest: Manifest) -> None:
    """Beside the files of DCP in `path`."""
    (path / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1, allow_nan=False) + "\n")


def sizes(path: Path) -> dict[str, int]:
    """Bytes of each file of DCP in `path`."""
    return {one.name: one.stat().st_size for one in sorted(path.iterdir()) if one.name != MANIFEST}


def read_checked(path: Path) -> Manifest:
    """As `read`; `Invalid` if a file is missing or has another size: a copy that is not whole."""
    manifest = read(path)
    found = sizes(path)
    for name, size in manifest.files.items():
        if found.get(name) != size:
            now = f"has {found[name]:,} bytes" if name in found else "is missing"
            raise Invalid("checkpoint", str(path),
                          f"its file {name} {now} and should have {size:,} bytes; copy it again")
    return manifest


def versions() -> dict[str, str]:
    """Of what writes or reads a checkpoint."""
    try:
        own = version("fp8scope")
    except PackageNotFoundError:
        own = "not installed"  # imported from a folder
    return {"fp8scope": own, "torch": str(torch.__version__)}


def plain(value: Any) -> Any:
    """`value` of a group's option as JSON gives it back."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
