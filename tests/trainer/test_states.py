"""The benchmark of optimizer states: what it measures and judges, and that it goes on where it stopped."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

FILE = Path(__file__).parents[2] / "benchmarks" / "states.py"


@pytest.fixture(scope="module")
def states() -> ModuleType:
    """The benchmark as a module."""
    return importlib.import_module("benchmarks.states")


def found(loss: float, *, direct: float = 1.0, probe: float | None = 1.0, fallen: float = 1.0
          ) -> dict[str, Any]:
    return {"held_out": loss, "direct": {"ratio": direct, "min": 1.0, "max": 1.0, "error": 0.1},
            "probe": None if probe is None else {"ratio": probe},
            "fallen": {"half": fallen, "whole": 1.0}}


@pytest.mark.parametrize(("one", "outside"), [
    (found(2.014, direct=1.04, probe=0.96, fallen=1.049), []),
    (found(2.016), ["loss"]), (found(1.98), ["loss"]), (found(float("nan")), ["loss"]),
    (found(2.0, direct=0.94), ["direct"]), (found(2.0, probe=None), ["probe"]),
    (found(2.0, fallen=float("nan")), ["fallen_half"]),
])
def test_loss_and_all_four_ratios_decide(states: ModuleType, one: dict[str, Any], outside: list[str]) -> None:
    """Against the mean of all fp32 runs of the same job; runs of other jobs are no reference."""
    job = states.Job(preset="tiny", states="int8", beta2=0.95, steps=40, seed=0, machine="here")
    exact = replace(job, states="fp32")
    runs = [(job, one), (exact, found(1.999)), (exact, found(2.001)), (replace(exact, steps=41), found(9.0))]
    (verdict,) = states.judged(runs)
    assert (verdict["outside"], verdict["references"]) == (outside, 2)
    assert verdict["span_of_references"] == pytest.approx(0.002)
    assert ("NOT within" in states.line(verdict)) == bool(outside)


def test_seeds_are_judged_together(states: ModuleType) -> None:
    """Each against the reference of its own seed: +0.02 and -0.01 are +0.005 in the mean; a seed without a
    reference does not count."""
    job = states.Job(preset="tiny", states="fp8", beta2=0.95, steps=40, seed=0, machine="here")
    exact = replace(job, states="fp32")
    runs = [(job, found(2.02)), (exact, found(2.0)), (replace(job, seed=1), found(2.99, direct=1.08)),
            (replace(exact, seed=1), found(3.0)), (replace(job, seed=2), found(9.0))]
    (verdict,) = states.judged(runs)
    assert (verdict["seed"], verdict["outside"]) == ([0, 1], [])
    assert (verdict["difference"], verdict["ratios"]["direct"]) == pytest.approx((0.005, 1.04))


def test_the_direct_ratio_is_that_of_the_weights_change(states: ModuleType) -> None:
    """Weights that move by 0.8 of an exact AdamW's step, weight decay apart, read 0.8 and an error of 0.2."""
    weight, twin = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    peer = torch.optim.AdamW([twin], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    exact = states.Exact([weight], 0.95)
    for step in range(1, 4):
        gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        weight.grad, twin.grad = 2 * gradient, gradient.clone()
        before = twin.detach().clone()
        exact.feed(torch.tensor(0.5))
        peer.step()
    decayed = before * (1 - 1e-4)
    with torch.no_grad():
        weight.copy_(decayed + 0.8 * (twin - decayed))
    assert exact.compared([before], 3, 1e-3, 0.1) == pytest.approx((0.8, 0.2), abs=1e-3)


@pytest.mark.parametrize(("half", "stalled"), [(True, 1.5), (False, 1.1)])
def test_what_has_fallen_is_seen_and_a_stall_would_be(
    states: ModuleType, half: bool, stalled: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 follows a tenfold fall within 5 %; rounded to nearest at beta2 = 0.995 it stays above that."""
    monkeypatch.setattr(states, "FALLEN", (8, 512))
    device = torch.device("cpu")
    assert states.fallen("fp8", 0.95, 100, device, half=half) == pytest.approx(1.0, abs=0.05)
    monkeypatch.setattr("fp8scope_trainer.moments.lower", nearest)
    assert states.fallen("fp8", 0.995, 400, device, half=half) > stalled


def nearest(bits: torch.Tensor) -> torch.Tensor:
    """In place of random bits of a root: halves, so that everything is rounded to nearest."""
    return torch.full_like(bits, 1 << 15)


def test_a_run_on_a_cpu_is_kept_and_not_done_again(tmp_path: Path) -> None:
    """Two lines; the reference reads 1; a second call adds nothing and gives the same verdict."""
    command = [sys.executable, str(FILE), "--preset", "tiny", "--steps", "20", "--beta2", "0.95", "--states",
               "int8", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    results = tmp_path / "states.jsonl"

    def run(*arguments: str) -> dict[str, Any]:
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True,
                              timeout=120, check=False)
        last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return last

    first = run("--results", str(results))
    lines = [json.loads(one) for one in results.read_text().splitlines()]
    assert [one["job"]["states"] for one in lines] == ["fp32", "int8"]
    assert lines[0]["found"]["direct"]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert first["complete"]
    (verdict,) = first["results"]
    assert verdict["ratios"]["direct"] == pytest.approx(1.0, abs=0.05)
    assert verdict["ratios"]["probe"] == pytest.approx(1.0, abs=0.05)
    assert run("--results", str(results)) == first
    assert run("--summary", str(results))["results"] == first["results"]
    assert len(results.read_text().splitlines()) == 2
