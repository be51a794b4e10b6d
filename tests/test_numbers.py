"""Numbers on the command line: each option of each command, with everything that a person may type."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8scope.cli import main
from fp8scope_trainer.options import parse

TYPED = ("-1", str(2**64), "1e400", "-1e400", "abc", "", "nan", "9" * 5000, "true")
OPTIONS = {
    "train": ("--steps", "--ranks", "--seed", "--lr", "--batch", "--every", "--detail-every",
              "--fidelity-every", "--budget", "--accumulate", "--block",
              "--states-warmup", "--warmup", "--clip", "--peak-tflops"),
    "train --drill frozen-amax": ("--fault-step", "--gain-steps", "--gain-growth", "--release-step"),
    "train --checkpoint nowhere": ("--save-every",),
    "train --stage HYBRID_SHARD": ("--shard-ranks",),
    "estimate --parameters 7B": ("--parameters", "--ranks", "--tensor-parallel", "--accumulate", "--layers",
                                 "--exempt", "--tokens"),
    "estimate --parameters 7B --states int8": ("--block",),
    "demo": ("--steps", "--port", "--dashboard-port"),
    "up": ("--port", "--dashboard-port"),
    "doctor torch.nn:Identity": ("--every", "--detail-every", "--tokens", "--bandwidth"),
}
MAY_BE_ZERO = ("--seed", "--fidelity-every", "--fault-step", "--states-warmup", "--warmup", "--tokens",
               "--exempt")
HAS_NO_END = ("--bandwidth", "--clip")


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands set signals; none of these gets far enough to write."""
    monkeypatch.setenv("FP8SCOPE_HOME", str(tmp_path))
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "option"), [(command, option) for command, options in OPTIONS.items()
                                                 for option in options])
def test_what_is_no_number_in_bounds_is_one_line(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and a line with the field, the value and the rule; nothing is printed before it."""
    zero = () if option in MAY_BE_ZERO else ("0",)
    for value in (*TYPED, *zero):
        if option in HAS_NO_END and value == str(2**64):
            continue
        assert main([*command.split(), f"{option}={value}"]) == 2, value
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert len(said.err) < 700
        assert "must be" in said.err
        field = option.removeprefix("--").replace("-", "_").removeprefix("gain_gr")
        assert field in said.err.replace("-", "_")


@pytest.mark.parametrize("address", ["ftp://x", "http://h h", "http://h#t", "nowhere"])
def test_train_refuses_an_address_before_it_begins(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No table of layers comes first."""
    assert main(["train", "--collector", address]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("fp8scope train: collector = ")
    assert said.err.count("\n") == 1


def test_the_largest_numbers_are_taken() -> None:
    """The bounds themselves."""
    found = parse([f"--steps={2**53}", f"--seed={2**63 - 1}", "--ranks=256", "--batch=4096",
                   f"--every={2**53}", "--budget=none"])
    assert (found.steps, found.seed, found.ranks, found.batch) == (2**53, 2**63 - 1, 256, 4096)
