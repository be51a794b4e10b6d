"""The step clock, cadence, sentinels, optimizer states and the precision switch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import fp8scope
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.commands import Command, Precision, SetPrecision
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.metrics import METRICS, SENTINELS
from fp8scope_protocol.wire import is_missing

ROW = ("0", "activation", "rowwise")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Tensor) -> None:
    for x in batches:
        model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_p11_micro_batches_merge_exactly() -> None:
    """P11: 4 micro-batches give steps 0 and 2 of 3, with one batch's numbers: counts and amax exactly."""
    found = []
    for accumulate in (4, 1):
        model, worker = network(), MemoryWorker()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(1)
        with Scope(model, (optimizer,), worker=worker, every=2):
            for _ in range(3):
                x = torch.randn(512, 128)
                train_step(model, optimizer, *x.chunk(accumulate))
        assert [r.step for r in worker.records] == [0, 1, 2]
        assert [r.step for r in worker.records if r.tables is not None] == [0, 2]
        found.append(worker)
    for name, role, orientation in found[1].metrics(0):
        a, b = (worker.metrics(0)[name, role, orientation] for worker in found)
        assert a.pop("calls") == (1 if role == "weight" else 4) * b.pop("calls")
        for worst_call in ("gemm_error", "channel_outlier_ratio", "wgrad_row_error_max"):
            assert a.pop(worst_call, 0) >= 0
            b.pop(worst_call, None)
        for key, value in a.items():
            exact = METRICS[key].kind == "count" or key in ("amax", "amin_nonzero", "underflow_ratio")
            assert value == (b[key] if exact else pytest.approx(b[key], rel=2e-6)), (name, role, key)
    step0, again = (worker.record(0).tables for worker in found)
    assert step0 is not None
    assert again is not None
    assert torch.equal(step0.histogram, again.histogram)


def test_the_clock_follows_the_optimizer() -> None:
    """Without a word from the job, a step is what lies between two optimizer steps and their next forward."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.AdamW(model.parameters())
    scope = Scope(model, (optimizer,), worker=worker, every=1)
    for step in range(3):
        assert scope.current == max(0, step - 1)
        train_step(model, optimizer, torch.randn(3, 128), torch.randn(2, 128))
    scope.close()
    assert [r.step for r in worker.records] == [0, 1, 2]
    assert worker.metrics(2)[ROW]["elements"] == 5 * 128
    assert worker.closed


def test_explicit_steps_win() -> None:
    """Once the job says `step(n)`, only that closes steps: two optimizers make one step, skips are marked."""
    model, worker = network(), MemoryWorker()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with Scope(model, (first, second), worker=worker, every=1) as scope:
        for step in (7, 8, 9):
            model(torch.randn(3, 128)).sum().backward()
            if step != 8:
                first.step()
                second.step()
            scope.step(step, skipped=step == 8)
    assert [(r.step, r.skipped) for r in worker.records] == [(7, False), (8, True), (9, False)]


def test_p10_loss_scaling_changes_no_verdict() -> None:
    """P10: under a loss scale of 65536 norm and underflow are those of scale 1; a skipped step says so.

    Half of the outputs weigh so little that their gradients underflow."""
    found = []
    weights = torch.tensor([1.0, 0.5, 1e-4, 1e-5])
    for scale in (1.0, 65536.0):
        model, worker = network(), MemoryWorker()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        torch.manual_seed(1)
        with Scope(model, (optimizer,), worker=worker, every=1) as scope:
            for step in range(3):
                x = torch.randn(32, 128) * (math.inf if step == 1 else 1.0)
                scaler.scale((model(x) * weights).square().mean()).backward()
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scope.step(step, skipped=scaler.get_scale() < before, loss_scale=before)
        assert [r.skipped for r in worker.records] == [False, True, False]
        found.append(worker)
    for step in (0, 2):
        plain, scaled = (worker.sentinels(step) for worker in found)
        assert (plain["loss_scale"], scaled["loss_scale"] > 1) == (1.0 if step == 0 else 0.5, True)
        assert scaled["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6)
        plain, scaled = (worker.metrics(step)["2", "gradient", "rowwise"] for worker in found)
        assert scaled["underflow_ratio"] == plain["underflow_ratio"] == 0.5
        assert scaled["sqnr_db"] == plain["sqnr_db"]
        assert scaled["distortion"] == pytest.approx(plain["distortion"], rel=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_model_is_refused_and_a_scripted_part_is_not() -> None:
    """torch.jit runs no hooks of Python in what it compiled: the message says where to attach instead."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    with pytest.raises(Invalid, match="compiled by"):
        fp8scope.attach(scripted, run="r", collector="offline")
    model, worker = nn.Sequential(nn.Linear(8, 8), scripted), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        model(torch.ones(2, 8)).sum().backward()
        scope.step(0)
    assert worker.metrics(0)["0", "activation", "rowwise"]["elements"] == 16


