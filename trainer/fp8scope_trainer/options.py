"""What `fp8scope train` is asked for: the command line, checked."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp8scope.settings import read_settings
from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.command_line import Parser
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.wire import check_run
from fp8scope_trainer.checkpoint_folder import newest
from fp8scope_trainer.cut import check_cut
from fp8scope_trainer.decoder import Decoder, DecoderConfig, billion, demo, hundred_million
from fp8scope_trainer.drill import DRILLS, FrozenAmax
from fp8scope_trainer.recipes import RECIPES, Precision, TrainingRecipe, check_clip
from fp8scope_trainer.stage import Stage, parse_stage
from fp8scope_trainer.state_block import FORMATS
from fp8scope_trainer.state_format import StateFormat
from fp8scope_trainer.token_file import DTYPES, TokenFile, open_tokens

MOST_RANKS = 256
"""Processes of one machine."""
MOST_SEQUENCES = 4096
"""Per rank and step; the activations of more fit on no device."""
MOST_SEED = 2**63 - 1
"""Largest seed that torch and an int64 both take."""
MOST_MICRO_BATCHES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model and what goes with its size."""

    model: Callable[[], DecoderConfig]
    batch: int
    """Sequences per rank and step."""
    lr: float
    """Peak learning rate in BF16."""


PRESETS: dict[str, Preset] = {
    "demo": Preset(model=demo, batch=2, lr=3e-3),
    "hundred_million": Preset(model=hundred_million, batch=8, lr=6e-4),
    "billion": Preset(model=billion, batch=8, lr=3e-4),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """A token file; without a header, what it holds."""

    path: str
    dtype: str | None = None
    vocabulary: int | None = None

    def open(self) -> TokenFile:
        """The file, mapped; `Invalid` if it cannot be used."""
        return open_tokens(self.path, dtype=self.dtype, vocabulary=self.vocabulary)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Where checkpoints go, and when."""

    folder: str
    every: int | None = None
    """Steps between two; None for the end only."""
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every is not None:
            check_whole("save_every", self.every, least=1)
        if Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise Invalid("--checkpoint", self.folder, "is a file; name a folder")
        if not self.resume and (found := newest(self.folder)) is not None:
            raise Invalid("--checkpoint", self.folder, f"holds checkpoints already, the newest {found.name}; "
                          "go on from it with --resume, or name another folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """One training job."""

    run: str
    preset: str
    steps: int
    ranks: int
    recipe: TrainingRecipe
    """With what overrides it merged in."""
    block: int | None
    """Elements that share a scale of a state; None for the format's own."""
    states_warmup: int
    """Steps during which moments stay fp32."""
    stage: str | None
    """None for 2 where there is a process group, else 0."""
    shard_ranks: int | None
    tensor_parallel: int
    """Ranks that share each layer."""
    fp8_gather: bool
    """Weights of FP8 layers are gathered as codes."""
    seed: int
    lr: float
    batch: int
    accumulate: int
    data: Data | None
    saving: Saving | None
    compile: bool
    deterministic: bool
    peak_tflops: float | None
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
        check_whole("accumulate", self.accumulate, least=1, most=MOST_MICRO_BATCHES)
        check_whole("states_warmup", self.states_warmup)
        self._check_training()
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

    def _check_training(self) -> None:
        StateFormat.of(self.recipe.states, self.block)
        if self.stage is not None:
            parse_stage(self.stage)
        if self.shard_ranks is not None:
            if self.stage is None or parse_stage(self.stage) is not Stage.HYBRID:
                raise Invalid("shard_ranks", self.shard_ranks, "goes with stage HYBRID_SHARD")
            check_whole("shard_ranks", self.shard_ranks, least=1, most=MOST_RANKS)
        self._check_cut()
        if self.fp8_gather:
            self._check_fp8_gather()
        if self.peak_tflops is not None and not 0 < self.peak_tflops < 1e6:
            raise Invalid("peak_tflops", self.peak_tflops, "must be above 0 and below 1e6")
        if self.data is not None:
            self.data.open()

    def _check_cut(self) -> None:
        """Of tensor parallelism."""
        ranks = self.tensor_parallel
        check_whole("--tensor-parallel", ranks, least=1, most=MOST_RANKS)
        if ranks == 1:
            return
        if self.ranks % ranks:
            raise Invalid("--tensor-parallel", ranks, f"must divide the number of ranks, {self.ranks}")
        if self.shard_ranks is not None and self.data_ranks % self.shard_ranks:
            raise Invalid("--shard-ranks", self.shard_ranks,
                          f"must divide the {self.data_ranks} groups of ranks that share layers")
        if self.drill is not None:
            raise Invalid("--drill", DRILLS[0], "does not go with --tensor-parallel: a layer with an amax "
                                                "history, which it freezes, cannot be cut")
        check_cut(self.model, ranks, {})  # linears without whole tiles stay in BF16, see `train.build`

    def _check_fp8_gather(self) -> None:
        stage = parse_stage(self.stage or "2")
        if self.precision != "fp8":
            raise Invalid("--fp8-gather", True, "needs --precision fp8: layers in BF16 have no codes")
        if stage not in (Stage.PARAMETERS, Stage.HYBRID):
            raise Invalid("--fp8-gather", True, "is for --stage 3 and HYBRID_SHARD, which gather weights in "
                                                f"forward and backward; stage {stage.value} does not")
        if self.tensor_parallel > 1:
            raise Invalid("--fp8-gather", True, "does not go with --tensor-parallel: each rank would gather "
                                                "the codes of its part only")
        if (self.shard_ranks or self.ranks) < 2:
            raise Invalid("--fp8-gather", True, "needs two ranks or more that share weights: with one, "
                                                "nothing is gathered")

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read the same sequences; without tensor parallelism the ranks."""
        return self.ranks // self.tensor_parallel

    @property
    def precision(self) -> Precision:
        """Of the linears."""
        return self.recipe.precision

    @property
    def model(self) -> DecoderConfig:
        """Shape of the model; with a token file the vocabulary is the file's."""
        config = PRESETS[self.preset].model()
        return config if self.data is None else replace(config, vocabulary=self.data.open().vocabulary)

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks and micro-batches."""
        return self.sequences_per_step * PRESETS[self.preset].model().context

    @property
    def sequences_per_step(self) -> int:
        """Over all ranks and micro-batches."""
        return self.batch * self.accumulate * self.data_ranks


def parse(argv: list[str]) -> TrainOptions:
    """`argv` without the command's name; raises `Invalid` in one line, exits only for --help."""
    given = _parser().parse_args(argv)
    if given.preset not in PRESETS:
        raise UnknownName("--preset", given.preset, PRESETS)
    preset, recipe = PRESETS[given.preset], _recipe(given)
    return TrainOptions(
        run=given.run or f"{given.preset}-{recipe.precision}", preset=given.preset, steps=given.steps,
        ranks=given.ranks, recipe=recipe, block=given.block, states_warmup=given.states_warmup,
        stage=given.stage, shard_ranks=given.shard_ranks, tensor_parallel=given.tensor_parallel,
        fp8_gather=given.fp8_gather, seed=given.seed,
        lr=preset.lr * recipe.lr_factor if given.lr is None else given.lr,
        batch=preset.batch if given.batch is None else given.batch, accumulate=given.accumulate,
        data=_data(given), saving=_saving(given), compile=given.compile,
        deterministic=given.deterministic, peak_tflops=given.peak_tflops,
        every=given.every, detail_every=given.detail_every, fidelity_every=given.fidelity_every,
        budget=given.budget, collector=given.collector,
        probe=not given.no_probe,
        remote_control=given.remote_control, drill=_drill(given), json=given.json,
    )


def _parser() -> Parser:
    parser = Parser(prog="fp8scope train", description="Train the reference decoder on the standard "
                    "library's own sources, or on a token file.")
    add = parser.add_argument
    add("--run", help="name of the run (PRESET-PRECISION)")
    add("--preset", default="demo", help=f"{', '.join(PRESETS)} (demo)")
    add("--steps", type=int, default=100, help="optimizer steps (100)")
    add("--ranks", type=int, default=1, help="processes (1)")
    add("--recipe", default="plain", help=f"{', '.join(RECIPES)}: what the options below start from (plain)")
    add("--precision", choices=("fp8", "bf16"), help="of the linears (the recipe's)")
    add("--states", help=f"of the optimizer: {', '.join(FORMATS)} (the recipe's)")
    add("--block", type=int, help="elements that share a scale of a state (the format's)")
    add("--states-warmup", type=int, default=0, help="steps during which states stay fp32 (0)")
    add("--clip", type=float, help="largest norm of the gradient (the recipe's)")
    add("--warmup", type=int, help="steps over which the learning rate rises (the recipe's)")
    add("--seed", type=int, default=0, help="of weights, data order and rounding (0)")
    add("--lr", type=float, help="peak learning rate (the preset's, times the recipe's factor)")
    add("--batch", type=int, help="sequences per rank and micro-batch (the preset's)")
    add("--accumulate", type=int, default=1, help="micro-batches a step (1)")
    add("--stage", help="of ZeRO: 0, 1, 2, 3, HYBRID_SHARD (2)")
    add("--shard-ranks", type=int, help="HYBRID_SHARD: ranks that share one shard (a node's)")
    add("--tensor-parallel", type=int, default=1, help="ranks that share each layer (1)")
    add("--fp8-gather", action="store_true", help="stage 3, HYBRID_SHARD: weights are gathered as FP8 codes")
    add("--compile", action="store_true", help="run the layers under torch.compile")
    add("--deterministic", action="store_true", help="repeat to the bit on a GPU, too")
    add("--peak-tflops", type=float, help="of one device, for MFU (known of some GPUs)")
    add("--json", action="store_true", help="print a summary as the last line")
    _add_files(parser)
    probe = parser.add_argument_group("probe")
    probe.add_argument("--every", type=int, default=10, help="steps between measurements (10)")
    probe.add_argument("--detail-every", type=int, default=32,
                       help="of the measured steps, every how manieth is measured in detail (32)")
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


def _add_files(parser: Parser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--data", help="token file (the standard library's sources)")
    data.add_argument("--data-dtype", choices=DTYPES, help="of the tokens of a file without a header")
    data.add_argument("--vocabulary", type=int, help="of such a file")
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument("--checkpoint", help="folder; one is saved at the end, stopped or not")
    saving.add_argument("--save-every", type=int, help="steps between two more")
    saving.add_argument("--resume", action="store_true", help="go on from the newest, if there is one")


def _recipe(given: argparse.Namespace) -> TrainingRecipe:
    """The recipe with what was given beside it."""
    if given.recipe not in RECIPES:
        raise UnknownName("--recipe", given.recipe, RECIPES)
    if given.clip is not None:
        check_clip(given.clip)
    own = {"precision": given.precision, "states": given.states, "clip": given.clip,
           "warmup_steps": given.warmup}
    return replace(RECIPES[given.recipe](), **{name: one for name, one in own.items() if one is not None})


def _data(given: argparse.Namespace) -> Data | None:
    if given.data is None:
        if given.data_dtype is not None or given.vocabulary is not None:
            raise Invalid("--data", None, "must be given with --data-dtype and --vocabulary")
        return None
    return Data(path=given.data, dtype=given.data_dtype, vocabulary=given.vocabulary)


def _saving(given: argparse.Namespace) -> Saving | None:
    if given.checkpoint is None:
        if given.save_every is not None or given.resume:
            raise Invalid("--checkpoint", None, "must be given with --save-every and --resume")
        return None
    return Saving(folder=given.checkpoint, every=given.save_every, resume=given.resume)


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
