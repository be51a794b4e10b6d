"""The parity benchmark's judgement, and that a comparison goes on where it was cut off."""

import importlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "parity.py"


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    """The benchmark as a module."""
    return importlib.import_module("benchmarks.parity")


def runs(parity: ModuleType, recipe: str, seeds: int = 5) -> list[Any]:
    same = {"steps": 1000, "batch": 1, "width": 128, "machine": "here"}
    return [parity.Run(recipe=recipe, seed=seed, **same) for seed in range(seeds)]


def test_the_whole_interval_decides(parity: ModuleType) -> None:
    """Seeds differ by percents; in pairs a steady 0.3 % is worse, a scattered 0 undecided, 0.01 % within, and
    so is 0.1 % that is surely there but below 0.25 %. One pair decides nothing; other runs are apart."""
    losses = {run: 2.0 + 0.05 * run.seed for run in runs(parity, "bf16")}

    def add(recipe: str, percent: float, noise: float, seeds: int = 5) -> None:
        for run, sign in zip(runs(parity, recipe, seeds), (-1, 1, 0, 1, -1), strict=False):
            base = losses[replace(run, recipe="bf16")]
            losses[run] = base * (1 + (percent + noise * sign) / 100)

    add("e5m2", 0.3, 0.05)
    add("fp8", 0.01, 0.02)
    add("perturbed bf16", 0.1, 0.02)
    add("fp8 states", 0.0, 0.3)
    add("wgrad 2 bits", 9.0, 0.0, seeds=1)
    losses |= {replace(run, steps=1001): 9.0 for run in runs(parity, "fp8")}
    found = parity.judged(losses)
    assert {name: (one["verdict"], one["seeds"]) for name, one in found.items()} == {
        "e5m2": ("worse", 5), "fp8": ("within", 5), "perturbed bf16": ("within", 5),
        "fp8 states": ("undecided", 5), "wgrad 2 bits": ("undecided", 1)}
    assert found["e5m2"]["mean_percent"] == pytest.approx(0.3, abs=1e-4)


def test_finished_runs_are_not_done_again(parity: ModuleType, tmp_path: Path) -> None:
    """Four parts cover all runs once; a part that was cut off goes on; without time nothing begins."""
    done: list[Any] = []

    def do(run: Any) -> dict[str, float]:
        done.append(run)
        if len(done) == 3:
            raise KeyboardInterrupt
        return {run.recipe: float(len(done)), run.recipe + parity.IN_BF16: 0.5}

    path = tmp_path / "results"
    wanted = parity.wanted([0, 1, 2], steps=1, batch=1, width=128, machine="here")
    parts = [wanted[part::4] for part in range(4)]
    with pytest.raises(KeyboardInterrupt):
        parity.completed(parts[0], path, 1e9, do)
    in_bf16 = [replace(run, recipe=run.recipe + parity.IN_BF16) for run in wanted]
    kept = parity.completed(parts[0], path, -1.0, do)
    assert [kept[run] for run in parts[0][:2]] == [1.0, 2.0]
    assert set(kept) == {*parts[0][:2], *in_bf16[0:5:4]}
    for part in parts:
        parity.completed(part, path, 1e9, do)
    assert sorted(map(str, done)) == sorted(map(str, [*wanted, done[2]]))
    assert set(parity.read([path])) == {*wanted, *in_bf16}


def test_a_procedure_that_accepts_a_sabotage_has_not_passed(
    parity: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--summary` merges files, says so and ends with 1; with both rejected it passes and ends with 0. Four
    seeds are no pass, and other models are not merged."""
    percents = {"bf16": 0.0, "fp8": 0.01, "fp8 states": 0.0, "e5m2": 0.5, "wgrad 2 bits": 0.1}
    for recipe, percent in percents.items():
        lines = [json.dumps({"run": asdict(run), "held_out": (2 + 0.1 * run.seed) * (1 + percent / 100)})
                 for run in runs(parity, recipe)]
        (tmp_path / recipe).write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["parity", "--summary", *[str(tmp_path / name) for name in percents]])
    assert parity.main() == 1
    assert "NOT sound" in capsys.readouterr().out
    lines = [json.dumps({"run": asdict(run), "held_out": (2 + 0.1 * run.seed) * 1.02})
             for run in runs(parity, "wgrad 2 bits")]
    (tmp_path / "wgrad 2 bits").write_text("\n".join(lines))
    assert parity.main() == 0
    assert "sound; passed" in capsys.readouterr().out
    whole = (tmp_path / "fp8").read_text()
    (tmp_path / "fp8").write_text("\n".join(whole.splitlines()[1:]))
    assert parity.main() == 0
    assert "sound; not passed: too few seeds or steps" in capsys.readouterr().out
    (tmp_path / "fp8").write_text(whole.replace('"width": 128', '"width": 256'))
    with pytest.raises(SystemExit, match="several comparisons"):
        parity.main()


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
