"""What the optimizer's step did to the weights, read from a sample of them in sampled steps.

`update_max`, `v_zero_share` and the update / weight ratio follow from the moments after the step (see
`adam`), for any optimizer of Adam's form that keeps no account of its own. On a sample, so `update_max` is
a lower bound: the largest update of a parameter with more than 16,384 elements may be one that is not looked
at.

`update_gain` = sum(applied x intended) / sum(intended^2) over the changes of a parameter's weights. The
intended change is Adam's, from the moments; the applied one is the weight after less the weight before.
Weights in 16 bits or fewer that have no master copy lose what is below half a unit in their last place: at
lr 1e-4 BF16 rounded to nearest takes 0.31 to 0.90 of what was intended, rounded stochastically all of it.
It is measured for those weights only; fp32 keeps everything down to lr 1e-8.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8scope.adam import AdamForm, adam_form
from fp8scope.backend import change
from fp8scope.change import Change, stored_weights_of
from fp8scope.layers import ParameterPlace
from fp8scope.sample import BLOCK, MOST_OF_ONE, Sample, draw
from fp8scope.sentinels import Sentinels
from fp8scope.states import Places
from fp8scope.stored import FORMAT_OF, State, is_plain, is_readable
from fp8scope.watch import Watch
from fp8scope_protocol.series import Series


class Samples:
    """The samples of every parameter group, drawn anew when its parameters change. block, most: as in
    `sample.draw`."""

    def __init__(
        self, watch: Watch, places: Places, *, block: int = BLOCK, most: int = MOST_OF_ONE
    ) -> None:
        self.watch = watch
        self.places = places
        self.block = block
        self.most = most
        self._known: dict[tuple[int, int], tuple[tuple[int, ...], tuple[Sample, ...]]] = {}

    def of(self, optimizer: Optimizer) -> list[tuple[AdamForm, Sample]]:
        """Samples of the groups of Adam's form, with the form as it is now."""
        found = []
        for index, group in enumerate(optimizer.param_groups):
            if (form := adam_form(optimizer, group)) is None:
                continue
            ids = tuple(map(id, group["params"]))
            known, samples = self._known.get((id(optimizer), index), ((), ()))
            if ids != known:
                samples = draw(group["params"], self.places, rank=self.watch.rank, world=self.watch.world,
                               block=self.block, most=self.most)
                self._known[id(optimizer), index] = (ids, samples)
            found += [(form, sample) for sample in samples]
        return found

    def follow(self) -> None:
        """Forgets samples of parameters that are called otherwise by now, as modules share other weights."""
        for key, (_, samples) in list(self._known.items()):
            if any((place := self.places.get(id(part.parameter))) is not None
                   and place.name != part.place.name for sample in samples for part in sample.parts):
                del self._known[key]


class Updates:
    """Reads the update of each sampled step."""

    def __init__(self, watch: Watch, samples: Samples, sentinels: Sentinels) -> None:
        self.watch = watch
        self.samples = samples
        self.sentinels = sentinels
        self._before: dict[Sample, Tensor] = {}
        """Weights before the step as they are stored, of samples that have no master copy."""

    def before(self, optimizer: Optimizer) -> None:
        """Keeps weights without a master copy as they are before the step."""
        self.samples.follow()
        for group in optimizer.param_groups:
            if adam_form(optimizer, group) is not None:
                for parameter in group["params"]:
                    self._announce(parameter)
        self._before = {sample: stored_weights_of(sample) for _, sample in self.samples.of(optimizer)
                        if sample.dtype.itemsize < 4 and sample.dtype in FORMAT_OF}

    def after(self, optimizer: Optimizer) -> None:
        """Reads what the step did."""
        for form, sample in self.samples.of(optimizer):
            states = [state_of(optimizer, part.parameter) for part in sample.parts]
            plain = [is_plain(part.parameter, states[i]) for i, part in enumerate(sample.parts)]
            moved = [i for i, part in enumerate(sample.parts) if part.parameter.grad is not None and states[i]
                     and (plain[i] or is_readable(part.parameter, states[i]))]
            if not moved or not (self.watch.detailed or all(plain[i] for i in moved)):
                continue  # reading codes takes some launches a parameter
            some, found = sample.only(moved), [states[i] for i in moved]
            before = self._before.get(sample) if isinstance(form.lr, Tensor) or form.lr else None
            did = change(some, form, found, None if before is None else sample.pick(before, moved))
            if getattr(optimizer, "step_stats", None) is None:
                self._tell(form, some, did)
            if before is not None:
                self.watch.rows.add(
                    [weight_series(part.place, sample.dtype) for part in some.parts],
                    elements=[part.elements for part in some.parts],
                    sums={"wanted2": did.wanted2, "got2": did.got2, "missed2": did.missed2})
        self._before.clear()

    def _announce(self, parameter: Tensor) -> None:
        """Every rank has the series of weights in few bits, whichever takes their sample."""
        place = self.samples.places.get(id(parameter))
        if place is None or parameter.element_size() >= 4:
            return
        if parameter.dtype in FORMAT_OF:
            self.watch.rows.row(weight_series(place, parameter.dtype))
        else:
            self.watch.unobserved(place.name, f"update_gain of weights in {parameter.dtype}")

    def _tell(self, form: AdamForm, sample: Sample, did: Change) -> None:
        """The sentinels; sums stand for the whole parameter."""
        lr = form.lr if isinstance(form.lr, Tensor) else float(form.lr)
        add = self.sentinels.add
        add("update_max", did.largest.amax())
        add("update_square", did.update2 @ sample.weights * lr * lr)
        add("weight_square", did.weight2 @ sample.weights)
        add("v_zero", did.vanished @ sample.weights)
        add("v_total", float(sum(part.elements * part.weight for part in sample.parts)))


def state_of(optimizer: Optimizer, parameter: Tensor) -> State:
    """What the optimizer keeps of a parameter; nothing before its first step."""
    state = optimizer.state.get(parameter)
    return state if isinstance(state, (dict, Mapping)) else {}  # dict alone first: it takes a tenth


def weight_series(place: ParameterPlace, dtype: torch.dtype) -> Series:
    """The series of weights of `dtype` that have no master copy: `update_gain`."""
    return Series(name=place.name, role="weight", format=FORMAT_OF[dtype], scaling="none", live=True,
                  module=place.module, depth=place.depth, aliases=place.aliases)
