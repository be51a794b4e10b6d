"""What the probe says it costs, the cadence that follows from it, and the one that follows a bad sign."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8scope
from fp8scope.budget import WARM_UP, Costs
from fp8scope.cadence import LONGEST, Cadence, Change
from fp8scope.elevation import CALM, ELEVATIONS, FEWEST
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope.timer import StepTime, Timer
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.metrics import SENTINELS

STEP = 0.100
"""Seconds that a step takes without the probe, in what follows."""


def step_time(sampled: bool, cost: float, *, always: float = 0.0, on_device: bool = False) -> StepTime:
    """A step of a job in which a measurement costs `cost` seconds and any other step `always`."""
    own = cost if sampled else always
    return StepTime(sampled=sampled, seconds=STEP + own, probe_seconds=1e-3 if on_device else own,
                    on_device=on_device)


def play(cadence: Cadence, cost: Callable[[int], float], steps: int, *, alert: bool = False,
         always: float = 0.0, on_device: bool = False) -> dict[int, Change]:
    """The job and the cadence, each following the other, as a scope has them: {step of a decision: it}."""
    every, changes = cadence.asked, dict[int, Change]()
    due: dict[int, int] = {}
    for step in range(steps):
        every = due.pop(step, every)
        time = step_time(step % every == 0, cost(step), always=always, on_device=on_device)
        if (change := cadence.judge(step, time, {}, alert=alert)) is not None:
            changes[step] = change
            due[step + 2] = change.every
    return changes


@pytest.mark.parametrize("on_device", [False, True])
def test_the_overhead_is_that_of_the_job(on_device: bool) -> None:
    """The share said is the time taken over the time of the job without it, though single steps stumble."""
    costs, every, spent = Costs(), 10, []
    for step in range(2000):
        time = step_time(step % every == 0, 0.013, always=0.0 if on_device else 2e-4, on_device=on_device)
        spent.append(time.seconds - STEP)
        if step % 97 == 0 or step < WARM_UP:  # a checkpoint, a compilation
            time = StepTime(sampled=time.sampled, seconds=9.0, probe_seconds=5.0, on_device=on_device)
        costs.add(time)
    assert costs.overhead(every) == pytest.approx(sum(spent) / (2000 * STEP), rel=1e-6)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_in_detail_counts_as_often_as_it_comes(on_device: bool) -> None:
    """One sampled step of 8 costs four times as much: the mean is said, not the median."""
    costs, spent = Costs(detail_every=8), 0.0
    for step in range(8000):
        sampled, detailed = step % 10 == 0, step % 80 == 0
        cost = 0.04 if detailed else 0.01 if sampled else 0.0
        spent += cost
        costs.add(replace(step_time(sampled, cost, on_device=on_device), detailed=detailed))
    assert costs.overhead(10) == pytest.approx(spent / (8000 * STEP))


def test_a_gpu_that_is_always_measured_is_judged_by_its_host() -> None:
    """Without a step to compare with there is host time only; with some, GPU time."""
    costs = Costs()
    for _ in range(50):
        costs.add(step_time(True, 0.02, on_device=True))
    assert costs.overhead(1) == pytest.approx(1e-3 / (STEP + 0.02))
    for _ in range(50):
        costs.add(step_time(False, 0.02, on_device=True))
    assert costs.overhead(1) == pytest.approx(0.02 / STEP)


@pytest.mark.parametrize("on_device", [False, True])
def test_over_the_budget_the_cadence_doubles_until_it_fits(on_device: bool) -> None:
    """6 % at every 10 is 0.75 % at every 80: one change, said with its numbers, and then no further one."""
    cadence = Cadence(10, budget=0.01)
    changes = play(cadence, lambda step: 0.06, 5000, on_device=on_device)
    assert [change.every for change in changes.values()] == [80]
    assert cadence.every == 80
    assert cadence.overhead == pytest.approx(0.06 / 80 / STEP)
    (change,) = changes.values()
    assert "every 10 -> 80" in change.why
    assert "6.00%" in change.why
    assert "0.75%" in change.why


def test_the_first_steps_decide_nothing() -> None:
    """Steps that compile are expensive; the cadence stays."""
    assert play(Cadence(1, budget=0.01), lambda step: 2.0 if step < WARM_UP else 1e-5, 500) == {}


def test_it_comes_back_when_there_is_room() -> None:
    """The cost ends: back to what was asked for, and not below it."""
    cadence = Cadence(4, budget=0.01)
    changes = play(cadence, lambda step: 0.03 if step < 2000 else 1e-6, 6000)
    found = [change.every for change in changes.values()]
    assert found[:2] == [32, 16]
    assert found[-1] == cadence.asked == 4
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("cost", [0.0101, 0.0199, 0.02, 0.021, 0.045])
def test_it_does_not_flap(cost: float) -> None:
    """Costs that waver by a tenth around any place: few changes, and the budget is kept at the end."""
    cadence = Cadence(1, budget=0.01)
    changes = play(cadence, lambda step: cost * (1.0 + 0.1 * math.sin(step)), 20_000)
    assert len(changes) <= 2
    assert cost / (cadence.every * STEP) <= 0.0111


def test_there_is_a_longest_cadence() -> None:
    """What costs too much in every step is not cured by measuring less; that is said, once."""
    cadence = Cadence(2, budget=0.01)
    changes = play(cadence, lambda step: 5.0, 20_000, always=0.05)
    assert [change.every for change in changes.values()] == [2 * LONGEST]
    assert "the longest it goes" in next(iter(changes.values())).why


def test_an_alert_keeps_the_cadence() -> None:
    """While a rule holds a layer it is not measured less often, whatever that costs; it may be more often."""
    cadence = Cadence(10, budget=0.01)
    assert play(cadence, lambda step: 0.06, 1000, alert=True) == {}
    assert cadence.overhead == pytest.approx(0.06)
    play(cadence, lambda step: 0.06, 1000)
    assert cadence.every == 80
    play(cadence, lambda step: 0.0, 5000, alert=True)
    assert cadence.every == 10


def test_no_budget_no_change() -> None:
    """`budget=None` measures as asked for and says what that costs."""
    cadence = Cadence(1)
    assert play(cadence, lambda step: 1.0, 500) == {}
    assert cadence.overhead == pytest.approx(1.0 / STEP)


HEALTHY = {"nonfinite_count": 0.0, "grad_norm_ratio": 1.1, "update_max": 1.4, "update_weight_ratio": 1e-3,
           "v_zero_share": 0.0, "scale_staleness_bits": 0.1, "attn_logit_bound": 40.0}
BAD = {"nonfinite_count": 1.0, "grad_norm_ratio": 5.0, "update_max": 9.8e3, "update_weight_ratio": 1e-2,
       "v_zero_share": 0.2, "scale_staleness_bits": 0.75, "attn_logit_bound": 400.0}


@pytest.mark.parametrize("sentinel", [one.sentinel for one in ELEVATIONS])
def test_a_bad_sign_is_looked_at_closely(sentinel: str) -> None:
    """At step n: every step from n + 2 on is measured, `close_steps` of them, then as before. A sign that
    stays is one sign; once it was gone it counts again."""
    assert sentinel in SENTINELS
    cadence, every, sampled = Cadence(10, close_steps=5), 10, []
    due: dict[int, int] = {}
    changes: dict[int, Change] = {}
    bad = {100, *range(200, 200 + 40), 300}
    for step in range(320):
        every = due.pop(step, every)
        if step % every == 0:
            sampled.append(step)
        numbers = HEALTHY | ({sentinel: BAD[sentinel]} if step in bad else {})
        change = cadence.judge(step, step_time(step % every == 0, 0.0), numbers, alert=False)
        if change is not None:
            changes[step] = change
            due[step + 2] = change.every
    usual = set(range(0, 320, 10))
    close = {start + i for start in (102, 202, 302) for i in range(5)}
    assert set(sampled) == usual | close
    assert list(changes) == [100, 105, 200, 205, 300, 305]
    assert changes[100].why.startswith(f"every 10 -> 1, for 5 steps: {sentinel} is {BAD[sentinel]:.4g}, over")
    assert changes[105].every == 10


def test_a_second_sign_makes_a_close_look_longer_and_is_no_change() -> None:
    """Another sentinel goes bad while every step is measured anyway: that is no event "every 1 -> 1"."""
    cadence, found = Cadence(10, close_steps=5), []
    for step in range(70):
        bad = {"nonfinite_count": 1.0} if step == 50 else {"update_max": math.inf} if step == 53 else {}
        if (change := cadence.judge(step, StepTime(), HEALTHY | bad, alert=False)) is not None:
            found.append((step, change.every))
    assert found == [(50, 1), (58, 10)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_a_bad_sign(value: float) -> None:
    """Whatever a sentinel is used to."""
    cadence = Cadence(10, close_steps=5)
    for step in range(FEWEST):
        assert cadence.judge(step, StepTime(), HEALTHY, alert=False) is None
    change = cadence.judge(FEWEST, StepTime(), HEALTHY | {"update_max": value}, alert=False)
    assert change is not None
    assert change.every == 1


def test_attention_that_warms_up_is_no_sign() -> None:
    """As it was measured: from next to nothing to 47 in 260 steps, and to 1,300 when the run breaks."""
    cadence = Cadence(10, close_steps=5)
    for step in range(260):
        numbers = {"attn_logit_bound": 0.5 + 46.5 * min(1.0, step / 100)}
        assert cadence.judge(step, StepTime(), numbers, alert=False) is None
    change = cadence.judge(260, StepTime(), {"attn_logit_bound": 1300.0}, alert=False)
    assert change is not None
    assert "attn_logit_bound is 1300, over 100" in change.why


def test_a_healthy_run_shows_no_sign() -> None:
    """Noise of a third around any level, and a level that drifts, are what a run is used to."""
    torch.manual_seed(0)
    cadence, factors = Cadence(10, close_steps=5), (1.0 + 0.3 * torch.rand(3000)).tolist()
    for step, factor in enumerate(factors):
        numbers = {key: value * factor * (1.0 + step / 1000) for key, value in HEALTHY.items()
                   if key not in ("grad_norm_ratio", "scale_staleness_bits", "update_max")}
        assert cadence.judge(step, StepTime(), numbers | {"grad_norm_ratio": factor}, alert=False) is None


def test_no_close_look_where_none_is_wanted() -> None:
    """`FP8SCOPE_CLOSE_STEPS=0`, and a job that measures every step anyway."""
    for cadence in (Cadence(10, close_steps=0), Cadence(1, close_steps=5)):
        for step in range(40):
            assert cadence.judge(step, StepTime(), BAD if step > CALM else HEALTHY, alert=False) is None


def test_a_close_look_goes_before_the_budget() -> None:
    """While it lasts every step is measured, at any cost; then the budget counts again."""
    cadence, seen = Cadence(10, budget=0.01, close_steps=30), []
    every = 10
    due: dict[int, int] = {}
    for step in range(1000):
        every = due.pop(step, every)
        numbers = BAD if step == 50 else HEALTHY
        change = cadence.judge(step, step_time(step % every == 0, 0.06), numbers, alert=False)
        if change is not None:
            seen.append((step, change.every))
            due[step + 2] = change.every
    assert seen[:2] == [(50, 1), (80, 10)]
    assert seen[2][1] == 80
    assert len(seen) == 3


def test_the_scope_takes_the_cadence_it_is_given() -> None:
    """What was decided with step n holds from step n + 2 on."""
    model, worker = nn.Sequential(nn.Linear(128, 64)), MemoryWorker()
    worker.cadences = {2: 1, 5: 4}
    with Scope(model, (), worker=worker, every=100) as scope:
        for step in range(14):
            model(torch.randn(2, 128)).sum().backward()
            scope.step(step)
    assert [r.step for r in worker.records if r.tables is not None] == [0, 4, 5, 6, 8, 12]
    assert scope.every == 4


def test_the_probe_times_itself() -> None:
    """Host time inside a step is part of the step, and a step that is measured costs more."""
    torch.manual_seed(0)
    model, worker = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), MemoryWorker()
    optimizer = torch.optim.AdamW(model.parameters())
    with Scope(model, (optimizer,), worker=worker, every=4):
        for _ in range(24):
            model(torch.randn(256, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    times = [record.time() for record in worker.records if record.time is not None]
    assert [time.sampled for time in times] == [step % 4 == 0 for step in range(24)]
    assert times[0].seconds == 0.0
    assert all(0.0 < time.probe_seconds < time.seconds for time in times[1:-1])
    sampled = sorted(time.probe_seconds for time in times if time.sampled)
    others = sorted(time.probe_seconds for time in times if not time.sampled)
    assert sampled[len(sampled) // 2] > others[len(others) // 2]


def test_a_timer_knows_no_first_step() -> None:
    """Its length would be that of whatever came before."""
    timer = Timer(torch.device("cpu"))
    timer.probe_seconds = 0.5
    first, second = timer.lap(sampled=True), timer.lap(sampled=False)
    assert first.time() == StepTime(sampled=True, probe_seconds=0.5)
    assert second.time().seconds > 0.0
    assert second.time().probe_seconds == 0.0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(8, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("budget", [1e-6, None])
def test_a_real_job_is_measured_less_often(budget: float | None, tmp_path: Path, spooled: Any) -> None:
    """Everything costs more than a millionth: the steps that reach the spool thin out, an event says why,
    and each sampled step reports the overhead. Without a budget nothing changes."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    with fp8scope.attach(model, optimizer, run="r", every=1, collector="offline", spool=tmp_path,
                         budget=budget):
        train(model, optimizer, 130)
    steps = spooled(tmp_path, "r")
    sampled = [one.header.step for one in steps if one.header.layout is not None]
    told = [event for one in steps for event in one.header.events if event.kind == "cadence"]
    ratios = [one.header.sentinels["overhead_ratio"] for one in steps
              if "overhead_ratio" in one.header.sentinels]
    assert len(ratios) > 1
    assert all(ratio > 0.0 for ratio in ratios)
    if budget is None:
        assert sampled == list(range(130))
        assert told == []
        return
    assert len(told) == 1
    assert f"every 1 -> {LONGEST}" in told[0].text
    change = told[0].step
    assert sampled == [*range(change), *(n for n in range(change, 130) if n % LONGEST == 0)]


