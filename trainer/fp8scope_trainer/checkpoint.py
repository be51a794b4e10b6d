"""Checkpoints of a job: saved on any number of ranks, loaded on any other, resumed to the bit.

    save("checkpoints", model, optimizer, step=500, data_position=500)
    at = load("checkpoints", model, optimizer).step

PyTorch's DCP writes and reads the tensors; each rank its own rows. What is in a checkpoint, by DCP's names:

    model.NAME                      the state_dict
    optimizer.state.NAME.KEY        moments, codes and scales as they are, never decoded; and `step`
    optimizer.param_groups          as torch's get_optimizer_state_dict gives them, for other readers
    histories.NAME.amaxes, ...      delayed scaling: without it the first steps would take other scales
    rng.rankN.cpu, .cuda            torch's generators, restored if the world size is the same

The same names as torch.distributed.checkpoint.state_dict gives, but not through its get_optimizer_state_dict:
that one runs a step of an optimizer that has made none, and a mistake in format would be cast away. Targets
are made from the checkpoint's own dtypes and shapes, after `checkpoint_check` has compared the manifests.

FP8 weights are not stored: their codes are a function of the fp32 weights, which are. Codes in a
checkpoint would be decoded and encoded again at load, which changed the scale of 5 % of blocks elsewhere
(NVIDIA/Megatron-LM#6666).
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer import checkpoint_folder, checksum, manifest
from fp8scope_trainer.checkpoint_check import LOG, RESTORED, check
from fp8scope_trainer.checkpoint_storage import Content, read, records, save_content
from fp8scope_trainer.job import Names, describe
from fp8scope_trainer.manifest import Job, Manifest
from fp8scope_trainer.place import filled
from fp8scope_trainer.rank_agreement import on_all_ranks, on_first_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a checkpoint says beyond model and optimizer."""

    path: Path
    step: int
    """The number of the next step."""
    data_position: int | None
    extra: dict[str, Any]
    random_restored: bool
    """Whether torch's generators go on where they were; False on another world size."""


