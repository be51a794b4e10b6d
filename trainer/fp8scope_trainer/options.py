"""What `fp8scope train` is asked for: the command line, checked."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fp8scope.settings import read_settings
from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.command_line import Parser
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.wire import check_run
from fp8scope_trainer.decoder import Decoder, DecoderConfig, demo, hundred_million
from fp8scope_trainer.drill import DRILLS, FrozenAmax

MOST_RANKS = 256
"""Processes of one machine."""
MOST_SEQUENCES = 4096
"""Per rank and step; the activations of more fit on no device."""
MOST_SEED = 2**63 - 1
"""Largest seed that torch and an int64 both take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model and what goes with its size."""

    model: Callable[[], DecoderConfig]
    batch: int
    """Sequences per rank and step."""
    lr: float


PRESETS: dict[str, Preset] = {
    "demo": Preset(model=demo, batch=2, lr=3e-3),
    "hundred_million": Preset(model=hundred_million, batch=8, lr=6e-4),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """One training job."""

    run: str
    preset: str
    steps: int
    ranks: int
    precision: Literal["fp8", "bf16"]
    seed: int
    lr: float
    batch: int
    every: int
    detail_every: int
    fidelity_every: int
    budget: float | None
    collector: str | None
    probe: bool
    remote_control: bool
    drill: FrozenAmax | None
    json: bool

    def __post_init__(self) -> None:
        for name in ("steps", "every", "detail_every"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("ranks", self.ranks, least=1, most=MOST_RANKS)
        check_whole("batch", self.batch, least=1, most=MOST_SEQUENCES)
        check_whole("fidelity_every", self.fidelity_every)
        check_whole("seed", self.seed, most=MOST_SEED)
        if self.budget is not None and not 0 < self.budget < 1:
            raise Invalid("budget", self.budget, "must be above 0 and below 1")
        if not 0 < self.lr < 1:
            raise Invalid("lr", self.lr, "must be above 0 and below 1")
        check_run(self.run)
        if self.probe or self.collector:
            read_settings(collector=self.collector)  # as attaching will, which is after the model is built
        if self.drill is not None:
            with torch.device("meta"):
                self.drill.check_names(Decoder(self.model))

    @property
    def model(self) -> DecoderConfig:
        """Shape of the model."""
        return PRESETS[self.preset].model()


def parse(argv: list[str]) -> TrainOptions:
    """`argv` without the command's name; raises `Invalid` in one line, exits only for --help."""
    given = _parser().parse_args(argv)
    if given.preset not in PRESETS:
        raise UnknownName("--preset", given.preset, PRESETS)
    preset = PRESETS[given.preset]
    return TrainOptions(
        run=given.run or f"{given.preset}-{given.precision}", preset=given.preset, steps=given.steps,
        ranks=given.ranks, precision=given.precision, seed=given.seed,
        lr=preset.lr if given.lr is None else given.lr,
        batch=preset.batch if given.batch is None else given.batch,
        every=given.every, detail_every=given.detail_every, fidelity_every=given.fidelity_every,
        budget=given.budget, collector=given.collector,
        probe=not given.no_probe,
        remote_control=given.remote_control, drill=_drill(given), json=given.json,
    )


def _parser() -> Parser:
    parser = Parser(prog="fp8scope train",
                    description="Train the reference decoder on the standard library's own sources.")
    add = parser.add_argument
    add("--run", help="name of the run (PRESET-PRECISION)")
    add("--preset", default="demo", help=f"{', '.join(PRESETS)} (demo)")
    add("--steps", type=int, default=100, help="optimizer steps (100)")
    add("--ranks", type=int, default=1, help="processes, under ZeRO-2 if more than one (1)")
    add("--precision", choices=("fp8", "bf16"), default="fp8", help="of the linears (fp8)")
    add("--seed", type=int, default=0, help="of weights, data order and rounding (0)")
    add("--lr", type=float, help="peak learning rate (the preset's)")
    add("--batch", type=int, help="sequences per rank and step (the preset's)")
    add("--json", action="store_true", help="print a summary as the last line")
    probe = parser.add_argument_group("probe")
    probe.add_argument("--every", type=int, default=10, help="steps between measurements (10)")
    probe.add_argument("--detail-every", type=int, default=32,
                       help="of the measured steps, every how manieth is measured in detail (8)")
    probe.add_argument("--fidelity-every", type=int, default=500,
                       help="steps between two comparisons of gradients with BF16, 0 for none (500)")
    probe.add_argument("--budget", type=_budget, default=0.01,
                       help="share of the time that measuring may take, or none for no limit (0.01)")
    probe.add_argument("--collector", help="URL (FP8SCOPE_COLLECTOR, else http://127.0.0.1:8050)")
    probe.add_argument("--no-probe", action="store_true", help="train unobserved")
    probe.add_argument("--remote-control", action="store_true", help="obey precision commands")
    drill = parser.add_argument_group("fault drill")
    drill.add_argument("--drill", choices=DRILLS, help="inject this fault")
    drill.add_argument("--drill-block", help="where (layers.2)")
    drill.add_argument("--drill-part", choices=("attention", "mlp"), help="which linear of it (attention)")
    drill.add_argument("--fault-step", type=int, help="when it begins (25)")
    drill.add_argument("--gain-steps", type=int, help="for how long the norm's gain grows (40)")
    drill.add_argument("--gain-growth", type=float, help="its factor per step (1.1)")
    drill.add_argument("--release-step", type=int, help="when the history thaws (10 steps after the growth)")
    return parser


def _budget(text: str) -> float | None:
    return None if text == "none" else float(text)


def _drill(given: argparse.Namespace) -> FrozenAmax | None:
    fields = {
        "block": given.drill_block, "part": given.drill_part, "fault_step": given.fault_step,
        "gain_steps": given.gain_steps, "growth": given.gain_growth, "release_step": given.release_step,
    }
    chosen = {name: value for name, value in fields.items() if value is not None}
    if given.drill is None:
        if chosen:
            raise Invalid("--drill", None, f"must be {' or '.join(DRILLS)} to set {', '.join(chosen)}")
        return None
    return FrozenAmax(**chosen)