def test_an_elevated_sentinel_closes_in(
    tmp_path: Path, spooled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is not finite at step 30: steps 32 to 35 are measured in full."""
    monkeypatch.setenv("FP8SCOPE_CLOSE_STEPS", "4")
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    with fp8scope.attach(model, run="r", every=20, collector="offline", spool=tmp_path,
                         budget=None) as scope:
        for step in range(50):
            model(torch.randn(2, 128)).sum().backward()
            scope.step(step, loss=math.nan if step == 30 else 1.0)
    steps = spooled(tmp_path, "r")
    assert [one.header.step for one in steps if one.header.layout is not None] == [0, 20, 32, 33, 34, 35, 40]
    told = [event for one in steps for event in one.header.events if event.kind == "cadence"]
    assert [event.step for event in told] == [32, 36]
    assert "nonfinite_count is 1" in told[0].text


@pytest.mark.parametrize("budget", [0.0, 1.0, -0.1, math.nan, True, "1%"])
def test_a_budget_is_a_share(budget: Any, tmp_path: Path) -> None:
    """Refused with what is accepted, before anything is attached."""
    model = nn.Linear(4, 4)
    with pytest.raises(Invalid, match="budget"):
        fp8scope.attach(model, run="r", collector="offline", spool=tmp_path, budget=budget)
    assert not model._forward_pre_hooks