@pytest.mark.parametrize(("values", "said"), [({"skipped": "no"}, "skipped = 'no'"),
                                              ({"loss": torch.tensor(1j)}, "one real number")])
def test_a_step_says_what_it_cannot_work_with(values: dict[str, Any], said: str) -> None:
    """A text for a switch, a complex loss: named at the call, and the scope goes on."""
    worker = MemoryWorker()
    with Scope(nn.Linear(8, 8), (), worker=worker, every=1) as scope:
        with pytest.raises(Invalid, match=said):
            scope.step(0, **values)
        scope.step(0)
    assert worker.record(0).step == 0


@pytest.mark.parametrize("explicit", [False, True])
def test_p10_a_step_skipped_inside_a_fused_optimizer_is_marked(explicit: bool) -> None:
    """P10: fused ones unscale and skip by themselves, so their hooks fire all the same. Their parameters and
    steps stay, the numbers are those of the unscaled gradient."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for step in range(4):
            x = torch.randn(32, 128) * (math.inf if step == 1 else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            weight = next(model.parameters()).detach()
            before = weight.clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, weight) == (step == 1)
            optimizer.zero_grad()
            if explicit:
                scope.step(step)
    assert [(r.step, r.skipped or r.sentinels.skipped) for r in worker.records] == [
        (0, False), (1, True), (2, False), (3, False)]
    assert worker.sentinels(0)["grad_norm"] < 10
    assert worker.sentinels(1)["nonfinite_count"] > 0


def test_p6_a_model_compiled_before_keeps_its_steps_and_says_what_is_hidden() -> None:
    """P6: a probe that came after the first compiled call has the steps and the sentinels; layers that it
    cannot see are listed, not at 0."""
    model, worker, counter = network(), MemoryWorker(), CompileCounter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch._dynamo.reset()
    scope = None
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(4):
        compiled(torch.randn(8, 128)).square().sum().backward()
        scope = scope or Scope(model, (optimizer,), worker=worker, every=1)
        optimizer.step()
        optimizer.zero_grad()
    assert scope is not None
    scope.close()
    assert counter.frame_count <= 2
    assert [r.step for r in worker.records] == [0, 1, 2, 3]
    assert worker.sentinels(3)["grad_norm"] > 0
    hidden = {e.name for e in worker.record(0).events if e.kind == "unobserved"}
    assert hidden == {"0", "2"}
    assert ROW not in worker.metrics(3)


@pytest.mark.parametrize("n", [-1, 1.5, True])
def test_a_wrong_step_number_is_refused(n: Any) -> None:
    """A step is a whole number, 0 or more."""
    with pytest.raises(Invalid, match="step number"):
        Scope(network(), (), worker=MemoryWorker(), every=1).step(n)


def test_a_resumed_run_goes_on_counting(tmp_path: Any) -> None:
    """The first step's number comes from `start_step`, else from the optimizer's own count."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        train_step(model, optimizer, torch.randn(2, 128))
    with fp8scope.attach(model, optimizer, run="r", collector="offline", spool=tmp_path) as scope:
        assert scope.current == 3
    with fp8scope.attach(model, optimizer, run="r", collector="offline", spool=tmp_path,
                         start_step=40) as scope:
        assert scope.current == 40


