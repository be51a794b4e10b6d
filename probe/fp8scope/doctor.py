"""`fp8scope doctor`: what a probe would measure of somebody's model, told before the job is started.

    fp8scope doctor jobs.pretrain:build --tokens 16384

`build` takes nothing and returns a model, or a model and its optimizer or optimizers. With `--meta` it is
called under `torch.device("meta")`, so a model of any size costs no memory.
"""

import inspect
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fp8scope.diagnosis import BANDWIDTH, diagnose
from fp8scope_protocol.command_line import Parser
from fp8scope_protocol.errors import Invalid

NOTHING = 1
"""Exit code where not a single series would be measured."""


def main(argv: list[str] | None = None) -> int:
    """Entry of `fp8scope doctor`; returns the exit code."""
    given = _parser().parse_args(argv)
    if not 1e-9 <= given.bandwidth < 1e300:
        raise Invalid("--bandwidth", given.bandwidth, "must be GB/s, at least 1e-9 and finite")
    model, optimizers = load(given.target, meta=given.meta)
    found = diagnose(model, optimizers, formats=given.formats.split(","), every=given.every,
                     detail_every=given.detail_every, tokens=given.tokens, bandwidth=given.bandwidth * 1e9)
    print(json.dumps(found.document(), allow_nan=False) if given.json else found)
    return 0 if found.measured else NOTHING


def load(target: str, *, meta: bool = False) -> tuple[nn.Module, tuple[Optimizer, ...]]:
    """Calls `module:function` and returns the model and its optimizers. Modules are looked for here, too."""
    module, colon, name = target.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise Invalid("target", target, "must be MODULE:FUNCTION, with the module's name as in an import "
                      "(jobs.pretrain:build for jobs/pretrain.py), seen from the folder of this command")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        build: Any = import_module(module)
        for part in name.split("."):
            build = getattr(build, part)
        _check_plain(target, build)
        with torch.device("meta") if meta else nullcontext():
            made = build()
    except Invalid:
        raise
    except (Exception, SystemExit) as error:  # a script that reads its arguments when it is imported
        inside = f" ({getattr(error, 'path', None)})"  # where Python found what lacks an imported name
        what = " ".join(f"{type(error).__name__}: {error}".replace(inside, "").split())
        raise Invalid("target", target, what + _place(error)) from error
    if inspect.iscoroutine(made):
        made.close()  # or Python warns that nobody awaited it
    model, *optimizers = made if isinstance(made, tuple | list) and made else (made,)
    if not isinstance(model, nn.Module):
        raise Invalid("target", target, f"must return a model first, not a {type(model).__name__}")
    flat = [one for each in optimizers for one in (each if isinstance(each, Iterable) else (each,))]
    return model, tuple(flat)


def _check_plain(target: str, build: Any) -> None:
    """Refuses what gives no model when it is called: it is not called."""
    if inspect.iscoroutinefunction(build) or inspect.isasyncgenfunction(build):
        raise Invalid("target", target, "is async; it must be a plain function that returns a model")
    if inspect.isgeneratorfunction(build):
        raise Invalid("target", target, "is a generator; it must be a plain function that returns a model")
    if not callable(build):
        raise Invalid("target", target, f"is a {type(build).__name__}; it must be a function that returns a "
                      "model")


def _place(error: BaseException) -> str:
    """Where somebody's own code failed: not in what is installed, and not in what imports it."""
    others = (sysconfig.get_path("stdlib"), __file__, "<")
    own = [frame for frame in traceback.extract_tb(error.__traceback__)
           if not frame.filename.startswith(others) and "-packages" not in frame.filename]
    return f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""


def _parser() -> Parser:
    parser = Parser(prog="fp8scope doctor",
                    description="List what a probe would measure, what not and why, and its cost.")
    add = parser.add_argument
    add("target", metavar="MODULE:FUNCTION", help="returns a model, or a model and its optimizer(s)")
    add("--formats", default="e4m3", help="what-ifs, separated by commas (e4m3)")
    add("--every", type=int, default=10, help="steps between measurements (10)")
    add("--detail-every", type=int, default=32, help="of these, every how manieth is in detail (32)")
    add("--tokens", type=int, default=8192, help="rows of each activation, a step and rank (8192)")
    add("--bandwidth", type=float, default=BANDWIDTH / 1e9, help="GB/s that it reads at (1000: an H200)")
    add("--meta", action="store_true", help="build on the meta device, without memory")
    add("--json", action="store_true", help="print one line of JSON")
    return parser
