"""Launches compiled Triton kernels past Triton's dispatcher, which takes some 20 us a call.

A kernel is compiled for what Triton specializes on: types, constants, pointers and integers that 16 divides,
integers that are 1. That is the key here; the first call with a key goes through `warmup`, which compiles or
finds the kernel in Triton's own cache.
"""

from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


class Launcher:
    """One kernel, whose constants come last in its signature."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, programs: int, *args: Tensor | int, constants: dict[str, Any], **options: int
    ) -> None:
        """`programs` of the kernel on the device of the first argument, on its current stream.

        options: num_warps, maxnreg.
        """
        first = args[0]
        assert isinstance(first, Tensor)
        if isinstance(self._kernel, InterpretedFunction):
            self._kernel[(programs,)](*args, **constants)
        elif first.device.index == torch.cuda.current_device():
            self._launch(programs, args, constants, options)
        else:
            with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
                self._launch(programs, args, constants, options)

    def _launch(
        self, programs: int, args: tuple[Tensor | int, ...], constants: dict[str, Any],
        options: dict[str, int],
    ) -> None:
        values = tuple(constants[name] for name in self._kernel.arg_names[len(args):])
        key = (torch.cuda.current_device(), values, *map(_specialized, args))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel.warmup(*args, grid=(programs,), **constants, **options)
            self._compiled[key] = compiled
        compiled[(programs, 1, 1)](*args, *values)


def _specialized(arg: Tensor | int) -> tuple[Any, ...]:
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return arg == 1, arg % 16 == 0, arg.bit_length() > 31
