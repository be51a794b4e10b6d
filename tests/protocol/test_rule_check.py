"""Rules that could never fire, or would undo themselves, are refused; all others are not."""

from typing import Any

import pytest

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.metrics import METRICS
from fp8scope_protocol.rule_check import check_rule
from fp8scope_protocol.rules import Clause, Condition, Rule


def one(metric: str, threshold: float, beyond: str = "above", role: str = "activation",
        **more: Any) -> Condition:
    return Condition(metric=metric, role=role, threshold=threshold,
                     beyond=beyond, **more)  # type: ignore[arg-type]


def rule(enter: list[Condition], leave: list[Condition] | None = None, *, entering: str = "all",
         leaving: str = "all") -> Rule:
    back = None if leave is None else Clause(conditions=tuple(leave), combine=leaving)  # type: ignore[arg-type]
    return Rule(name="r", modules="**", leave=back,
                enter=Clause(conditions=tuple(enter), combine=entering))  # type: ignore[arg-type]


@pytest.mark.parametrize(("condition", "rule_text"), [
    (one("underflow_ratio", 1.5), "underflow_ratio is at most 1"),
    (one("underflow_ratio", 1.0), "underflow_ratio is at most 1"),
    (one("underflow_ratio", 0.0, "below"), "underflow_ratio is at least 0"),
    (one("distortion", 2), "distortion is at most 2"),
    (one("nan_count", 1e30), "nan_count is at most 1.8"),
    (one("nan_count", 0, "below"), "nan_count is at least 0"),
    (one("amax", 1e39), "amax is at most 3.4"),
    (one("gemm_error", -1, "below"), "gemm_error is at least 0"),
    (one("gemm_error", 0.1, role="weight"), "measured of activation, not of weight"),
    (one("gemm_error", 0.1, orientation="columnwise"), "of activation gemm_error is measured rowwise only"),
    (one("update_gain", 0.9, "below"), "measured of weight, not of activation"),
    (one("underflow_ratio", 0.1, role="dgrad"), "not of dgrad"),
    (one("grad_fidelity", 0.1, role="gradient"), "measured of wgrad, not of gradient"),
    (one("underflow_ratio", 0.1, role="exp_avg", orientation="columnwise"), "measured rowwise only"),
])
def test_a_condition_that_can_never_hold_is_refused(condition: Condition, rule_text: str) -> None:
    """In either clause, alone or beside one that can: out of the metric's range, or not measured there."""
    fine = one("saturation_ratio", 0.5)
    for refused, field in ((rule([condition]), "enter"), (rule([fine, condition], entering="any"), "enter"),
                           (rule([fine], [condition]), "leave")):
        with pytest.raises(Invalid, match=f"{field} = .*can never hold: .*{rule_text}"):
            check_rule(refused)


@pytest.mark.parametrize(("enter", "leave", "joined"), [
    ([one("underflow_ratio", 0.5)], [one("underflow_ratio", 0.9, "below")], {}),
    ([one("underflow_ratio", 0.5)], [one("underflow_ratio", 0.3)], {}),
    ([one("sqnr_db", 20, "below")], [one("sqnr_db", 10)], {}),
    ([one("nan_count", 0)], [one("nan_count", 2, "below")], {}),
    ([one("amax", 9), one("rms", 1)], [one("rms", 2, "below")], {}),
    ([one("amax", 9), one("rms", 1)], [one("rms", 2, "below"), one("amax", 5, "below")],
     {"entering": "any", "leaving": "any"}),
])
def test_leaving_while_entering_is_refused(
    enter: list[Condition], leave: list[Condition], joined: dict[str, str]
) -> None:
    """A sample that satisfies both clauses, on a metric that both look at, would move the layer for ever."""
    with pytest.raises(Invalid, match=r"leave = .*can hold while enter does"):
        check_rule(rule(enter, leave, **joined))


@pytest.mark.parametrize(("enter", "leave", "joined"), [
    ([one("underflow_ratio", 0.5)], [one("underflow_ratio", 0.5, "below")], {}),
    ([one("underflow_ratio", 0.5)], None, {}),
    ([one("underflow_ratio", 0.0)], [one("amax", 1e6, "below")], {}),
    ([one("nan_count", 0)], [one("nan_count", 1, "below")], {}),
    ([one("sqnr_db", 10, "below")], [one("sqnr_db", 20)], {}),
    ([one("amax", 9)], [one("rms", 2, "below"), one("amax", 5, "below")], {}),
    ([one("scale_log2_mean", -500)], None, {}),
    ([one("underflow_ratio", 0.1, role="gradient", orientation="columnwise")], None, {}),
    ([one("amax", 9, k=2, n=4), one("amax", 1, "below", k=2, n=4)], None, {}),
])
def test_a_rule_that_can_do_what_it_says_is_accepted(
    enter: list[Condition], leave: list[Condition] | None, joined: dict[str, str]
) -> None:
    """Touching thresholds, counts with no whole number between, and different metrics among them."""
    check_rule(rule(enter, leave, **joined))


def test_conditions_that_rule_each_other_out_cannot_be_joined() -> None:
    """By `all`, where their windows are too short for both; `any` may have them."""
    apart = [one("amax", 9, k=2, n=3), one("amax", 1, "below", k=2, n=3)]
    with pytest.raises(Invalid, match=r"enter = .* and .*can never hold together"):
        check_rule(rule(apart))
    check_rule(rule(apart, entering="any"))


def test_every_metric_of_a_series_can_be_waited_for() -> None:
    """Of each role that it is measured of, by some threshold: no row of the catalogue shuts itself out."""
    for metric in METRICS.values():
        assert metric.roles
        for role in metric.roles:
            for orientation in metric.orientations_of(role):
                check_rule(rule([one(metric.key, 0.5, role=role, orientation=orientation)]))
