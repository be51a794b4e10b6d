"""A checkpoint in memory, whole, as one process holds it to convert it: ours, or plain torch's.

Three ways to store one are read and written:

    fp8scope   a folder of `checkpoint.save`
    dcp        torch.distributed.checkpoint.save({"model": ..., "optimizer": ...}) as of get_state_dict
    torch      torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

The last one numbers parameters. Which number is whose is known if the optimizer was made of named parameters
(`param_names`), or if it has one group that holds what the state_dict holds, in its order, shape by shape; a
guess that could be wrong is refused instead.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer import checkpoint_folder, checksum, manifest
from fp8scope_trainer.checkpoint_folder import NotSaved
from fp8scope_trainer.checkpoint_storage import read, records, save_content, write
from fp8scope_trainer.job import entry_of, stored_dtypes
from fp8scope_trainer.manifest import Job, Manifest, Optimized, plain

TORCH_ADAMW = "torch.AdamW"
UNKNOWN_TO_OURS = ("amsgrad", "maximize")
"""Options of torch's AdamW that change what a step does and that ours does not have."""
COMMON = ("lr", "betas", "eps", "weight_decay", "initial_lr")
"""Options that both have."""

States = dict[str, dict[str, Tensor]]


@dataclass(kw_only=True)
class Whole:
    """Everything of a checkpoint. `content` has the names of `checkpoint`, without `optimizer`."""

    record: Manifest
    content: dict[str, Any]
    states: States = field(default_factory=dict)
    """Name of the parameter -> key -> tensor."""

    @property
    def job(self) -> Job:
        return self.record.job


def read_whole(path: Path) -> Whole:
    """The checkpoint in `path`, of whichever kind."""
    if path.is_file():
        return _read_torch(path)
    if (path / ".metadata").exists() and not checkpoint_folder.is_whole(path):
        return _of_torch(*_model_and_optimizer(_read_dcp(path), path), path)
    found = checkpoint_folder.find(path)
    record = manifest.read_checked(found)
    checksum.check(found, record.crc32, name=f"check {found.name}")
    content = _read_dcp(found)
    states = content.pop("optimizer", {}).get("state", {})
    return Whole(record=record, content=content, states=states)


def write_ours(whole: Whole, folder: Path) -> Path:
    """As `checkpoint.save` would."""
    groups = [options | {"params": [name for name, one in whole.job.optimized.items() if one.group == number]}
              for number, options in enumerate(whole.job.groups)]
    optimizer = {"optimizer": {"state": whole.states, "param_groups": groups}} if whole.job.optimizer else {}
    return save_content(folder, whole.content | optimizer, whole.record)


def write_dcp(whole: Whole, folder: Path) -> Path:
    """For dcp.load into what get_state_dict gives of a torch.optim.AdamW."""
    _check_free(folder)
    groups = [_torch_options(options) | {"params": _members(whole.job, number)}
              for number, options in enumerate(whole.job.groups)]
    content = {"model": whole.content["model"],
               "optimizer": {"state": whole.states, "param_groups": groups}}
    partial = folder.with_name(folder.name + ".partial")
    try:
        write(content, partial, name=f"write {folder.name}")
    except NotSaved as failed:
        shutil.rmtree(partial, ignore_errors=True)
        raise NotSaved(f"{folder} could not be written: {failed}") from failed
    partial.rename(folder)
    return folder


