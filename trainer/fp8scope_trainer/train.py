"""`fp8scope train`: the reference decoder in FP8 under ZeRO, with the probe attached."""

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8scope
from fp8scope.observer import switchable_layers
from fp8scope_protocol.errors import Fp8scopeError, Invalid
from fp8scope_protocol.series import canonical_name
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.convert import Conversion, ConversionReport, convert
from fp8scope_trainer.cut import has_whole_tiles
from fp8scope_trainer.data import Corpus, Text, batch_at, standard_library, token_corpus
from fp8scope_trainer.decoder import Decoder
from fp8scope_trainer.decoder_size import flops_per_token
from fp8scope_trainer.fp8_gather import gathered_as_codes
from fp8scope_trainer.history import advance_histories
from fp8scope_trainer.mesh import training_mesh
from fp8scope_trainer.options import TrainOptions, parse
from fp8scope_trainer.processes import (
    StopSignal,
    World,
    joined,
    launch,
    launched,
    leave,
    repeatable,
    stop_signal,
)
from fp8scope_trainer.progress import Record, display, print_summary
from fp8scope_trainer.saving import LOST, Checkpoints, reads_of
from fp8scope_trainer.shard import micro_batch, shard
from fp8scope_trainer.throughput import device_peak, peak_memory_bytes

Pair = tuple[Tensor, Tensor]
"""Tokens and targets."""

USAGE_ERROR = 2
HELD_OUT_BATCHES = 8


