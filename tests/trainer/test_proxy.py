"""The proxy run: it lets a sound recipe pass, and rejects a sabotaged one."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fp8scope.cli import main
from fp8scope_trainer.data import standard_library
from fp8scope_trainer.paired import Curve, Numbers, Schedule, mean_and_half_width, trained
from fp8scope_trainer.proxy import MODEL, compared, judged

SHORT = Schedule(steps=30, batch=4, lr=2e-3, warmup_steps=5, held_out_batches=4)


def coarse(g: Tensor) -> Tensor:
    """g rounded to -amax, 0 or amax."""
    return (g / g.abs().amax()).round() * g.abs().amax()


def two_bits(model: nn.Module) -> None:
    """A sabotage: the weight gradient of each linear in 2 bits."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name.startswith("layers."):
            parameter.register_hook(coarse)  # type: ignore[no-untyped-call]


def test_a_sabotaged_recipe_is_rejected_and_a_sound_one_is_not() -> None:
    """One seed, 30 steps: FP8 stays within 0.05, which suits so short a run; wgrad in 2 bits does not."""
    corpus = standard_library(limit=200_000)
    device = torch.device("cpu")
    for change, passes in ((None, True), (two_bits, False)):
        candidate = Numbers(precision="fp8", states="fp8", change=change)
        pairs = compared(Numbers(precision="fp32"), candidate, SHORT, corpus, seeds=1, device=device)
        found = judged(pairs, 0.05)
        assert found.passes is passes, str(found)


def test_the_reference_against_itself_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides of a pair see the same weights and data; the picture is one SVG with both curves."""
    arguments = ["proxy", "--precision", "fp32", "--states", "fp32", "--seeds", "2", "--steps", "3",
                 "--batch", "1"]
    assert main([*arguments, "--json", "--svg", str(tmp_path / "curves.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [0.0, 0.0]
    assert (found["mean_difference"], found["half_width_95"], found["update_ratio"]) == (0.0, 0.0, 1.0)
    assert found["runs"][0]["candidate"]["losses"] != found["runs"][1]["candidate"]["losses"]
    drawn = ElementTree.parse(tmp_path / "curves.svg").getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 2


def pair(difference: float, *, loss: float = 2.0, update: float = 1.0) -> tuple[Curve, Curve]:
    return (Curve(losses=[2.0], update_ratios=[1.0], held_out=2.0),
            Curve(losses=[loss], update_ratios=[update], held_out=2.0 + difference))


def test_the_verdict_is_the_mean_over_pairs_against_the_limit() -> None:
    """Within the limit it passes, beyond it not, and never with a NaN or with updates half as large."""
    assert judged([pair(0.01), pair(0.03)], 0.02 + 1e-9).passes
    assert not judged([pair(0.01), pair(0.04)], 0.02).passes
    assert judged([pair(-1.0)], 0.02).passes
    assert not judged([pair(0.0, loss=float("nan"))], 0.02).passes
    half = judged([pair(0.0, update=0.5)], 0.02)
    assert (half.update_ratio, half.passes) == (0.5, False)


def test_the_interval_is_students() -> None:
    """Of 1, 2, 3: mean 2, s 1, 4.303 / sqrt(3) to each side; of one number no interval is known."""
    assert mean_and_half_width([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / 3**0.5))
    assert mean_and_half_width([1.0]) == (1.0, float("inf"))


@pytest.mark.parametrize(("arguments", "said"), [
    (["--seeds", "0"], "seeds = 0: must be a whole number"), (["--states", "int3"], "must be one of fp32"),
    (["--steps", "0"], "steps = 0"), (["--limit", "nan"], "limit = nan"), (["--lr", "-1"], "lr = -1.0"),
])
def test_bad_input_is_refused_by_name(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained."""
    assert main(["proxy", *arguments]) == 2
    assert said in capsys.readouterr().err



def test_weights_are_also_evaluated_in_bf16() -> None:
    """An FP8 run has two held-out losses, as trained and with its products in BF16; a BF16 run has one."""
    corpus, device = standard_library(limit=200_000), torch.device("cpu")
    fp8, bf16 = (list(trained(MODEL, Numbers(precision=precision), SHORT, corpus, seed=0, device=device))[-1]
                 for precision in ("fp8", "bf16"))
    assert bf16.in_bf16 == bf16.held_out
    assert fp8.in_bf16 != fp8.held_out
    assert fp8.in_bf16 == pytest.approx(fp8.held_out, rel=0.01)
