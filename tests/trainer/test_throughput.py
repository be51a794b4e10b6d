"""MFU by its formula, and the table of peaks."""

import pytest

from fp8scope_trainer.throughput import mfu, peak_tflops


def test_a_device_has_the_peak_of_its_own_name() -> None:
    """The PCIe card is not taken for the SXM one; an unknown device has no peak and no MFU."""
    assert peak_tflops("NVIDIA H200") == 989
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("NVIDIA H100 PCIe") == 756
    assert peak_tflops("Some card") is None
    assert mfu(1000, 6e9, None) is None


def test_mfu_is_operations_over_peak() -> None:
    """50,000 tokens of 8 GFLOP each a second are 400 TFLOP/s: 40 % of one device of 1,000, 20 % of two."""
    assert mfu(50_000, 8e9, 1000.0) == pytest.approx(0.4)
    assert mfu(50_000, 8e9, 1000.0, devices=2) == pytest.approx(0.2)