def write_torch(whole: Whole, path: Path) -> Path:
    """For torch.load, model.load_state_dict and torch.optim.AdamW.load_state_dict."""
    _check_free(path)
    numbers = {name: i for number in range(len(whole.job.groups))
               for i, name in enumerate(_members(whole.job, number), _before(whole.job, number))}
    groups = [_torch_options(options) | {"params": [numbers[name] for name in _members(whole.job, number)],
                                         "param_names": _members(whole.job, number)}
              for number, options in enumerate(whole.job.groups)]
    states = {numbers[name]: state for name, state in whole.states.items()}
    partial = path.with_name(path.name + ".partial")
    try:
        torch.save({"model": whole.content["model"], "step": whole.record.step,
                    "optimizer": {"state": states, "param_groups": groups}}, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch's writer tells of a full disk by the latter
        partial.unlink(missing_ok=True)
        raise NotSaved(f"{path} could not be written: {error}") from error
    return path


def _read_dcp(path: Path) -> dict[str, Any]:
    """All entries, nested as they were saved."""
    reader = FileSystemReader(path)
    known = records(reader)
    if not isinstance(known.planner_data, Mapping):
        raise Invalid("checkpoint", str(path), "was not written by torch.distributed.checkpoint.save")
    nested: dict[str, Any] = {}
    for name, way in known.planner_data.items():
        entry = known.state_dict_metadata[name]
        place: Any = nested
        for part, after in pairwise(way):
            place = _place(place, part, list if isinstance(after, int) else dict)
        _place(place, way[-1], lambda: None)
        place[way[-1]] = (torch.empty(entry.size, dtype=entry.properties.dtype)
                          if isinstance(entry, TensorStorageMetadata) else None)
    read(nested, reader, name=f"read {path.name}")
    return nested


def _place(within: Any, key: str | int, make: Callable[[], Any]) -> Any:
    """What `within`, a dictionary or a list that grows, has under `key`; made if there is nothing."""
    if isinstance(key, str):
        return within.setdefault(key, make())
    while len(within) <= key:
        within.append(None)
    if within[key] is None:
        within[key] = make()
    return within[key]


def _model_and_optimizer(content: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    for model, optimizer in (("model", "optimizer"), ("model_state_dict", "optimizer_state_dict")):
        if isinstance(content.get(model), Mapping) and isinstance(content.get(optimizer), Mapping):
            return dict(content[model]), dict(content[optimizer])
    raise Invalid("checkpoint", str(path),
                  f"holds {', '.join(map(str, content)) or 'nothing'}; it must hold model and optimizer")


def _read_torch(path: Path) -> Whole:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by what is wrong with the file
        text = str(error).strip().splitlines()
        raise Invalid("checkpoint", str(path), "is no file of torch.save that can be read: "
                      f"{text[0] if text else type(error).__name__}") from error
    if not isinstance(content, Mapping):
        raise Invalid("checkpoint", str(path), "must hold a dictionary with model and optimizer")
    model, optimizer = _model_and_optimizer(content, path)
    groups = optimizer["param_groups"]
    names = _names_of_numbers(model, optimizer, path)
    named = {"state": {names[i]: state for i, state in optimizer["state"].items()},
             "param_groups": [group | {"params": [names[i] for i in group["params"]]} for group in groups]}
    return _of_torch(model, named, path)


def _names_of_numbers(model: dict[str, Any], optimizer: dict[str, Any], path: Path) -> dict[int, str]:
    groups = optimizer["param_groups"]
    if all("param_names" in group for group in groups):
        return {i: name for group in groups
                for i, name in zip(group["params"], group["param_names"], strict=True)}
    numbers, places = [i for group in groups for i in group["params"]], set()
    names = []  # of a tied weight the first, as in model.parameters()
    for name, value in model.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape)
            if place not in places:
                names.append(name)
            places.add(place)
    states = optimizer["state"]
    fits = len(groups) == 1 and len(names) == len(numbers) and all(
        value.dim() == 0 or value.shape == model[name].shape
        for i, name in zip(numbers, names, strict=True) for value in states.get(i, {}).values()
        if isinstance(value, Tensor))
    if not fits:
        raise Invalid("checkpoint", str(path),
                      "does not say which state is of which parameter; make the optimizer from "
                      "model.named_parameters(), or save with torch.distributed.checkpoint")
    return dict(zip(numbers, names, strict=True))


def _of_torch(model: dict[str, Any], optimizer: dict[str, Any], path: Path) -> Whole:
    states, groups = _states_and_groups(optimizer, path)
    step = max((int(state["step"]) for state in states.values()), default=0)
    optimized = {}
    for number, group in enumerate(groups):
        for name in group["params"]:
            optimized[name] = Optimized(number=None, group=number, states="fp32",
                                        stored=stored_dtypes(states.get(name, {})))
    options = [{key: plain(group[key]) for key in COMMON if key in group} for group in groups]
    job = Job(model={name: entry_of(value) for name, value in model.items()}, optimizer=TORCH_ADAMW,
              groups=options, optimized=optimized)
    record = Manifest(step=step, world_size=1, versions=manifest.versions(), job=job)
    return Whole(record=record, content={"model": model}, states=states)


def _states_and_groups(optimizer: dict[str, Any], path: Path) -> tuple[States, list[dict[str, Any]]]:
    if "state" not in optimizer or "param_groups" not in optimizer:
        raise Invalid("checkpoint", str(path), "has an optimizer that is flattened; save it without "
                                               "flatten_optimizer_state_dict")
    states, groups = optimizer["state"], optimizer["param_groups"]
    for name, state in states.items():
        if state.keys() != {"step", "exp_avg", "exp_avg_sq"} or state["exp_avg"].dtype != torch.float32:
            raise Invalid("checkpoint", str(path), f"holds {', '.join(state)} of {name}; of plain torch an "
                          "AdamW without amsgrad, in fp32, can be converted")
    for group in groups:
        for option in UNKNOWN_TO_OURS:
            if group.get(option):
                raise Invalid(option, group[option], "is not an option of fp8scope's AdamW")
    return states, groups


def _torch_options(options: dict[str, Any]) -> dict[str, Any]:
    common = {key: tuple(value) if isinstance(value, list) else value
              for key, value in options.items() if key in COMMON}
    return torch.optim.AdamW([torch.zeros(1)]).defaults | common


def _members(job: Job, number: int) -> list[str]:
    return [name for name, one in job.optimized.items() if one.group == number]


def _before(job: Job, number: int) -> int:
    return sum(one.group < number for one in job.optimized.values())


def _check_free(path: Path) -> None:
    if path.exists():
        raise Invalid("to", str(path), "is there already; name a path that is not")
