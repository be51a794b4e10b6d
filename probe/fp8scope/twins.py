"""Twins: exact fp32 moments of a sample of blocks, run beside moments that an optimizer stores in fewer bits.

    update_error = ||u - u'|| / ||u'||        update_norm_ratio = ||u|| / ||u'||

u is the step that follows from the stored moments and this step's gradient, u' the one from the twins. One
step alone is blind: what a stored moment has lost it has lost before, so a twin lives as long as the run
and sees every gradient, not only those of sampled steps. It starts with zeros, as the optimizer does; where
the probe is attached later, or a checkpoint is loaded, from the moments as they are stored, which is said
in an event.

What it costs: 8 bytes for each element of the sample (768 of a parameter, unless FP8SCOPE_TWIN_ELEMENTS says
otherwise) and, in every step, one gather of gradients and three operations over the sample, in place. Moments
in fp32 have no twin; they would read exactly 0 and 1. What so few elements tell is in docs/optimizers.md.

A gradient scaler's skip inside a fused optimizer freezes the twins too. Gradients are those that the
optimizer gets: unscaled, clipped, and with coupled weight decay added.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8scope.adam import AdamForm, Number, adam_form, host_steps, steps_of
from fp8scope.change import update_sums, weights_of
from fp8scope.layers import ParameterPlace
from fp8scope.our_states import TWINS_ALONE
from fp8scope.sample import KEPT_BLOCK, MOST_KEPT, Sample
from fp8scope.sharding import local
from fp8scope.states import Places
from fp8scope.stored import Moments, State, StoredAs, may_lose, read_moments, rounding_of, stored_as
from fp8scope.updates import Samples, state_of
from fp8scope.watch import Watch
from fp8scope_protocol.series import Series


class Comparison(NamedTuple):
    """What one step from stored moments did, against that from the twins."""

    sample: Sample
    sums: dict[str, Tensor]


class Twin:
    """Exact moments of one sample."""

    def __init__(self, sample: Sample, moments: Moments, *, fresh: bool) -> None:
        self.sample = sample
        self.fresh = fresh
        """Whether some states do not exist yet, so that nobody knows how they will be stored."""
        self.m, self.v = moments
        self.counts: list[float] | None = None
        """Steps of each part after the last one that the twin has seen; None where they are on a GPU."""
        self.stored: Moments | None = None
        """The stored moments before a detailed step."""
        self.weights: Tensor | None = None
        """Before the step, where they decay through the gradient."""
        self.advanced = False
        self.comparison: Comparison | None = None

    def follows(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's states are still those of the last step: none was loaded since."""
        states = [state_of(optimizer, part.parameter) for part in self.sample.parts]
        return self.counts is None or self.counts == host_steps(states)

    def put(self, kept: Sequence[int], m: Tensor, v: Tensor) -> None:
        """Replaces the moments of some of the parts."""
        if len(kept) == len(self.sample.parts):
            self.m, self.v = m, v
            return
        sizes = [part.elements for part in self.sample.parts]
        new = torch.split(m, [sizes[i] for i in kept]), torch.split(v, [sizes[i] for i in kept])
        for mine, theirs in zip((self.m, self.v), new, strict=True):
            each = torch.split(mine, sizes)
            for i, values in zip(kept, theirs, strict=True):
                each[i].copy_(values)


