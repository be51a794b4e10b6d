"""Waits for the device, which a measured step must not have."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """In here torch raises where the host would wait for the GPU, as far as it notices. Before and after, and
    without a GPU, it does not."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)  # a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
