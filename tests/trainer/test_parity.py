"""The parity benchmark's judgement, and that a comparison goes on where it was cut off."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "parity.py"


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("parity_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes are looked up there
    spec.loader.exec_module(module)
    return module


def test_the_whole_interval_decides(parity: ModuleType) -> None:
    """Seeds differ by percents; in pairs a steady 0.3 % is worse, a scattered 0 undecided, 0.01 % within."""
    reference = {str(seed): 2.0 + 0.05 * seed for seed in range(5)}
    spread = (-1, 1, 0, 1, -1)

    def moved(percent: float, noise: float) -> dict[str, float]:
        return {seed: loss * (1 + (percent + noise * one) / 100)
                for (seed, loss), one in zip(reference.items(), spread, strict=True)}

    found = parity.judged({"bf16": reference, "e5m2": moved(0.3, 0.05), "fp8": moved(0.01, 0.02),
                           "fp8 states": moved(0.0, 0.3)})
    assert {name: one["verdict"] for name, one in found.items()} == {
        "e5m2": "worse", "fp8": "within", "fp8 states": "undecided"}
    assert found["e5m2"]["mean_percent"] == pytest.approx(0.3, abs=1e-4)


def test_finished_runs_are_not_done_again(parity: ModuleType, tmp_path: Path) -> None:
    """The first call is out of time after one run; the second does the rest, and runs of other settings are
    not mixed in."""
    done: list[tuple[str, int]] = []

    def run(name: str, seed: int) -> float:
        done.append((name, seed))
        if len(done) == 3:
            raise KeyboardInterrupt
        return float(len(done))

    path, settings = tmp_path / "results", {"steps": 1}
    with pytest.raises(KeyboardInterrupt):
        parity.complete(path, settings, 2, 1e9, run)
    assert parity.complete(path, settings, 2, -1.0, run)["fp8"] == {"0": 2.0}
    parity.complete(path, settings, 2, 1e9, run)
    assert len(done) == 1 + 2 * len(parity.RECIPES)
    assert len(set(done)) == 2 * len(parity.RECIPES)
    with pytest.raises(SystemExit, match="other settings"):
        parity.complete(path, {"steps": 2}, 2, 1e9, run)


def test_a_sabotaged_linear_is_wrong_in_the_way_it_says(parity: ModuleType) -> None:
    """wgrad in 2 bits has three values at most, and E5M2 products err by more than BF16 ones."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(64, 128, generator=generator, requires_grad=True) for _ in range(2))
    exact = x @ weight.t()
    errors = {}
    for kind in parity.SABOTAGES:
        x.grad = weight.grad = None
        y = parity.Sabotaged.apply(x, weight, kind)
        torch.autograd.backward(y.square().sum())
        errors[kind] = ((y - exact).norm() / exact.norm()).item()
        assert weight.grad is not None
        assert (weight.grad.unique().numel() <= 3) == (kind == "wgrad 2 bits")
    assert errors["wgrad 2 bits"] < 0.01 < errors["e5m2"]
