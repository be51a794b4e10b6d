"""The demo's verdict: exit code 0 only if all of it happened."""

from dataclasses import replace

import msgspec
import pytest

from fp8scope_protocol.errors import Invalid
from fp8scope_server.demo import DemoPlan, rescue_rule
from fp8scope_server.story import Story

GOOD = Story(steps=110, samples_stored=1000, batches_lost=0, fault_step=25, alert_step=31,
             fallback_step_by_rank=[34, 34], return_step=85, loss_before=3.0, loss_after=2.5,
             loss_after_without_rule=2.6)


def test_a_good_story_falls_short_of_nothing() -> None:
    """Fault, alert, one switch on both ranks, return."""
    assert GOOD.shortfalls(ranks=2) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batches_lost": 1}, "1 batches were lost"),
        ({"alert_step": None}, "no alert"),
        ({"alert_step": 24}, "no alert after the fault"),
        ({"fallback_step_by_rank": []}, "did not switch"),
        ({"fallback_step_by_rank": [34]}, "did not switch"),
        ({"fallback_step_by_rank": [34, 35]}, "did not switch"),
        ({"return_step": None}, "did not return"),
        ({"return_step": 34}, "not after the fallback"),
    ],
)
def test_what_did_not_happen_is_said(change: dict[str, object], said: str) -> None:
    """Each missing part is a line of its own."""
    lines = replace(GOOD, **change).shortfalls(ranks=2)  # type: ignore[arg-type]
    assert any(said in line for line in lines)


def test_the_summary_has_the_agreed_keys() -> None:
    """Scripts read this line."""
    assert list(msgspec.json.decode(GOOD.as_json())) == [
        "steps", "samples_stored", "batches_lost", "fault_step", "alert_step", "fallback_step_by_rank",
        "return_step", "loss_before", "loss_after", "loss_after_without_rule",
    ]


def test_a_plan_that_leaves_no_room_is_refused() -> None:
    """The message names the field, the value and the least that is accepted."""
    with pytest.raises(Invalid, match=r"steps = 30: must be at least fault_step \+ 60 = 85"):
        DemoPlan(steps=30)


def test_the_rescue_rule_is_a_rule() -> None:
    """What the demo sends survives the collector's reading of it."""
    assert msgspec.json.decode(msgspec.json.encode(rescue_rule()), type=type(rescue_rule())) == rescue_rule()
