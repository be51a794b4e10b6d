"""Rules: when a layer goes to BF16, when it comes back, and when nothing may happen."""

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import pytest

from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.rules import Clause, Condition, Decision, Rule, RuleState, evaluate

KEY = ("saturation_ratio", "activation", "rowwise")


def _rule(**changes: object) -> Rule:
    enter = Clause(conditions=(Condition(metric="saturation_ratio", role="activation", threshold=0.5),))
    leave = Clause(conditions=(Condition(metric="saturation_ratio", role="activation", threshold=0.1,
                                         beyond="below", k=3, n=3),))
    fields = {"name": "r", "modules": "**", "enter": enter, "leave": leave, "dwell_steps": 5,
              "cooldown_steps": 10, "max_share": 1.0} | changes
    return Rule(**fields)  # type: ignore[arg-type]


def _run(rule: Rule, values: Sequence[float | None], *, every: int = 1) -> list[Decision]:
    state, decisions = RuleState(), list[Decision]()
    for step, value in zip(count(step=every), values, strict=False):
        sample = {} if value is None else {KEY: value}
        state, made = evaluate(rule, state, attempt="a", step=step, samples={"w": sample})
        decisions += made
    return decisions


def test_enter_dwell_leave() -> None:
    """It enters at the first bad sample and returns only after the dwell and three calm samples."""
    made = _run(_rule(), [0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert [(d.precision, d.step) for d in made] == [("bf16", 1), ("fp8", 6)]
    assert "saturation_ratio = 0.9" in made[0].why


def test_f5_a_metric_that_hovers_does_not_flap() -> None:
    """0.49 / 0.51 around a threshold of 0.5 for 100 steps: one switch."""
    made = _run(_rule(), [0.49 if i % 2 else 0.51 for i in range(100)])
    assert [d.precision for d in made] == ["bf16"]


def test_f5_nan_is_bad_and_a_missing_sample_is_not_good() -> None:
    """NaN enters; NaN and silence never lead back."""
    assert _run(_rule(), [math.nan])[0].precision == "bf16"
    assert len(_run(_rule(), [0.9] + [math.nan] * 30)) == 1
    assert len(_run(_rule(), [0.9] + [None] * 30)) == 1


def test_f5_a_layer_that_keeps_failing_stays_in_bf16() -> None:
    """After max_switches entries the rule stops switching and says so once."""
    pattern = [0.9] + [0.0] * 30
    made = _run(_rule(max_switches=2), pattern * 5)
    assert [d.precision for d in made] == ["bf16", "fp8", "bf16", None]
    assert "stays there" in made[-1].why


def test_cooldown_after_a_return() -> None:
    """A layer that just returned is left alone for cooldown_steps."""
    made = _run(_rule(cooldown_steps=10), [0.9] + [0.0] * 6 + [0.9] * 20)
    assert made[0].step == 0
    assert made[1].precision == "fp8"
    assert made[2].step - made[1].step == 10


def test_k_of_n_counts_samples_not_steps() -> None:
    """2 of 3 samples at a cadence of 10 steps."""
    bad = Condition(metric="saturation_ratio", role="activation", threshold=0.5, k=2, n=3)
    clause = Clause(conditions=(bad,))
    made = _run(_rule(enter=clause), [0.9, 0.0, 0.0, 0.9, None, 0.9], every=10)
    assert [d.step for d in made] == [50]


def test_replays_and_new_attempts() -> None:
    """An old step changes nothing; a new attempt starts afresh."""
    rule = _rule()
    state, first = evaluate(rule, RuleState(), attempt="a", step=5, samples={"w": {KEY: 0.9}})
    again, nothing = evaluate(rule, state, attempt="a", step=5, samples={"w": {KEY: 0.9}})
    assert (len(first), nothing, again) == (1, (), state)
    fresh, made = evaluate(rule, state, attempt="b", step=0, samples={"w": {KEY: 0.9}})
    assert fresh.attempt == "b"
    assert len(made) == 1


def test_budget() -> None:
    """max_share of four layers is two; the third gets an alert instead of a switch."""
    bad = {f"w{i}": {KEY: 0.9} for i in range(4)}
    _, made = evaluate(_rule(max_share=0.5), RuleState(), attempt="a", step=0, samples=bad)
    assert [d.precision for d in made] == ["bf16", "bf16", None, None]


def test_state_survives_json() -> None:
    """The state is plain data: what a restart reads back is what was written."""
    state, _ = evaluate(_rule(), RuleState(), attempt="a", step=3, samples={"w": {KEY: 0.9}})
    assert msgspec.json.decode(msgspec.json.encode(state), type=RuleState) == state


def test_bad_rules_are_refused_with_the_field_and_the_value() -> None:
    """A typing mistake in a metric names its near misses."""
    with pytest.raises(UnknownName, match="near misses: saturation_ratio"):
        Condition(metric="saturation_rate", role="activation", threshold=1)
    with pytest.raises(Invalid, match="role = 'activations'"):
        Condition(metric="amax", role="activations", threshold=1)
    with pytest.raises(Invalid, match="max_share = 0"):
        _rule(max_share=0)
    with pytest.raises(Invalid, match="k of n"):
        Condition(metric="amax", role="weight", threshold=1, k=3, n=2)


@pytest.mark.parametrize("value", [True, -1, 2**53 + 1, 2**9999, 1.5, "5", None, math.nan, math.inf],
                         ids=lambda value: type(value).__name__)
def test_numbers_of_a_rule_have_bounds(value: Any) -> None:
    """In Python as over HTTP: True is no number, and nothing is larger than JSON keeps."""
    for name in ("dwell_steps", "cooldown_steps", "max_switches", "max_share"):
        with pytest.raises(Invalid, match=f"{name} = "):
            _rule(**{name: value})
    for name in ("k", "n"):
        with pytest.raises(Invalid, match=f"{name} = "):
            Condition(**{"metric": "amax", "role": "weight", "threshold": 1.0, name: value})
    if value not in (-1, 2**53 + 1, 1.5):
        with pytest.raises(Invalid, match="threshold = "):
            Condition(metric="amax", role="weight", threshold=value)
