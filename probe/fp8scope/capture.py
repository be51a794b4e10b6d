"""What a thread may do while a CUDA graph is captured, by this thread or by another.

Captures are usually made in a mode in which any thread that loads a kernel, waits for an event or asks for
its state spoils them. The probe does the first while it is captured itself (a kernel is loaded when it is
launched for the first time), and the second in its worker. Neither touches the captured stream, so each
thread lifts the ban for itself, for as long as it needs, as torch does for its allocator.
"""

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


class Relaxed:
    """A context in which this thread spoils no capture by what has nothing to do with it."""

    def __init__(self) -> None:
        self._mode = ctypes.c_int(RELAXED)

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *error: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        """Swaps the thread's mode and the one held here."""
        if (driver := _driver()) is not None:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))


@cache
def _driver() -> Any:
    """NVIDIA's driver; None where there is none."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None
