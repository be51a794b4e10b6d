"""Rules: from measurements to precision changes, as a pure function.

A rule watches every layer that its pattern selects. It *enters* (sends the layer to BF16) when its enter
clause holds, and *leaves* (back to FP8) when its leave clause holds and the layer has dwelt long enough.
Enter and leave have thresholds of their own, and a cool-down follows each return, so a metric that
hovers at a threshold cannot make a layer flap. NaN is always bad. A missing sample is never good.

    fp8 --enter--> bf16 --leave (after dwell_steps)--> fp8 (cool-down) ...
                                   after max_switches entries: stuck in bf16, an alert, no more commands

`evaluate` knows nothing of databases or clocks: (rule, state, samples) -> (state, decisions). The state
is plain data that survives a restart of the collector.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from fp8scope_protocol.bounds import check_finite, check_share, check_whole
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.metrics import parse_metric
from fp8scope_protocol.series import ORIENTATIONS, ROLES

Mode = Literal["auto", "dry-run"]
Combine = Literal["all", "any"]
Status = Literal["fp8", "bf16", "stuck"]

MOST_SWITCHES = 1000
"""Largest `max_switches`: a layer that was sent to BF16 this often is not saved by being taken back."""

Sample = Mapping[tuple[str, str, str], float]
"""(metric, role, orientation) -> value, of one layer at one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """`metric` of a role beyond `threshold` in at least `k` of the last `n` samples."""

    metric: str
    role: str
    threshold: float
    beyond: Literal["above", "below"] = "above"
    orientation: str = "rowwise"
    k: int = 1
    n: int = 1

    def __post_init__(self) -> None:
        parse_metric(self.metric)
        if self.role not in ROLES:
            raise Invalid("role", self.role, f"must be one of {', '.join(ROLES)}")
        if self.orientation not in ORIENTATIONS:
            raise Invalid("orientation", self.orientation, f"must be one of {', '.join(ORIENTATIONS)}")
        if self.beyond not in ("above", "below"):
            raise Invalid("beyond", self.beyond, "must be above or below")
        check_whole("n", self.n, least=1, most=64)
        check_whole("k", self.k, least=1, most=64)
        if self.k > self.n:
            raise Invalid("k of n", (self.k, self.n), "needs 1 <= k <= n <= 64")
        check_finite("threshold", self.threshold)

    def holds(self, sample: Sample, *, nan: bool) -> bool | None:
        """Whether one sample is beyond the threshold; `nan` for NaN; None where it is missing."""
        value = sample.get((self.metric, self.role, self.orientation))
        if value is None:
            return None
        if math.isnan(value):
            return nan
        return value > self.threshold if self.beyond == "above" else value < self.threshold

    def __str__(self) -> str:
        sign = ">" if self.beyond == "above" else "<"
        window = "" if self.n == 1 else f" in {self.k} of {self.n} samples"
        side = "" if self.orientation == "rowwise" else f" {self.orientation}"
        return f"{self.role}{side} {self.metric} {sign} {self.threshold:g}{window}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """Conditions joined by `all` or `any`."""

    conditions: tuple[Condition, ...]
    combine: Combine = "all"

    def __post_init__(self) -> None:
        if not 1 <= len(self.conditions) <= 16:
            raise Invalid("conditions", len(self.conditions), "must be 1 to 16")
        if self.combine not in get_args(Combine):
            raise Invalid("combine", self.combine, "must be all or any")

    def __str__(self) -> str:
        return (" and " if self.combine == "all" else " or ").join(map(str, self.conditions))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """When to send which layers to BF16, and when to take them back."""

    name: str
    modules: str
    """Pattern over layer names (`series.matching_names`)."""
    enter: Clause
    leave: Clause | None = None
    """None: a layer that entered stays in BF16."""
    mode: Mode = "auto"
    dwell_steps: int = 10
    """Least number of steps in BF16 before a return."""
    cooldown_steps: int = 20
    """Least number of steps in FP8 after a return before the rule may enter again."""
    max_switches: int = 3
    """Entries per layer before it stays in BF16 for good, with an alert."""
    max_share: float = 0.5
    """Largest share of the selected layers that the rule may hold in BF16 (at least one layer)."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64 or not self.name.replace("-", "").replace("_", "").isalnum():
            raise Invalid("name", self.name[:80], "must be 1 to 64 letters, digits, - or _")
        if not self.modules or len(self.modules) > 256:
            raise Invalid("modules", self.modules[:80], "must be a pattern of 1 to 256 characters")
        if self.mode not in get_args(Mode):
            raise Invalid("mode", self.mode, f"must be one of {', '.join(get_args(Mode))}")
        for name in ("dwell_steps", "cooldown_steps"):
            check_whole(name, getattr(self, name))
        check_whole("max_switches", self.max_switches, least=1, most=MOST_SWITCHES)
        check_share("max_share", self.max_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerState:
    """What a rule remembers of one layer."""

    status: Status = "fp8"
    since_step: int = -1
    """Step of the last change; -1 before the first."""
    switches: int = 0
    enter_window: tuple[tuple[bool, ...], ...] = ()
    """Per enter condition, its newest verdicts, oldest first."""
    leave_window: tuple[tuple[bool, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleState:
    """What a rule remembers of a run's newest attempt."""

    attempt: str = ""
    last_step: int = -1
    layers: dict[str, LayerState] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A change the rule wants, with the numbers that led to it."""

    module: str
    precision: Precision | None
    """None: an alert only (the layer is stuck, or the budget is spent)."""
    step: int
    why: str


def evaluate(
    rule: Rule, state: RuleState, *, attempt: str, step: int, samples: Mapping[str, Sample]
) -> tuple[RuleState, tuple[Decision, ...]]:
    """Judge one sampled step. `samples` maps each selected layer to its numbers at `step`.

    A new attempt starts with a fresh state. Steps at or before the newest one already judged are
    replays: they change nothing.
    """
    if attempt != state.attempt:
        state = RuleState(attempt=attempt)
    if step <= state.last_step:
        return state, ()
    layers = dict(state.layers)
    decisions: list[Decision] = []
    budget = max(1, int(rule.max_share * len(samples)))
    for module, sample in samples.items():
        held = sum(one.status != "fp8" for one in layers.values())
        layer, decision = _judge(rule, layers.get(module, LayerState()), module, step, sample, held < budget)
        layers[module] = layer
        if decision is not None:
            decisions.append(decision)
    return RuleState(attempt=attempt, last_step=step, layers=layers), tuple(decisions)


def _judge(
    rule: Rule, layer: LayerState, module: str, step: int, sample: Sample, room: bool
) -> tuple[LayerState, Decision | None]:
    if layer.status == "stuck":
        return layer, None
    if layer.status == "bf16":
        return _judge_return(rule, layer, module, step, sample)
    window, holds = _push(rule.enter, layer.enter_window, sample, nan=True)
    layer = replace(layer, enter_window=window)
    cooling = layer.since_step >= 0 and step - layer.since_step < rule.cooldown_steps
    if not holds or cooling:
        return layer, None
    why = f"{rule.enter} ({_numbers(rule.enter, sample)})"
    if not room:
        return layer, Decision(module=module, precision=None, step=step,
                               why=f"{why}, but the rule already holds its largest share in BF16")
    switches = layer.switches + 1
    entered = LayerState(status="bf16", since_step=step, switches=switches)
    return entered, Decision(module=module, precision="bf16", step=step, why=why)


def _judge_return(
    rule: Rule, layer: LayerState, module: str, step: int, sample: Sample
) -> tuple[LayerState, Decision | None]:
    if rule.leave is None:
        return layer, None
    window, calm = _push(rule.leave, layer.leave_window, sample, nan=False)
    layer = replace(layer, leave_window=window)
    if not calm or step - layer.since_step < rule.dwell_steps:
        return layer, None
    why = f"{rule.leave} ({_numbers(rule.leave, sample)})"
    if layer.switches >= rule.max_switches:
        return replace(layer, status="stuck"), Decision(
            module=module, precision=None, step=step,
            why=f"sent to BF16 {layer.switches} times: it stays there (max_switches = {rule.max_switches})")
    back = LayerState(status="fp8", since_step=step, switches=layer.switches)
    return back, Decision(module=module, precision="fp8", step=step, why=why)


def _push(
    clause: Clause, window: tuple[tuple[bool, ...], ...], sample: Sample, *, nan: bool
) -> tuple[tuple[tuple[bool, ...], ...], bool]:
    """Append one verdict per condition; a missing sample adds none. Returns (window, clause holds)."""
    grown: list[tuple[bool, ...]] = []
    verdicts: list[bool] = []
    for i, condition in enumerate(clause.conditions):
        past = window[i] if i < len(window) else ()
        verdict = condition.holds(sample, nan=nan)
        past = past if verdict is None else (*past, verdict)[-condition.n:]
        grown.append(past)
        verdicts.append(sum(past) >= condition.k)
    return tuple(grown), (all if clause.combine == "all" else any)(verdicts)


def _numbers(clause: Clause, sample: Sample) -> str:
    found = []
    for one in clause.conditions:
        value = sample.get((one.metric, one.role, one.orientation))
        found.append(f"{one.metric} = {'missing' if value is None else format(value, '.4g')}")
    return ", ".join(found)
