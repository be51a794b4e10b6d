"""Launches compiled Triton kernels past Triton's dispatcher, which takes some 20 us a call.

A kernel is compiled for what Triton specializes on: types, constants, pointers and integers that 16 divides,
integers that are 1. That is the key here; the first call with a key goes through `warmup`, which compiles or
finds the kernel in Triton's own cache. Where constants are few, `bound` keeps them: to look them up and to
hash them takes as long as all the rest.
"""

from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


class Launcher:
    """One kernel, whose constants come last in its signature."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._bound: dict[Any, BoundLauncher] = {}

    def __call__(
        self, programs: int, *args: Tensor | int | float, constants: dict[str, Any], **options: int
    ) -> None:
        """`programs` of the kernel on the device of the first argument, on its current stream.

        options: num_warps, maxnreg, enable_fp_fusion.
        """
        values = tuple(map(constants.__getitem__, self._kernel.arg_names[len(args):]))
        bound = self._bound.get((values, *options.values()))
        if bound is None:
            bound = self._bound[values, *options.values()] = self.bound(constants, **options)
        bound(programs, *args)

    def bound(self, constants: dict[str, Any], **options: int) -> "BoundLauncher":
        """This kernel with these constants; options as in a call."""
        return BoundLauncher(self._kernel, constants, options)


class BoundLauncher:
    """One kernel with its constants, in the order of its signature."""

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = options
        self._values = tuple(constants[name] for name in kernel.arg_names[-len(constants):])
        self._interpreted = isinstance(kernel, InterpretedFunction)
        self._compiled: dict[Any, Any] = {}

    def __call__(self, programs: int, *args: Tensor | int | float) -> None:
        """As `Launcher`."""
        first = args[0]
        assert isinstance(first, Tensor)
        if self._interpreted:
            self._kernel[(programs,)](*args, **self._constants)
        elif first.device.index == torch.cuda.current_device():
            self._launch(programs, args)
        else:
            with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
                self._launch(programs, args)

    def _launch(self, programs: int, args: tuple[Tensor | int | float, ...]) -> None:
        device = torch.cuda.current_device()
        key = (device, *_specialized(args))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel.warmup(*args, grid=(programs,), **self._constants, **self._options)
            self._compiled[key] = compiled
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled[(programs, 1, 1)](*args, *self._values, stream=stream)


def _specialized(args: tuple[Tensor | int | float, ...]) -> list[Any]:
    """What of each argument the compiled kernel depends on."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, int):
            found.append(arg == 1 or (arg % 16 == 0, arg.bit_length() > 31))
        elif isinstance(arg, float):  # of any value
            found.append(float)
        else:
            found += arg.dtype, arg.data_ptr() % 16 == 0
    return found
