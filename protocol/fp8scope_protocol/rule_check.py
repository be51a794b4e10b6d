"""Whether a rule can do what it says: one that could never fire, or undoes itself, is refused when it comes.

Not part of `Rule` itself: rules that were accepted before must still be read.

    a condition   its metric is measured for that role and orientation, and can get beyond its threshold
    a clause      of conditions that must hold together, none rules out another
    leave         no sample of a metric that both clauses look at satisfies both: the layer would go back and
                  forth for as long as that lasts
"""

import math
from collections.abc import Sequence
from itertools import combinations

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.metrics import METRICS, Metric
from fp8scope_protocol.rules import Clause, Condition, Rule

Key = tuple[str, str, str]
"""(metric, role, orientation)."""


def check_rule(rule: Rule) -> None:
    """`Invalid` names the clause, its text and what is wrong with it."""
    for field, clause in (("enter", rule.enter), ("leave", rule.leave)):
        if clause is not None:
            for condition in clause.conditions:
                _check_condition(field, condition)
            if clause.combine == "all":
                _check_together(field, clause.conditions)
    if rule.leave is not None:
        _check_apart(rule.enter, rule.leave)


def _check_condition(field: str, condition: Condition) -> None:
    metric = METRICS[condition.metric]
    if condition.role not in metric.roles:
        raise Invalid(field, str(condition), f"can never hold: {metric.key} is measured of "
                                             f"{', '.join(metric.roles)}, not of {condition.role}")
    if condition.orientation not in metric.orientations_of(condition.role):
        raise Invalid(field, str(condition),
                      f"can never hold: of {condition.role} {metric.key} is measured rowwise only")
    if not _meets(metric, [condition]):
        least, most = metric.range
        bound = f"at most {most:g}" if condition.beyond == "above" else f"at least {least:g}"
        raise Invalid(field, str(condition), f"can never hold: {metric.key} is {bound}")


def _check_together(field: str, conditions: Sequence[Condition]) -> None:
    """Windows are counted apart, so two that exclude each other can still both be true of k1 + k2 samples."""
    for one, other in combinations(conditions, 2):
        apart = _key(one) == _key(other) and not _meets(METRICS[one.metric], [one, other])
        if apart and one.k + other.k > max(one.n, other.n):
            raise Invalid(field, f"{one} and {other}", "can never hold together")


def _check_apart(enter: Clause, leave: Clause) -> None:
    for first in _ways(enter):
        for second in _ways(leave):
            shared = {_key(one) for one in first} & {_key(one) for one in second}
            both = [[one for one in (*first, *second) if _key(one) == key] for key in shared]
            if both and all(_meets(METRICS[on_one[0].metric], on_one) for on_one in both):
                raise Invalid("leave", str(leave), f"can hold while enter does ({enter}): the layer would go "
                                                   "back and forth; keep their thresholds apart")


def _ways(clause: Clause) -> list[tuple[Condition, ...]]:
    """The sets of conditions each of which makes `clause` hold."""
    return [clause.conditions] if clause.combine == "all" else [(one,) for one in clause.conditions]


def _key(condition: Condition) -> Key:
    return (condition.metric, condition.role, condition.orientation)


def _meets(metric: Metric, conditions: Sequence[Condition]) -> bool:
    """Whether one value of `metric` can satisfy all of `conditions`, which are on it."""
    least, most = metric.range
    over = max((one.threshold for one in conditions if one.beyond == "above"), default=-math.inf)
    under = min((one.threshold for one in conditions if one.beyond == "below"), default=math.inf)
    if metric.kind == "count":
        smallest = max(least, math.floor(over) + 1 if over > -math.inf else least)
        return smallest <= most and smallest < under
    return over < min(under, most) and under > least