def main(argv: list[str] | None = None) -> int:
    """Entry of `fp8scope train`; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        options = parse(arguments)
        if options.ranks > 1 and not launched():
            return launch(options.ranks, arguments)
        return run(options)
    except Fp8scopeError as error:
        print(f"fp8scope train: {error}", file=sys.stderr)
        return USAGE_ERROR


def run(options: TrainOptions) -> int:
    """One rank of the job, from model to summary."""
    with repeatable(options.deterministic), stop_signal() as stop, joined(options.ranks) as world:
        corpus = corpus_of(options)
        model, report = build(options, world)
        optimizer = AdamW(parameter_groups(model, states=options.recipe.states, block=options.block),
                          lr=options.lr, warmup_steps=options.states_warmup, seed=options.seed)
        checkpoints = Checkpoints(saving=options.saving, model=model, optimizer=optimizer,
                                  reads=reads_of(options), rank=world.rank)
        first = checkpoints.first_step()
        if world.rank == 0:
            announce(report, model, options, first)
        with attached(model, optimizer, options, resume=first > 0) as scope:
            record = train(model, optimizer, corpus, scope, options, world, stop, checkpoints, first)
        stopped = first + len(record.losses) < options.steps
        held_out = None if stopped else held_out_loss(model, corpus, options, world)
        if world.rank == 0 and options.json:
            print_summary(facts(model, options) | record.summary() | {"first_step": first}
                          | {"stopped": stopped, "held_out_loss": held_out})
    if stopped:
        return stop.exit_code
    return LOST if checkpoints.failed else 0


def announce(report: ConversionReport, model: nn.Module, options: TrainOptions, first: int) -> None:
    """What a job says before its first step."""
    print(report, file=sys.stderr)
    if options.fp8_gather:
        codes = len(gathered_as_codes(model))
        print(f"{codes} of {len(report.converted)} weights are gathered as FP8 codes; where the rows are no "
              "multiple of 128 for each rank they are gathered as before", file=sys.stderr)
    if first >= options.steps:
        print(f"fp8scope train: nothing is left to train: the checkpoint has {first} steps, and --steps is "
              f"{options.steps}", file=sys.stderr)
    sys.stderr.flush()


def corpus_of(options: TrainOptions) -> Corpus[Text]:
    """What is trained on; both of its texts hold a sequence, or the job does not begin."""
    if options.data is None:
        return standard_library()
    corpus = token_corpus(options.data.open())
    least = min(corpus.train.numel(), corpus.held_out.numel())
    if least <= options.model.context:
        raise Invalid("--data", least, "tokens in the shorter of its two texts (the last 20th is held out); "
                                       f"must be more than a sequence, {options.model.context}")
    return corpus


def build(options: TrainOptions, world: World) -> tuple[nn.Module, ConversionReport]:
    """The model, the same on every rank before it is sharded."""
    torch.manual_seed(options.seed)
    model: nn.Module = Decoder(options.model).to(world.device)
    delayed = (options.drill.layer,) if options.drill else ()
    share = options.tensor_parallel
    report = convert(model, Conversion(recipe=options.recipe.linear, precision=options.precision,
                                       delayed=delayed),
                     lambda name, linear: share == 1 or has_whole_tiles(
                         name, (linear.out_features, linear.in_features), share))
    if options.drill:
        options.drill.check(model)
    if options.compile:
        for layer in model.get_submodule("layers").children():
            layer.compile(dynamic=False)
    compute = torch.bfloat16 if world.device.type == "cuda" else None
    stage = stage_of(options, world)
    mesh = None if options.shard_ranks is None and share == 1 else training_mesh(
        world.device.type, stage, tensor=share, group=options.shard_ranks)
    return shard(model, stage=stage, mesh=mesh, compute=compute, fp8_gather=options.fp8_gather), report


def stage_of(options: TrainOptions, world: World) -> str:
    """As asked for; by default 2, and 0 where there is no process group."""
    return options.stage or ("2" if world.sharded else "0")


def attached(
    model: nn.Module, optimizer: AdamW, options: TrainOptions, *, resume: bool = False
) -> AbstractContextManager[fp8scope.Scope | None]:
    """The probe on this job, or nothing."""
    if not options.probe:
        return nullcontext()
    return fp8scope.attach(model, optimizer, run=options.run, every=options.every,
                           detail_every=options.detail_every, budget=options.budget,
                           collector=options.collector, remote_control=options.remote_control, resume=resume)


def train(
    model: nn.Module, optimizer: AdamW, corpus: Corpus[Text], scope: fp8scope.Scope | None,
    options: TrainOptions, world: World, stop: StopSignal, checkpoints: Checkpoints | None = None,
    first: int = 0,
) -> Record:
    """Steps from `first` on until all are done or any rank is asked to stop."""
    record, stage = record_of(options, world), stage_of(options, world)
    with display(options.steps, rank=world.rank) as show:
        for step in range(first, options.steps):
            if options.drill:
                options.drill.before_step(model, step)
            set_lr(optimizer, options.lr * min(1.0, (step + 1) / max(1, options.recipe.warmup_steps)))
            record.note_precision(step, precisions(model))
            pairs = [batch(corpus.train, number, options, world) for number in numbers(step, options)]
            loss, norm = train_step(model, optimizer, pairs, clip=options.recipe.clip, stage=stage)
            if scope is not None:
                if options.fidelity_every and (step + 1) % options.fidelity_every == 0:
                    scope.grad_fidelity(*(
                        partial(next_token_loss, model, batch(corpus.train, numbers(one, options)[0], options,
                                                              world))
                        for one in (step, step + 1)))
                scope.step(step, skipped=not math.isfinite(norm), loss=loss, grad_norm=norm)
            mean, stopping = world.agree(loss, stop.asked)
            show(step, mean, record.add(mean, peak_memory_bytes(world.device)))
            if checkpoints is not None:
                checkpoints.after_step(step, last=stopping or step == options.steps - 1)
            if stopping:
                break
    return record


def record_of(options: TrainOptions, world: World) -> Record:
    """An empty one, with what MFU is a share of."""
    return Record(tokens_per_step=options.tokens_per_step, flops_per_token=flops_per_token(options.model),
                  peak_tflops=options.peak_tflops or device_peak(world.device), devices=world.size)


def train_step(
    model: nn.Module, optimizer: AdamW, pairs: Sequence[Pair], *, clip: float = 1.0, stage: str = "0"
) -> tuple[Tensor, float]:
    """One optimizer step over micro-batches of equal size, skipped if the gradient is not finite.

    Returns this rank's mean loss and the norm of the whole gradient before clipping.
    """
    losses = []
    for number, pair in enumerate(pairs):
        if len(pairs) > 1:
            micro_batch(model, stage=stage, last=number == len(pairs) - 1)
        loss = next_token_loss(model, pair) / len(pairs)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    norm = optimizer.clip_gradients(clip).item()
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    advance_histories(model)
    return torch.stack(losses).sum(), norm


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus[Text], options: TrainOptions, world: World) -> float:
    """Mean loss on text that is never trained on, over all ranks."""
    model.eval()
    losses = [next_token_loss(model, batch(corpus.held_out, step, options, world))
              for step in range(HELD_OUT_BATCHES)]
    model.train()
    mean, _ = world.agree(torch.stack(losses).mean(), False)
    return round(mean, 6)


def next_token_loss(model: nn.Module, pair: Pair) -> Tensor:
    """Cross entropy in fp32, in nats per token."""
    tokens, targets = pair
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def numbers(step: int, options: TrainOptions) -> range:
    """Of the micro-batches of a step, counted over all steps."""
    return range(step * options.accumulate, (step + 1) * options.accumulate)


def batch(text: Text, number: int, options: TrainOptions, world: World) -> Pair:
    """This rank's sequences of a micro-batch, on its device."""
    share = options.tensor_parallel
    tokens, targets = batch_at(text, step=number, batch=options.batch, length=options.model.context,
                               rank=world.rank // share, ranks=world.size // share, seed=options.seed)
    return tokens.to(world.device), targets.to(world.device)


def facts(model: nn.Module, options: TrainOptions) -> dict[str, Any]:
    """What was trained, for the summary."""
    return {
        "run": options.run, "preset": options.preset, "ranks": options.ranks, "seed": options.seed,
        "precision": options.precision, "states": options.recipe.states, "stage": options.stage,
        "tensor_parallel": options.tensor_parallel, "fp8_gather": options.fp8_gather,
        "lr": options.lr, "clip": options.recipe.clip, "warmup_steps": options.recipe.warmup_steps,
        "tokens_per_step": options.tokens_per_step, "deterministic": options.deterministic,
        "data": None if options.data is None else options.data.path,
        "parameters": sum(p.numel() for p in model.parameters()),
        "drill": asdict(options.drill) | {"layer": options.drill.layer} if options.drill else None,
    }


def precisions(model: nn.Module) -> dict[str, str]:
    """What each switchable layer will compute in."""
    return {canonical_name(name): layer.precision for name, layer in switchable_layers(model).items()}


def set_lr(optimizer: AdamW, lr: float) -> None:
    """The same learning rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


if __name__ == "__main__":
    leave(main())
