"""Whether a checkpoint is one of this job: every difference is an error that names both sides.

lr is not compared but taken from the checkpoint: schedules move it. So are amax histories and the precision
of layers, which live on. `changed` names what may differ on purpose, and then the job's own value stays.
"""

import logging
from collections.abc import Collection
from typing import Any

from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_trainer.checkpoint_folder import CONVERT
from fp8scope_trainer.manifest import Job, Manifest, versions

LOG = logging.getLogger("fp8scope")

RESTORED = ("lr", "initial_lr")
"""Options of a group that are taken from the checkpoint."""
FORMATS = ("states", "block")
"""Options of a group that are compared parameter by parameter, by what they come to."""
PER_JOB = ("order", "precision", "recipe", "histories")
SHOWN = 3
AS_SAVED = "make the model as it was when it was saved"


def check(manifest: Manifest, own: Job, changed: Collection[str]) -> None:
    """`Invalid` if a checkpoint of `manifest` is not one of the job `own`."""
    saved = manifest.job
    _check_changed(changed, own)
    _check_model(saved, own)
    _check_layers(saved, own, changed)
    if own.optimizer:
        _check_optimizer(saved, own)
        _check_states(saved, own)
        _check_options(saved, own, changed)
    for name, mine in versions().items():
        if (theirs := manifest.versions.get(name)) != mine:
            LOG.warning("fp8scope: the checkpoint was written with %s %s, this is %s: nothing is lost, but "
                        "training may go on with other bits", name, theirs, mine)


def _check_changed(changed: Collection[str], own: Job) -> None:
    known = {*PER_JOB, *(name for group in own.groups for name in group)} - set(FORMATS)
    for name in changed:
        if name not in known:
            raise UnknownName("changed", name, known)


def _check_model(saved: Job, own: Job) -> None:
    _same_names("model", "entries", saved.model, own.model)
    for name, mine in own.model.items():
        if (theirs := saved.model[name]) != mine:
            raise Invalid(name, mine, f"the checkpoint holds {theirs}; {AS_SAVED}")


def _check_layers(saved: Job, own: Job, changed: Collection[str]) -> None:
    if saved.histories != own.histories and "histories" not in changed:
        raise Invalid("amax histories", own.histories or None,
                      f"the checkpoint holds {saved.histories or None}; {AS_SAVED}: the same layers under "
                      "delayed scaling, the same history_length; or load with changed=('histories',) to "
                      "begin with empty ones")
    if "recipe" not in changed:
        for name, layer in own.layers.items():
            theirs = saved.layers.get(name)
            if theirs is not None and theirs.recipe != layer.recipe:
                mine, other = _unlike(layer.recipe, theirs.recipe)
                raise Invalid(f"recipe of {name}", mine, f"the checkpoint has {other}; {AS_SAVED}, or load "
                                                         "with changed=('recipe',) to keep this one")
    if "precision" not in changed and saved.layers:
        _same_names("model", "layers that can run in FP8", saved.layers, own.layers)


def _check_optimizer(saved: Job, own: Job) -> None:
    if not saved.optimizer:
        raise Invalid("optimizer", own.optimizer, "the checkpoint was saved without one; load without one")
    for name in ("optimizer", "rule"):
        mine, theirs = getattr(own, name), getattr(saved, name)
        if mine != theirs:
            raise Invalid(name, mine, f"the checkpoint was written by {theirs}; make that optimizer, or, "
                                      f"between AdamW of torch and of fp8scope, convert it: {CONVERT}")
    _same_names("optimizer", "parameters", saved.optimized, own.optimized)


def _check_states(saved: Job, own: Job) -> None:
    unlike = {name: (mine.states, saved.optimized[name].states) for name, mine in own.optimized.items()
              if mine.states != saved.optimized[name].states}
    if not unlike:
        return
    name, (mine, theirs) = next(iter(unlike.items()))
    more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
    wanted, _, block = mine.partition(" in blocks of ")
    ask = f"--states {wanted}" + (f" --block {block}" if block else "")
    raise Invalid("states", f"{mine} ({name}{more})",
                  f"the checkpoint holds {theirs}; make the optimizer so, or convert the checkpoint: "
                  f"{CONVERT} {ask}")


def _check_options(saved: Job, own: Job, changed: Collection[str]) -> None:
    for name, mine in own.optimized.items():
        theirs = saved.optimized[name]
        if "order" not in changed and theirs.number not in (None, mine.number):
            raise Invalid("order of parameters", f"{name} is number {mine.number}",
                          f"in the checkpoint it is number {theirs.number}, and that names its random "
                          f"numbers; {_either('order')}")
        options, others = own.groups[mine.group], saved.groups[theirs.group]
        for option in sorted(options.keys() & others.keys() - {*RESTORED, *FORMATS, *changed}):
            if options[option] != others[option]:
                raise Invalid(option, options[option], f"the checkpoint has {others[option]!r} for {name}; "
                                                       f"{_either(option)}")


def _either(name: str) -> str:
    return f"make the optimizer so, or load with changed=({name!r},) to keep this one's"


def _same_names(field: str, what: str, saved: Collection[str], own: Collection[str]) -> None:
    lacking = [name for name in own if name not in saved]
    beyond = [name for name in saved if name not in own]
    if lacking or beyond:
        parts = [f"{side} lacks {_few(names)}" for side, names in
                 (("the checkpoint", lacking), (f"this {field}", beyond)) if names]
        cut = ", cut for as many ranks: what ranks cannot share stays out of FP8" if "FP8" in what else ""
        raise Invalid(field, f"{len(own)} {what}", f"{'; '.join(parts)}; {AS_SAVED}{cut}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _unlike(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    return {key: mine.get(key) for key in keys}, {key: theirs.get(key) for key in keys}
