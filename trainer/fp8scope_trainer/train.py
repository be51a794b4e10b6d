"""`fp8scope train`: the reference decoder in FP8 under ZeRO-2, with the probe attached."""

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fp8scope
from fp8scope.observer import switchable_layers
from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_protocol.series import canonical_name
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.convert import Conversion, ConversionReport, convert
from fp8scope_trainer.data import Corpus, Text, batch_at, standard_library
from fp8scope_trainer.decoder import Decoder
from fp8scope_trainer.history import advance_histories
from fp8scope_trainer.options import TrainOptions, parse
from fp8scope_trainer.processes import StopSignal, World, joined, launch, launched, leave, stop_signal
from fp8scope_trainer.progress import Record, display, print_summary
from fp8scope_trainer.shard import shard

USAGE_ERROR = 2
WARM_UP_STEPS = 20
GRADIENT_CLIP = 1.0
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
    with stop_signal() as stop, joined(options.ranks) as world:
        corpus = standard_library()
        model, report = build(options, world)
        optimizer = AdamW(parameter_groups(model), lr=options.lr, seed=options.seed)
        if world.rank == 0:
            print(report, file=sys.stderr, flush=True)
        with attached(model, optimizer, options) as scope:
            record = train(model, optimizer, corpus, scope, options, world, stop)
        stopped = len(record.losses) < options.steps
        held_out = None if stopped else held_out_loss(model, corpus, options, world)
        if world.rank == 0 and options.json:
            print_summary(facts(model, options) | record.summary()
                          | {"stopped": stopped, "held_out_loss": held_out})
    return stop.exit_code if stopped else 0


def build(options: TrainOptions, world: World) -> tuple[nn.Module, ConversionReport]:
    """The model, the same on every rank before it is sharded."""
    torch.manual_seed(options.seed)
    model: nn.Module = Decoder(options.model).to(world.device)
    delayed = (options.drill.layer,) if options.drill else ()
    report = convert(model, Conversion(precision=options.precision, delayed=delayed))
    if options.drill:
        options.drill.check(model)
    compute = torch.bfloat16 if world.device.type == "cuda" else None
    return shard(model, stage=2 if world.sharded else 0, compute=compute), report


def attached(
    model: nn.Module, optimizer: AdamW, options: TrainOptions
) -> AbstractContextManager[fp8scope.Scope | None]:
    """The probe on this job, or nothing."""
    if not options.probe:
        return nullcontext()
    return fp8scope.attach(model, optimizer, run=options.run, every=options.every,
                           detail_every=options.detail_every, budget=options.budget,
                           collector=options.collector, remote_control=options.remote_control)


def train(
    model: nn.Module, optimizer: AdamW, corpus: Corpus[Text], scope: fp8scope.Scope | None,
    options: TrainOptions, world: World, stop: StopSignal,
) -> Record:
    """Steps until all are done or any rank is asked to stop."""
    record = Record(tokens_per_step=options.batch * options.model.context * world.size)
    with display(options.steps, rank=world.rank) as show:
        for step in range(options.steps):
            if options.drill:
                options.drill.before_step(model, step)
            set_lr(optimizer, options.lr * min(1.0, (step + 1) / WARM_UP_STEPS))
            record.note_precision(step, precisions(model))
            loss, norm = train_step(model, optimizer, batch(corpus.train, step, options, world))
            if scope is not None:
                if options.fidelity_every and (step + 1) % options.fidelity_every == 0:
                    scope.grad_fidelity(*(
                        partial(next_byte_loss, model, batch(corpus.train, one, options, world))
                        for one in (step, step + 1)))
                scope.step(step, skipped=not math.isfinite(norm), loss=loss, grad_norm=norm)
            mean, stopping = world.agree(loss, stop.asked)
            show(step, mean, record.add(mean))
            if stopping:
                break
    return record


def train_step(model: nn.Module, optimizer: AdamW, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """One optimizer step, skipped if the gradient is not finite.

    Returns this rank's loss and the norm of the whole gradient before clipping.
    """
    loss = next_byte_loss(model, pair)
    torch.autograd.backward(loss)
    norm = whole(nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)).item()
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    advance_histories(model)
    return loss.detach(), norm


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus[Text], options: TrainOptions, world: World) -> float:
    """Mean loss on text that is never trained on, over all ranks."""
    model.eval()
    losses = [next_byte_loss(model, batch(corpus.held_out, step, options, world))
              for step in range(HELD_OUT_BATCHES)]
    model.train()
    mean, _ = world.agree(torch.stack(losses).mean(), False)
    return round(mean, 6)


def next_byte_loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy in fp32, in nats per byte."""
    tokens, targets = pair
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def batch(text: Text, step: int, options: TrainOptions, world: World) -> tuple[Tensor, Tensor]:
    """This rank's sequences of a step, on its device."""
    tokens, targets = batch_at(text, step=step, batch=options.batch, length=options.model.context,
                               rank=world.rank, ranks=world.size, seed=options.seed)
    return tokens.to(world.device), targets.to(world.device)


def facts(model: nn.Module, options: TrainOptions) -> dict[str, Any]:
    """What was trained, for the summary."""
    return {
        "run": options.run, "preset": options.preset, "ranks": options.ranks, "seed": options.seed,
        "precision": options.precision, "parameters": sum(p.numel() for p in model.parameters()),
        "drill": asdict(options.drill) | {"layer": options.drill.layer} if options.drill else None,
    }


def precisions(model: nn.Module) -> dict[str, str]:
    """What each switchable layer will compute in."""
    return {canonical_name(name): layer.precision for name, layer in switchable_layers(model).items()}


def set_lr(optimizer: AdamW, lr: float) -> None:
    """The same learning rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def whole(tensor: Tensor) -> Tensor:
    """A DTensor reduced over its mesh; any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    leave(main())