def save(
    folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None, *, step: int,
    data_position: int | None = None, extra: dict[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint into `folder` and returns its path. Call it on every rank, between two steps.

    step: steps that have been made, the number of the next one. extra: what JSON can hold, of rank 0.
    Raises `Invalid` if something of somebody else is in the way, `NotSaved` if the disk is full or fails.
    Either way, and if the job is killed at any moment, the checkpoints that were there can be loaded.
    """
    names = Names(model)
    record = on_all_ranks(lambda: Manifest(
        step=step, data_position=data_position, world_size=_world_size(), job=describe(names, optimizer),
        versions=manifest.versions(), extra=extra or {}))
    return save_content(Path(folder), _content(names, optimizer, record.job), record)


def load(
    folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None, *,
    changed: Collection[str] = (), verify: bool = True,
) -> Loaded:
    """Loads the newest checkpoint of `folder`, or the one that `folder` is, on any number of ranks.

    Call it on every rank, after `convert`, `shard` and making the optimizer, and before a probe is attached.
    changed: names of options that differ from the checkpoint's on purpose and stay as the job has them, of
    groups (`weight_decay`, `seed`, `lr`), or `order`, `precision`, `recipe`, `histories`.
    verify: read every file once more before, and compare its checksum; the ranks share them.
    Raises `Invalid` with both sides of the first mismatch, before anything is loaded.
    """
    path = Path(on_first_rank(lambda: str(checkpoint_folder.find(folder))))
    record = on_first_rank(lambda: manifest.read_checked(path))
    names = Names(model)
    own = on_all_ranks(lambda: describe(names, optimizer))
    on_all_ranks(lambda: check(record, own, changed))
    if verify:
        on_all_ranks(lambda: _check_checksums(path, record))
    reader = FileSystemReader(path)
    known = on_all_ranks(lambda: records(reader)).state_dict_metadata
    content: Content = {"model": names.state} | _generators_to_load(record, known)
    if "histories" not in changed:
        content["histories"] = _history_tensors(names)
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        groups = on_all_ranks(lambda: _groups(optimizer, record.job, own, changed))
        content["optimizer"] = {"state": on_all_ranks(lambda: _targets(names, optimizer, record, known))}
    read(content, reader, name=f"load step {record.step}")
    set_model_state_dict(model, names.state)
    _restore_layers(names, content.get("histories", {}), record.job, changed)
    if optimizer is not None:  # through its own load_state_dict, which numbers parameters where we name them
        numbered = {number: content["optimizer"]["state"][name] for number, name in enumerate(own.optimized)
                    if name in content["optimizer"]["state"]}
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    return Loaded(path=path, step=record.step, data_position=record.data_position, extra=record.extra,
                  random_restored=_restore_random(content))


def _check_checksums(path: Path, record: Manifest) -> None:
    if not record.crc32 and _rank() == 0:
        LOG.warning("fp8scope: the checkpoint of step %d has no checksums, an older fp8scope wrote it: "
                    "damage inside a tensor would not be noticed", record.step)
    checksum.check(path, record.crc32, name=f"check step {record.step}", rank=_rank(), ranks=_world_size())


def _content(names: Names, optimizer: Optimizer | None, job: Job) -> Content:
    content: Content = {"model": names.state, "histories": _history_tensors(names)}
    content["rng"] = {f"rank{_rank()}": _generators()}
    if optimizer is None:
        return content
    optimized = names.optimized(optimizer)
    states = {name: dict(optimizer.state[parameter]) for name, (_, parameter) in optimized.items()
              if optimizer.state.get(parameter)}
    groups = [options | {"params": [name for name, (group, _) in optimized.items() if group == number]}
              for number, options in enumerate(job.groups)]
    content["optimizer"] = {"state": states, "param_groups": groups}
    return content


def _history_tensors(names: Names) -> dict[str, dict[str, Tensor]]:
    return {name: {"amaxes": one.amaxes, "pending": one.pending, "cursor": torch.tensor(one.cursor)}
            for name, one in names.histories().items()}


def _generators() -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _generators_to_load(record: Manifest, known: Collection[str]) -> Content:
    """Those of this rank that the checkpoint has; none on another world size."""
    if record.world_size != _world_size():
        return {}
    found = {key: value for key, value in _generators().items() if f"rng.rank{_rank()}.{key}" in known}
    return {"rng": {f"rank{_rank()}": found}} if found else {}


def _targets(
    names: Names, optimizer: Optimizer, record: Manifest, known: dict[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Empty states in the dtypes and shapes of the checkpoint, placed like their parameters."""
    targets: dict[str, dict[str, Tensor]] = {}
    for name, (_, parameter) in names.optimized(optimizer).items():
        for key in record.job.optimized[name].stored:
            entry = known.get(f"optimizer.state.{name}.{key}")
            if not isinstance(entry, TensorStorageMetadata):
                raise Invalid("checkpoint", f"of step {record.step}", f"lacks {key} of {name}; copy it again")
            device = torch.device("cpu") if key == "step" else parameter.device
            targets.setdefault(name, {})[key] = _target(parameter, entry, device)
    return targets


def _target(parameter: Tensor, entry: TensorStorageMetadata, device: torch.device) -> Tensor:
    if not isinstance(parameter, DTensor) or not entry.size:
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    return filled(parameter, entry.size, entry.properties.dtype, 0)


def _restore_layers(names: Names, histories: Content, saved: Job, changed: Collection[str]) -> None:
    live = names.histories()
    for name, tensors in histories.items():
        live[name].cursor = int(tensors["cursor"])
    for name, layer in names.layers().items():
        if "precision" not in changed and name in saved.layers:
            layer.set_precision(saved.layers[name].precision)


def _groups(optimizer: Optimizer, saved: Job, own: Job, changed: Collection[str]) -> list[dict[str, Any]]:
    """The optimizer's groups with the checkpoint's lr, for `load_state_dict`."""
    numbers = {name: number for number, name in enumerate(own.optimized)}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        members = [name for name, one in own.optimized.items() if one.group == number]
        options = {key: value for key, value in group.items() if key != "params"}
        options |= _restored(members, saved, changed)
        groups.append(options | {"params": [numbers[name] for name in members]})
    return groups


def _restored(members: list[str], saved: Job, changed: Collection[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in members:
        group = saved.groups[saved.optimized[name].group]
        for option in RESTORED:
            if option in changed or option not in group:
                continue
            if found.setdefault(option, group[option]) != group[option]:
                raise Invalid(option, found[option], f"the checkpoint has {group[option]} for {name}, in "
                                                     f"another group; load with changed=({option!r},)")
    return found


def _restore_random(content: Content) -> bool:
    if "rng" not in content:
        return False
    found = content["rng"][f"rank{_rank()}"]
    torch.set_rng_state(found["cpu"])
    if "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"])
    return True


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
