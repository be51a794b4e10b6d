"""`fp8scope proxy`: does a choice of formats change what a small model learns?

Each seed trains a pair: the reference (fp32, or BF16 linears with fp32 states) and the candidate, from the
same weights on the same data. The candidate passes if no loss was NaN or Inf and both hold:

    mean over the seeds of (held-out loss of the candidate - that of the reference)  <=  limit
    0.9  <=  mean over the seeds of (update norm of the candidate / that of the reference)  <=  1.1

The limit is 0.02 nats a token by default; a candidate that is better passes. The 95 % interval of that mean
is told beside it: with three seeds it is wider than the limit as a rule, so a pass says that no large fault
was seen, not that there is none. benchmarks/parity.py asks more.

The update norm is ||u|| / ||w||, without the learning rate, over the last fifth of the steps. A loss alone
judges badly: wgrad rounded to 2 bits cost 0.034 in 30 steps, less than two seeds differ by, and made updates
0.64 as large; sound pairs of one seed were within 0.97 to 1.03.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.command_line import Parser
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.curves_svg import curves_svg
from fp8scope_trainer.data import Corpus, standard_library
from fp8scope_trainer.decoder import DecoderConfig
from fp8scope_trainer.paired import Curve, Numbers, Schedule, mean_and_half_width, trained
from fp8scope_trainer.state_block import FORMATS
from fp8scope_trainer.state_format import StateFormat

REJECTED = 1
"""Exit code where the candidate does not pass."""
LIMIT = 0.02
LEAST_UPDATE, MOST_UPDATE = 0.9, 1.1
LAST = 5
"""The last 1 / LAST of the steps is the end of a run."""
MODEL = DecoderConfig(width=128, layers=2, heads=2, kv_heads=1, head_width=64, hidden=256, context=64)
"""0.36 M parameters."""

Pair = tuple[Curve, Curve]
"""Reference, candidate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Over all pairs."""

    differences: tuple[float, ...]
    """Held-out loss of the candidate less that of the reference, by seed."""
    mean: float
    half_width: float
    """Of the 95 % interval; infinite for one pair."""
    update_ratio: float
    limit: float
    finite: bool

    @property
    def passes(self) -> bool:
        return self.finite and self.mean <= self.limit and LEAST_UPDATE <= self.update_ratio <= MOST_UPDATE

    def __str__(self) -> str:
        interval = f" +- {self.half_width:.4f}" if math.isfinite(self.half_width) else ""
        nan = "" if self.finite else ", with losses that are not finite"
        word, seeds = "pass" if self.passes else "reject", len(self.differences)
        return (f"{word}: held-out loss {self.mean:+.4f}{interval} against the reference over {seeds} "
                f"seeds{nan} (limit {self.limit}); updates {self.update_ratio:.3f} as large "
                f"({LEAST_UPDATE} to {MOST_UPDATE})")


def compared(
    reference: Numbers, candidate: Numbers, schedule: Schedule, corpus: Corpus[Tensor], *, seeds: int,
    device: torch.device, config: DecoderConfig = MODEL, tick: Callable[[], None] = lambda: None,
) -> list[Pair]:
    """One pair for each of the seeds 0, 1, ...; `tick` is called after each step."""
    def run(numbers: Numbers, seed: int) -> Curve:
        last = Curve()
        for curve in trained(config, numbers, schedule, corpus, seed=seed, device=device):
            last = curve
            tick()
        return last

    return [(run(reference, seed), run(candidate, seed)) for seed in range(seeds)]


def judged(pairs: list[Pair], limit: float) -> Verdict:
    """See the module."""
    differences = [candidate.held_out - reference.held_out for reference, candidate in pairs]
    finite = all(math.isfinite(loss) for pair in pairs for one in pair
                 for loss in (*one.losses, one.held_out))
    mean, half = mean_and_half_width(differences) if finite else (math.nan, math.inf)
    sizes = [[fmean(one.update_ratios[-max(1, len(one.update_ratios) // LAST):]) for one in pair]
             for pair in pairs]
    return Verdict(differences=tuple(differences), mean=mean, half_width=half, limit=limit, finite=finite,
                   update_ratio=fmean(candidate / reference for reference, candidate in sizes))


def main(argv: list[str] | None = None) -> int:
    """Entry of `fp8scope proxy`; returns the exit code."""
    given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    check_whole("seeds", given.seeds, least=1, most=1000)
    if not 0 < given.limit < 100:
        raise Invalid("limit", given.limit, "must be above 0 and below 100")
    StateFormat.of(given.states, given.block)
    schedule = Schedule(steps=given.steps, batch=given.batch, lr=given.lr)
    reference = Numbers(precision=given.reference)
    candidate = Numbers(precision=given.precision, states=given.states, block=given.block)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = standard_library(limit=4_000_000)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("proxy", total=2 * given.seeds * (given.steps + 1))
        pairs = compared(reference, candidate, schedule, corpus, seeds=given.seeds, device=device,
                         tick=lambda: bar.advance(task))
    verdict = judged(pairs, given.limit)
    name = f"{given.precision}, states {given.states}"
    if given.svg is not None and verdict.finite:
        _write_svg(given.svg, pairs, given.reference, name)
    print(json.dumps(document(verdict, pairs, given)) if given.json else f"{name}: {verdict}")
    return 0 if verdict.passes else REJECTED


def document(verdict: Verdict, pairs: list[Pair], given: Any) -> dict[str, Any]:
    """For `--json`. What is not finite is null."""
    def plain(value: float) -> float | None:
        return round(value, 6) if math.isfinite(value) else None

    return {
        "passes": verdict.passes, "limit": verdict.limit, "mean_difference": plain(verdict.mean),
        "half_width_95": plain(verdict.half_width), "update_ratio": plain(verdict.update_ratio),
        "differences": [plain(one) for one in verdict.differences], "options": vars(given),
        "runs": [{"seed": seed, "reference": _run(pair[0], plain), "candidate": _run(pair[1], plain)}
                 for seed, pair in enumerate(pairs)],
    }


def _run(curve: Curve, plain: Callable[[float], float | None]) -> dict[str, Any]:
    return {"held_out": plain(curve.held_out), "losses": [plain(loss) for loss in curve.losses]}


def _write_svg(path: str, pairs: list[Pair], reference: str, candidate: str) -> None:
    means = {name: [fmean(losses) for losses in zip(*(pair[i].losses for pair in pairs), strict=True)]
             for i, name in enumerate((f"{reference} (reference)", candidate))}
    try:
        Path(path).write_text(curves_svg(means, title=f"Training loss, mean of {len(pairs)} seeds"))
    except OSError as error:
        raise Invalid("--svg", path, f"cannot be written ({error.strerror})") from error


def _parser() -> Parser:
    parser = Parser(prog="fp8scope proxy",
                    description="Train a small model in pairs: a reference, and the formats you chose.")
    add = parser.add_argument
    add("--precision", choices=("fp8", "bf16", "fp32"), default="fp8", help="of the linears (fp8)")
    add("--states", default="fp8", help=f"of its optimizer: {', '.join(FORMATS)} (fp8)")
    add("--block", type=int, help="elements that share a scale of a state (the format's)")
    add("--reference", choices=("fp32", "bf16"), default="fp32", help="its linears; states are fp32 (fp32)")
    add("--seeds", type=int, default=3, help="pairs (3)")
    add("--steps", type=int, default=120, help="of each run (120)")
    add("--batch", type=int, default=8, help="sequences of 64 bytes a step (8)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (2e-3)")
    add("--limit", type=float, default=LIMIT, help=f"largest mean difference that passes ({LIMIT})")
    add("--svg", help="file to draw both mean curves into")
    add("--json", action="store_true", help="everything as one line of JSON")
    return parser
