"""Update rules: what one step makes of a weight w, its gradient g and its moments, in fp32.

    AdamW   m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
            d = (m / (1 - b1^t)) / (sqrt(v) / sqrt(1 - b2^t) + eps)       u = d, at most `clip` in size
            w = w (1 - lr wd) - lr u                        (decoupled decay; Loshchilov & Hutter 2019)
    Adam    the same with g + wd w in place of g, and without the decay of w    (Kingma & Ba 2015, L2)
    SGD     g = g + wd w      b = mu b + g      u = b, or g + mu b with nesterov      w = w - lr u
            of a group with momentum 0: u = g, and nothing is kept
    Lion    u = sign(b1 m + (1 - b1) g)      w = w (1 - lr wd) - lr u      m = b2 m + (1 - b2) g
                                                            (Chen et al. 2023, algorithm 2)

Every operation is rounded by itself, in the order written, so that a kernel can give the same bits: no fused
multiply-add, no lerp. 1 / (1 - b1^t) and 1 / sqrt(1 - b2^t) come from float64 on the host. All scalars are
rounded to fp32 before they meet a tensor. An SGD buffer begins as zero, so its first step is g.

The step uses the exact moments; they are rounded once, when they are stored. A `clip` of 3 is never reached
by exact moments at AdamW's default betas; it bounds what a damaged second moment can do.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What a rule keeps: the keys of its states, the signed one first; `root` holds sqrt(v)."""

    name: str
    signed: str | None = None
    root: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the states."""
        return tuple(key for key in (self.signed, self.root) if key is not None)


ADAMW = Rule(name="adamw", signed="exp_avg", root="exp_avg_sq")
ADAM = Rule(name="adam", signed="exp_avg", root="exp_avg_sq")
SGD = Rule(name="sgd", signed="momentum_buffer")
LION = Rule(name="lion", signed="exp_avg")
PLAIN = Rule(name="sgd")
"""SGD without momentum."""

RULES = {rule.name: rule for rule in (ADAMW, ADAM, SGD, LION)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalars:
    """Numbers of one step of a group, already rounded to fp32; those that a rule has no use for are 0."""

    lr: float
    decay: float
    """1 - lr wd: what w is multiplied by. AdamW and Lion."""
    weight_decay: float
    """Added to the gradient as wd w. Adam and SGD."""
    keep: tuple[float, float] = (0.0, 0.0)
    """b1, b2; (mu, 0) of SGD."""
    take: tuple[float, float] = (0.0, 0.0)
    """1 - b1, 1 - b2."""
    correction: tuple[float, float] = (1.0, 1.0)
    """1 / (1 - b1^t), 1 / sqrt(1 - b2^t). Adam and AdamW."""
    eps: float = 0.0
    clip: float = math.inf
    nesterov: bool = False
    seed: int = 0
    step: int
    """t >= 1. It and `seed` name the random numbers."""


class Moments(NamedTuple):
    """fp32, shaped like the weight."""

    signed: Tensor | None
    """m, or the momentum; None of `PLAIN`."""
    square: Tensor | None
    """v; None where the rule has none."""


class Moved(NamedTuple):
    """After a step, fp32, all shaped like the weight."""

    weight: Tensor
    moments: Moments
    direction: Tensor
    """u before clipping, in units of lr."""


def rule_of(rule: Rule, group: Mapping[str, Any]) -> Rule:
    """What of a rule a group of these options needs."""
    return PLAIN if rule is SGD and not group["momentum"] else rule


def scalars(rule: Rule, group: Mapping[str, Any], step: int) -> Scalars:
    """Of the options of a group at step t >= 1."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    common: dict[str, Any] = {"lr": _fp32(lr), "decay": _fp32(1 - lr * decay), "weight_decay": _fp32(decay),
                              "seed": group["seed"], "step": step}
    if rule.name == SGD.name:
        return Scalars(**common, keep=(_fp32(group["momentum"]), 0.0), nesterov=bool(group["nesterov"]))
    b1, b2 = (float(beta) for beta in group["betas"])
    betas: dict[str, Any] = {"keep": (_fp32(b1), _fp32(b2)), "take": (_fp32(1 - b1), _fp32(1 - b2))}
    if rule is LION:
        return Scalars(**common, **betas)
    clip = math.inf if group["clip"] is None else _fp32(group["clip"])
    correction = (_fp32(1 / (1 - b1**step)), _fp32(1 / math.sqrt(1 - b2**step)))
    return Scalars(**common, **betas, correction=correction, eps=_fp32(group["eps"]), clip=clip)


def move(
    rule: Rule, weight: Tensor, gradient: Tensor, signed: Tensor | None, square: Tensor | None, by: Scalars
) -> Moved:
    """One step; all tensors fp32 of one shape. Nothing is changed in place."""
    if rule.name == SGD.name:
        return _sgd(weight, gradient, signed, by)
    assert signed is not None
    if rule is LION:
        return _lion(weight, gradient, signed, by)
    assert square is not None
    return _adam(rule, weight, gradient, signed, square, by)


def _adam(rule: Rule, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, by: Scalars) -> Moved:
    if rule is ADAM:
        gradient = gradient + weight * by.weight_decay
    m = m * by.keep[0] + gradient * by.take[0]
    v = v * by.keep[1] + (gradient * gradient) * by.take[1]
    direction = (m * by.correction[0]) / (root_of(v) * by.correction[1] + by.eps)
    change = direction.clamp(-by.clip, by.clip) * by.lr
    return Moved((weight * by.decay if rule is ADAMW else weight) - change, Moments(m, v), direction)


def _sgd(weight: Tensor, gradient: Tensor, buffer: Tensor | None, by: Scalars) -> Moved:
    gradient = gradient + weight * by.weight_decay
    if buffer is None:
        return Moved(weight - gradient * by.lr, Moments(None, None), gradient)
    buffer = buffer * by.keep[0] + gradient
    direction = gradient + buffer * by.keep[0] if by.nesterov else buffer
    return Moved(weight - direction * by.lr, Moments(buffer, None), direction)


def _lion(weight: Tensor, gradient: Tensor, m: Tensor, by: Scalars) -> Moved:
    direction = (m * by.keep[0] + gradient * by.take[0]).sign()
    m = m * by.keep[1] + gradient * by.take[1]
    return Moved(weight * by.decay - direction * by.lr, Moments(m, None), direction)


def root_of(v: Tensor) -> Tensor:
    """sqrt(v), the nearest fp32. On a CPU a fifth of torch's own are off by a bit (of 100,000)."""
    return v.sqrt() if v.is_cuda else v.double().sqrt().float()


def _fp32(x: float) -> float:
    """x rounded to fp32. Too large for it is Inf."""
    try:
        return float(struct.unpack("f", struct.pack("f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)