class Twins:
    """The twins of all optimizers of one attach."""

    def __init__(self, watch: Watch, places: Places, *, most: int = MOST_KEPT) -> None:
        self.watch = watch
        self.samples = Samples(watch, places, block=KEPT_BLOCK, most=most)
        self._twins: dict[int, dict[Sample, Twin | None]] = {}
        """Optimizer -> sample of a group -> its twin; None where nothing in it needs one."""

    @property
    def bytes(self) -> int:
        """Memory of all twins."""
        found = [twin for twins in self._twins.values() for twin in twins.values() if twin is not None]
        return sum(twin.m.nbytes + twin.v.nbytes for twin in found)

    def forget(self, optimizer: Optimizer) -> None:
        """Other states were loaded: twins begin anew."""
        self._twins.pop(id(optimizer), None)

    def before(self, optimizer: Optimizer, *, ready: bool) -> None:
        """A step begins. `ready`: gradients are there; else a closure makes them and `after` reads them."""
        if self.watch.sampling:
            self.samples.follow()
        old = self._twins.pop(id(optimizer), {})
        self._twins[id(optimizer)] = now = {}
        for form, sample in self.samples.of(optimizer):
            known = form.lazy or (sample in old and not self.watch.detailed and old[sample] is None)
            now[sample] = twin = None if known else self._twin(optimizer, sample, old.get(sample))
            if twin is None:
                continue
            states = [state_of(optimizer, part.parameter) for part in twin.sample.parts]
            twin.stored = read_moments(twin.sample, states) if self.watch.detailed else None
            twin.weights = weights_of(twin.sample) if form.weight_decay and not form.decoupled else None
            twin.advanced = False
            if ready:
                self._advance(optimizer, form, twin, states, ahead=1)

    def after(self, optimizer: Optimizer) -> None:
        """The step is done."""
        if self.watch.detailed:
            self._announce(optimizer)
        for form, sample in self.samples.of(optimizer):
            twin = self._twins.get(id(optimizer), {}).get(sample)
            if twin is None:
                continue
            states = [state_of(optimizer, part.parameter) for part in twin.sample.parts]
            if not twin.advanced:
                self._advance(optimizer, form, twin, states, ahead=0)
            twin.stored = twin.weights = None
            twin.counts = host_steps(states)
            if twin.comparison is not None:
                self._report(optimizer, *twin.comparison)
                twin.comparison = None
            if twin.fresh:
                self._twins[id(optimizer)][sample] = _pruned(twin, states)

    def _announce(self, optimizer: Optimizer) -> None:
        """Every rank has the series of moments that lose something, whichever keeps their twins."""
        for group in optimizer.param_groups:
            if adam_form(optimizer, group) is None:
                continue
            for parameter in group["params"]:
                place = self.samples.places.get(id(parameter))
                one = stored_as(parameter, state_of(optimizer, parameter), rounding_of(optimizer))
                if place is not None and one is not None:
                    self.watch.rows.row(twin_series(place, one))

    def _twin(self, optimizer: Optimizer, sample: Sample, twin: Twin | None) -> Twin | None:
        """`twin` if it still fits, else one from the states as they are now."""
        if twin is not None and not self.watch.detailed and twin.follows(optimizer):
            return twin
        states = [state_of(optimizer, part.parameter) for part in sample.parts]
        pairs = list(zip(sample.parts, states, strict=True))
        kept = [i for i, (part, state) in enumerate(pairs)
                if may_lose(part.parameter, state)]
        if not kept:
            return None
        some, found = sample.only(kept), [states[i] for i in kept]
        if twin is not None and twin.sample.of_the_same(some) and twin.follows(optimizer):
            return twin
        if any(found):
            self.watch.unobserved("optimizer", "update_error: fp32 twins begin with the moments as they are "
                                               "stored; what was lost in them before is not seen")
        return Twin(some, read_moments(some, found), fresh=not all(found))

    def _advance(self, optimizer: Optimizer, form: AdamForm, twin: Twin, states: list[State], *,
                 ahead: int) -> None:
        """One exact step of the twin; in detailed steps the one from the stored moments beside it."""
        twin.advanced = True
        moved = [i for i, part in enumerate(twin.sample.parts) if part.parameter.grad is not None]
        if not moved:
            return
        some = twin.sample.only(moved)
        gradient = _gradient(optimizer, form, some)
        if twin.weights is not None:
            gradient.add_(twin.sample.pick(twin.weights, moved) * form.weight_decay)
        exact = Moments(twin.sample.pick(twin.m, moved), twin.sample.pick(twin.v, moved))
        got = None
        if twin.stored is not None:
            steps = steps_of([states[i] for i in moved], some.device, ahead=ahead)
            stored = Moments(*(twin.sample.pick(x, moved) for x in twin.stored))
            got = form.direction(some, *_move(stored, gradient.clone(), form, None), steps)
            del stored
        twin.put(moved, *_move(exact, gradient, form, getattr(optimizer, "found_inf", None)))
        if got is not None:
            wanted = form.direction(some, *exact, steps)
            twin.comparison = Comparison(some, update_sums(some, wanted, got))

    def _report(self, optimizer: Optimizer, sample: Sample, sums: dict[str, Tensor]) -> None:
        """To the rows of second moments, once the step has shown how they are stored."""
        formats = [stored_as(part.parameter, state_of(optimizer, part.parameter), rounding_of(optimizer))
                   for part in sample.parts]
        kept = [i for i, one in enumerate(formats) if one is not None]
        pairs = [(part, one) for part, one in zip(sample.parts, formats, strict=True) if one is not None]
        if pairs:
            which = torch.tensor(kept).to(sample.device, non_blocking=True)
            self.watch.rows.add(
                [twin_series(part.place, one) for part, one in pairs],
                elements=[0 if _is_counted(one) else part.elements for part, one in pairs],
                sums={key: values[which] for key, values in sums.items()})


def _is_counted(one: StoredAs) -> bool:
    """Whether the states of a detailed step bring their elements by themselves."""
    return one.scaling != "none" and one.format not in TWINS_ALONE


def _pruned(twin: Twin, states: list[State]) -> Twin | None:
    """Without the parts whose moments turned out to be exact, or to be stored in a way that nobody knows."""
    pairs = zip(twin.sample.parts, states, strict=True)
    kept = [i for i, (part, state) in enumerate(pairs)
            if may_lose(part.parameter, state)]
    twin.fresh = not all(states)
    if len(kept) == len(twin.sample.parts):
        return twin
    if not kept:
        return None
    moments = Moments(twin.sample.pick(twin.m, kept), twin.sample.pick(twin.v, kept))
    pruned = Twin(twin.sample.only(kept), moments, fresh=twin.fresh)
    pruned.counts = None if twin.counts is None else [twin.counts[i] for i in kept]
    return pruned


def _move(moments: Moments, gradient: Tensor, form: AdamForm, found_inf: Tensor | None) -> Moments:
    """One step of `moments`, in place, unless `found_inf` is there and not 0; `gradient` is used up."""
    rates: list[Number] = [1 - beta for beta in form.betas]
    if found_inf is not None:
        goes = found_inf.to(gradient.device, non_blocking=True) == 0
        gradient.copy_(torch.where(goes, gradient, 0.0))  # it may hold a NaN, which no factor takes away
        rates = [goes * rate for rate in rates]
    moments.m.lerp_(gradient, rates[0])
    moments.v.lerp_(gradient.square_(), rates[1])
    return moments


def _gradient(optimizer: Optimizer, form: AdamForm, sample: Sample) -> Tensor:
    """fp32 [elements], as the optimizer uses it."""
    gradients = [part.parameter.grad for part in sample.parts]
    found = sample.gather([local(gradient) for gradient in gradients if gradient is not None]).float()
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:
        found = found / scale.to(found.device, non_blocking=True)
    return -found if form.maximize else found


def twin_series(place: ParameterPlace, one: StoredAs) -> Series:
    """The series of second moments that are stored in few bits: `update_error`."""
    return Series(name=place.name, role="exp_avg_sq", format=one.format, scaling=one.scaling,
                  rounding=one.rounding, live=True, module=place.module, depth=place.depth,
                  aliases=place.aliases)