WRONG = [
    ("run", ""), ("every", 0), ("every", 10**30), ("formats", ("e9m9",)), ("formats", [3]),
    ("formats", [b"e4m3"]), ("start_step", -1), ("collector", "ftp://x"), ("resume", 1), ("resume", "yes"),
    ("remote_control", "yes"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_arguments_are_named(name: str, value: Any, tmp_path: Any) -> None:
    """`attach` says which argument is wrong before it touches the model."""
    model = network()
    with pytest.raises(Invalid):
        fp8scope.attach(model, **({"run": "r", "spool": tmp_path} | {name: value}))
    assert not model[0]._forward_pre_hooks


def test_numbers_that_cannot_be_kept_are_named() -> None:
    """A loss that no float holds and a step that no batch can carry."""
    with Scope(network(), (), worker=MemoryWorker(), every=1) as scope:
        with pytest.raises(Invalid, match="loss"):
            scope.log(loss=10**400)
        with pytest.raises(Invalid, match="step number"):
            scope.step(2**70)


@pytest.mark.parametrize("every", [1, 100])
def test_sentinels_are_taken_in_every_step(every: int) -> None:
    """Loss and lr off cadence too, the gradient norm in every fourth step; in sampled steps what AdamW did to
    the parameters."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    with Scope(model, (optimizer,), worker=worker, every=every) as scope:
        for step in range(5):
            loss = model(torch.randn(3, 128)).square().mean()
            loss.backward()
            scope.log(loss=loss.detach(), loss_scale=8.0)
            grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            found_norm, found_loss = grads.double().norm().item(), loss.item()
            optimizer.zero_grad()
            scope.step(step)
    moved = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    sentinels = worker.sentinels(4)
    assert set(sentinels) <= set(SENTINELS)
    assert sentinels["loss"] == pytest.approx(found_loss)
    assert sentinels["grad_norm"] == pytest.approx(found_norm)
    assert (sentinels["lr"], sentinels["loss_scale"], sentinels["nonfinite_count"]) == (0.01, 8.0, 0)
    assert ("grad_norm" in worker.sentinels(2)) == (every == 1)
    if every > 1:
        assert "update_max" not in sentinels
        return
    assert sentinels["update_max"] == pytest.approx(moved.abs().max().item() / 0.01, rel=1e-3)
    assert sentinels["update_weight_ratio"] == pytest.approx((moved.norm() / weights.norm()).item(), rel=1e-3)
    assert 0 <= sentinels["v_zero_share"] < 1


def test_the_job_knows_the_gradient_norm_before_clipping() -> None:
    """A logged norm wins over the one read after clipping; losses average over micro-batches."""
    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for x in torch.randn(2, 3, 128):
            model(x).square().sum().backward()
            scope.log(loss=float(len(x)))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scope.log(loss=9.0, grad_norm=norm)
        optimizer.step()
        scope.step(0)
        with pytest.raises(UnknownName, match="grad_norm"):
            scope.log(grad_norn=1.0)
    assert worker.sentinels(0)["grad_norm"] == pytest.approx(norm.item())
    assert worker.sentinels(0)["loss"] == 5.0


def test_gradients_beyond_fp32_squares_have_a_norm() -> None:
    """Z3/Q11: a gradient of 1e30 has a finite norm; one with NaNs makes it NaN and counts as one tensor."""
    model, worker = nn.Sequential(nn.Linear(2, 2, bias=False)), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for step, value in enumerate((1e30, math.nan)):
            model[0].weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]]) * value
            optimizer.step()
            scope.step(step)
    assert worker.sentinels(0)["grad_norm"] == pytest.approx(5e30, rel=1e-6)
    assert math.isnan(worker.sentinels(1)["grad_norm"])
    assert worker.sentinels(1)["nonfinite_count"] == 1


def test_a_vanished_second_moment_is_seen() -> None:
    """`v_zero_share` counts second moments at zero where the first is not; `update_max` shows the blow-up."""
    linear, worker = nn.Linear(2, 2, bias=False), MemoryWorker()
    model = nn.Sequential(linear)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, eps=1e-8)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope:
        for step in range(2):
            linear.weight.grad = torch.ones(2, 2)
            if step:
                optimizer.state[linear.weight]["exp_avg_sq"].zero_()
                optimizer.param_groups[0]["betas"] = (0.9, 1.0 - 2.0**-24)
            optimizer.step()
            optimizer.state[linear.weight]["exp_avg_sq"][0, 0] = 0.0
            scope._updates.after(optimizer)
            scope.step(step)
    assert worker.sentinels(0)["v_zero_share"] == pytest.approx(1 / 8)  # two looks at four, one zero
    assert worker.sentinels(1)["update_max"] > 1e3


def test_optimizer_states_are_measured_as_what_ifs() -> None:
    """Moments of matrices in sampled steps: exp_avg as it is, exp_avg_sq as its root; momentum of SGD."""
    for optimizer_of, wanted in (
        (lambda p: torch.optim.AdamW(p), {"exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), set()),
    ):
        model, worker = network(), MemoryWorker()
        optimizer = optimizer_of(model.parameters())
        with Scope(model, (optimizer,), worker=worker, every=1):
            train_step(model, optimizer, torch.randn(3, 128))
        metrics = {key[1]: row for key, row in worker.metrics(0).items() if key[0] == "0.weight"}
        assert set(metrics) == wanted | {"weight"}
        assert all(row["elements"] == 128 * 64 for row in metrics.values())
        if "exp_avg_sq" in wanted:
            v = optimizer.state[next(model.parameters())]["exp_avg_sq"]
            assert metrics["exp_avg_sq"]["amax"] == v.sqrt().max().item()
        assert not [key for key in worker.metrics(0) if key[0] == "0.bias"]


class Switch(nn.Linear):
    """A layer with a precision, that may know no shadow."""

    def __init__(self, *, shadow: bool = True) -> None:
        super().__init__(128, 128)
        self.precision: Precision = "fp8"
        self.shadow = shadow

    def set_precision(self, precision: Precision) -> None:
        if precision == "shadow" and not self.shadow:
            raise Invalid("precision", precision, "is not known here")
        self.precision = precision


def command(*modules: str, precision: Precision = "bf16", number: int = 1) -> Command:
    return Command(id=number, action=SetPrecision(modules=modules, precision=precision), issued_by="user")


def test_commands_apply_two_boundaries_later() -> None:
    """Merged with step 1, applied for step 3; `bf16` becomes `shadow` where the layer can; then reported."""
    layers, worker = (Switch(), Switch(shadow=False)), MemoryWorker()
    model = nn.Sequential(*layers)
    worker.commands[1] = (command("0", "1"),)
    seen: list[tuple[str, ...]] = []
    with Scope(model, (), worker=worker, every=1) as scope:
        for step in range(5):
            seen.append(tuple(layer.precision for layer in layers))
            model(torch.randn(2, 128)).sum().backward()
            scope.step(step)
    assert seen == [("fp8", "fp8")] * 3 + [("shadow", "bf16")] * 2
    reports = {r.step: r.reports for r in worker.records if r.reports}
    (report,) = reports[3]
    assert (report.id, report.state, report.step) == (1, "applied", 3)
    assert report.precision == ""  # they differ


def test_a_command_applies_wholly_or_not_at_all() -> None:
    """An unknown layer, or one that cannot be switched, rejects the command and names the reason."""
    model, worker = nn.Sequential(Switch(), nn.Linear(128, 128)), MemoryWorker()
    worker.commands[0] = (command("0", "1"), command("0", "00", number=2), command("0", number=3))
    with Scope(model, (), worker=worker, every=1) as scope:
        for step in range(3):
            scope.step(step)
            if step == 1:
                assert model[0].precision == "shadow"  # by the third alone
    plain, unknown, good = worker.record(2).reports
    assert (plain.state, unknown.state, good.state) == ("rejected", "rejected", "applied")
    assert (plain.precision, good.precision) == ("", "shadow")
    assert "computes in one precision only" in plain.reason
    assert "near misses: 0" in unknown.reason


def test_the_layout_is_sorted_and_grows() -> None:
    """Series are ordered by depth; a layer that runs later gets its row, and the earlier ones keep theirs."""
    model, worker = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        for step, order in enumerate([(1,), (1,), (1, 0)]):
            sum(model[i](torch.randn(2, 8)).sum() for i in order).backward()
            scope.step(step)
    first, same, grown = (r.layout for r in worker.records)
    assert first is same
    assert first is not None
    assert grown is not None
    assert set(first.series) < set(grown.series)
    assert [s.depth for s in grown.series] == sorted(s.depth for s in grown.series)
    assert worker.metrics(2)["1", "activation", "rowwise"]["elements"] == 16


def test_missing_stays_missing_and_nan_free() -> None:
    """What was not measured carries the bits that say so; nothing else in a healthy step is NaN."""
    model, worker = network(), MemoryWorker()
    with Scope(model, (), worker=worker, every=1) as scope:
        model(torch.randn(3, 128)).sum().backward()
        scope.step(0)
    record = worker.record(0)
    assert record.tables is not None
    assert record.layout is not None
    from fp8scope.derive import derive

    arrays = derive(record.tables, record.layout)
    assert set(METRICS) | {"exponent_histogram"} == set(arrays)
    columnwise = [i for i, s in enumerate(record.layout.series) if s.orientation == "columnwise"]
    assert is_missing(arrays["gemm_error"])[columnwise].all()
    for key, values in arrays.items():
        assert not (is_missing(values) ^ (values != values)).any(), key


def test_the_probe_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps no value is read back: `item`, `tolist`, `nonzero` and `__bool__` stay unused."""
    def refuse(name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"{name} waits for the device")
        return called

    model, worker = network(), MemoryWorker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Scope(model, (optimizer,), worker=worker, every=1) as scope, monkeypatch.context() as patch:
        for name in ("item", "tolist", "nonzero", "__bool__", "__float__", "__int__"):
            patch.setattr(torch.Tensor, name, refuse(name))
        train_step(model, optimizer, torch.randn(3, 128))
        scope.step(0, loss=torch.ones(()))
    assert [e for e in worker.record(0).events if e.kind == "probe_error"] == []
    assert worker.metrics(0)[ROW]["elements"] == 3 * 128
