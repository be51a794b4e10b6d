"""How fast a job is beside what its device could do.

MFU, the utilization of the model's operations: (tokens per second) x (operations per token) / peak, where the
operations are those that forward and backward of the model need (`decoder_size.flops_per_token`), whatever
is recomputed, and the peak is the device's dense BF16 rate, in FP8 too. So FP8 and BF16 runs are compared by
the same yardstick, and FP8, whose peak is twice as high, could pass 100 %.
"""

import torch

PEAK_TFLOPS = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0}
"""Dense BF16 of NVIDIA's data sheets, 10^12 operations a second, by a part of the device's name."""


def peak_tflops(device_name: str) -> float | None:
    """Of the table's first name that is a part of `device_name`; None for a device that it lacks."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def device_peak(device: torch.device) -> float | None:
    """`peak_tflops` of a GPU; None of a CPU."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def mfu(
    tokens_per_second: float, flops_per_token: float, peak: float | None, *, devices: int = 1
) -> float | None:
    """Share of `devices` times `peak` (10^12 operations a second) that is used; None if that is unknown."""
    return None if peak is None else tokens_per_second * flops_per_token / (peak * 1e12 * devices)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most that torch has had allocated on a GPU; None of a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
