"""States over the life of a job: overrides, warm-up, saving, copies, odd gradients, 16-bit weights."""

import copy
import io
from typing import Any

import pytest
import torch
from tests.trainer.stepping import SHAPE, gradient, stepped
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_trainer.adam import Adam
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.decoder import Decoder, DecoderConfig
from fp8scope_trainer.lion import Lion
from fp8scope_trainer.sgd import SGD
from fp8scope_trainer.state_block import FORMATS

BYTES = {"fp32": 8, "bf16": 4, "int16": 4, "fp8": 2, "int8": 2, "int4": 1}
"""Of the codes of both moments, a parameter."""


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and torch.equal(raw(a[key]), raw(b[key])) for key in a)


@pytest.mark.parametrize("states", FORMATS)
def test_o5_states_really_are_what_a_group_says(states: str) -> None:
    """O5: dtype and bytes, of groups given at the start and added later; scales beside them."""
    default, own, late = (nn.Parameter(torch.randn(64, 1024)) for _ in range(3))
    optimizer = AdamW([{"params": [default]}, {"params": [own], "states": states}], states="int8")
    optimizer.add_param_group({"params": [late], "states": states})
    for parameter in (default, own, late):
        parameter.grad = torch.randn(64, 1024)
    optimizer.step()
    assert optimizer.state[default]["exp_avg"].dtype == torch.int8
    for parameter in (own, late):
        state = optimizer.state[parameter]
        assert optimizer.format_of(parameter) == states
        codes = [state[key].nbytes for key in ("exp_avg", "exp_avg_sq")]
        assert sum(codes) == BYTES[states] * parameter.numel()
        assert ("exp_avg_scale" in state) == (states not in ("fp32", "bf16"))
        if "exp_avg_scale" in state:
            block = {"fp8": 128, "int4": 256}.get(states, 1024)
            assert state["exp_avg_scale"].shape == state["exp_avg_sq_scale"].shape == (64, 1024 // block)


def test_o5_overrides_win_over_the_rule_or_are_refused() -> None:
    """O5: embedding in int8 and one matrix in fp32; what cannot be, and what matches nothing, raises."""
    shape = DecoderConfig(width=128, layers=2, heads=2, kv_heads=1, head_width=64, hidden=128, context=8)
    model = Decoder(shape)
    names = dict(model.named_parameters())
    overrides = {"embedding.*": "int8", "layers.0.*.qkv.weight": "fp32"}
    optimizer = AdamW(parameter_groups(model, states="int4", block=128, overrides=overrides))
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    for name, parameter in names.items():
        wanted = {"embedding.weight": "int8", "layers.0.attention.qkv.weight": "fp32"}.get(
            name, "int4" if name.startswith("layers") and parameter.dim() == 2 else "fp32")
        assert optimizer.format_of(parameter) == wanted, name
        dtype = {"int8": torch.int8, "fp32": torch.float32, "int4": torch.uint8}[wanted]
        assert optimizer.state[parameter]["exp_avg"].dtype == dtype, name
    vector = next(name for name, p in names.items() if p.dim() == 1)
    with pytest.raises(Invalid, match="is no matrix; it can only have fp32"):
        parameter_groups(model, overrides={vector: "fp8"})
    with pytest.raises(UnknownName, match="near misses"):
        parameter_groups(model, overrides={"embedings.weight": "fp32"})


def test_f2_what_keeps_fp32_is_told_with_its_reason() -> None:
    """F2: states that were asked for and cannot be are in `exceptions`, and format_of says fp32."""
    small, vector, big = (nn.Parameter(torch.zeros(s)) for s in ((8, 8), (5000,), (64, 64)))
    optimizer = Lion([("a", small), ("b", vector), ("c", big)], states="int8")
    assert [(one.name, one.asked, one.reason) for one in optimizer.exceptions] == [
        ("a", "int8", "has fewer than 4096 elements"), ("b", "int8", "is no matrix")]
    assert [optimizer.format_of(p) for p in (small, vector, big)] == ["fp32", "fp32", "int8"]
    assert AdamW([small], states="fp32").exceptions == ()


@pytest.mark.parametrize("states", ["bf16", "int16", "fp8", "int8", "int4"])
def test_warm_up_is_fp32_and_then_the_format(states: str) -> None:
    """Three steps are fp32's to the bit; the third ends in codes, with the keys and dtypes of no warm-up."""
    pairs: list[tuple[nn.Parameter, dict[str, Any]]] = [(nn.Parameter(torch.ones(SHAPE)), how) for how in
             ({"states": "fp32"}, {"states": states, "warmup_steps": 3}, {"states": states})]
    exact, warm, cold = (AdamW([w], lr=1e-2, **how) for w, how in pairs)
    for step in range(5):
        for optimizer in (exact, warm, cold):
            stepped(optimizer, range(step, step + 1))
        found = {key: value.dtype for key, value in warm.state[pairs[1][0]].items()}
        if step < 2:
            assert set(found) == {"step", "exp_avg_exact", "exp_avg_sq_exact"}
        else:
            assert found == {key: value.dtype for key, value in cold.state[pairs[2][0]].items()}
        assert torch.equal(pairs[1][0], pairs[0][0]) == (step < 3)
    made = AdamW([nn.Parameter(torch.ones(SHAPE))], states=states, warmup_steps=3)
    for steps in (2, 3):
        made.make_states(steps)
        (state,) = made.state.values()
        assert state["step"] == steps
        assert ("exp_avg_exact" in state) == (steps < 3)


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("make", [AdamW, Adam, SGD, Lion])
def test_loading_copies_and_pickles_go_on_to_the_bit(make: Any, states: str) -> None:
    """After 3 of 6 steps: state_dict into a new optimizer, deepcopy, torch.save of it; all end alike."""
    first = nn.Parameter(torch.ones(SHAPE))
    optimizer = make([first], lr=1e-2, states=states, seed=7, warmup_steps=1)
    stepped(optimizer, range(3))
    loaded = make([nn.Parameter(first.detach().clone())], states=states)
    loaded.load_state_dict(state_dict=optimizer.state_dict())
    torch.save(optimizer, file := io.BytesIO())
    file.seek(0)
    copied, unpickled = copy.deepcopy(optimizer), torch.load(file, weights_only=False)
    for optimizer_after in (optimizer, loaded, copied, unpickled):
        stepped(optimizer_after, range(3, 6))
    for other in (loaded, copied, unpickled):
        (parameter,) = other.param_groups[0]["params"]
        assert parameter is not first
        assert torch.equal(parameter, first)
        assert same(other.state[parameter], optimizer.state[first])


@pytest.mark.parametrize("states", FORMATS)
def test_the_functions_of_distributed_checkpoint_keep_codes(states: str) -> None:
    """get_ and set_optimizer_state_dict give a fresh optimizer the same codes, and leave weights alone."""
    def made() -> tuple[nn.Module, AdamW]:
        model = nn.Linear(200, 24)
        return model, AdamW(model.parameters(), states=states)

    model, optimizer = made()
    model(torch.ones(2, 200)).square().sum().backward()
    optimizer.step()
    saved: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, fresh = made()
    before = [p.detach().clone() for p in other.parameters()]
    made_by_torch: Any = get_optimizer_state_dict(other, fresh)
    assert made_by_torch["state"].keys() == saved["state"].keys()
    set_optimizer_state_dict(other, fresh, saved)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert same(fresh.state[mine], optimizer.state[theirs])
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_other_states_blocks_or_masters_are_not_loaded() -> None:
    """Each mismatch names both sides."""
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"states": "int8"}, {"states": "fp8"}, "states"),
        ({"states": "int8", "block": 256}, {"states": "int8"}, "block")]
    for mine, theirs, field in cases:
        saved = AdamW([nn.Parameter(torch.ones(SHAPE))], **theirs).state_dict()
        with pytest.raises(Invalid, match=field):
            AdamW([nn.Parameter(torch.ones(SHAPE))], **mine).load_state_dict(saved)


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_odd_gradients(make: Any) -> None:
    """None is skipped, a strided gradient is the same as its copy, a sparse one is refused by name."""
    parameters = [nn.Parameter(torch.ones(64, 80)) for _ in range(3)]
    optimizer = make(parameters, states="int8")
    wide = torch.randn(80, 64, generator=torch.Generator().manual_seed(0))
    parameters[0].grad = wide.t()
    optimizer.step()
    twin = nn.Parameter(torch.ones(64, 80))
    other = make([twin], states="int8")
    twin.grad = wide.t().contiguous()
    other.step()
    assert torch.equal(twin, parameters[0])
    assert not optimizer.state.get(parameters[1])
    assert torch.equal(parameters[1], torch.ones(64, 80))
    parameters[1].grad = torch.ones(64, 80).to_sparse()
    with pytest.raises(Invalid, match="of parameter 1 must be dense"):
        optimizer.step()


def test_a_strided_weight_is_stepped_in_place() -> None:
    """A transposed or channels-last weight moves as its contiguous copy does."""
    strided = nn.Parameter(torch.ones(80, 64).t())
    plain = nn.Parameter(torch.ones(64, 80))
    for w in (strided, plain):
        optimizer = AdamW([w], lr=1e-2)
        stepped(optimizer, range(2))
    assert torch.equal(strided, plain)


@pytest.mark.parametrize("states", FORMATS)
def test_a_nan_gradient_is_seen(states: str) -> None:
    """A NaN in one row makes that weight NaN, and the next step its block; the other rows go on."""
    w = nn.Parameter(torch.ones(SHAPE))
    optimizer = AdamW([w], lr=1e-2, states=states)
    for _ in range(2):
        g = gradient(0)
        g[3, 5] = torch.nan
        w.grad = g
        optimizer.step()
    assert bool(w[3, 5].isnan())
    assert bool(w[torch.arange(24) != 3].isfinite().all())


def test_closure_and_first_look_at_gradients() -> None:
    """The closure's loss comes back, and its gradients are those that are used."""
    w = nn.Parameter(torch.ones(64, 64))
    optimizer = SGD([w], lr=0.5, momentum=0.5, states="fp32")

    def closure() -> float:
        optimizer.zero_grad()
        loss = 0.5 * w.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 2048.0
    assert bool((w == 0.5).all())


@pytest.mark.parametrize("states", ["fp8", "int8", "int4"])
def test_experts_are_the_matrix_of_their_rows(states: str) -> None:
    """[4, 16, 96] moves as [64, 96] does; its codes and scales keep the experts' dimension."""
    experts, matrix = nn.Parameter(torch.ones(4, 16, 96)), nn.Parameter(torch.ones(64, 96))
    optimizers = [AdamW([w], lr=1e-2, states=states) for w in (experts, matrix)]
    for step in range(3):
        for w, optimizer in zip((experts, matrix), optimizers, strict=True):
            w.grad = gradient(step, (64, 96)).view(w.shape)
            optimizer.step()
    assert torch.equal(experts.view(64, 96), matrix)
    assert optimizers[0].state[experts]["exp_avg"].shape == (4, 16, 48 if states == "int4" else 96)
    assert optimizers[0].state[experts]["exp_avg_scale"].shape == (4, 16, 1)


@pytest.mark.parametrize("states", ["fp32", "fp8", "int8"])
@pytest.mark.parametrize("lr", [1e-4, 1e-5])
def test_bf16_weights_take_the_whole_change(states: str, lr: float) -> None:
    """Applied / intended change over 40 steps is 1.00 +- 0.02 by chance; to nearest most would be lost."""
    def change(dtype: torch.dtype, start: Tensor) -> Tensor:
        w = nn.Parameter(start.to(dtype, copy=True))
        optimizer = AdamW([w], lr=lr, weight_decay=0.0, states=states)
        for step in range(40):
            w.grad = (gradient(step, (128, 256)) + 0.5).bfloat16().to(dtype)
            optimizer.step()
        return (w.detach().float() - start.float()).double()

    start = (0.05 * gradient(99, (128, 256))).bfloat16()
    wanted, applied = change(torch.float32, start.float()), change(torch.bfloat16, start)
    assert ((applied * wanted).sum() / wanted.square().sum()).item() == pytest.approx(1.0, abs=0.02)


def test_a_master_is_what_moves() -> None:
    """bf16 and fp16 weights are their fp32 master to nearest; the master moves as an fp32 weight does."""
    for dtype in (torch.bfloat16, torch.float16):
        w, plain = nn.Parameter(torch.ones(SHAPE, dtype=dtype)), nn.Parameter(torch.ones(SHAPE))
        ours, exact = AdamW([w], lr=1e-4, master=True), AdamW([plain], lr=1e-4)
        for step in range(5):
            w.grad = gradient(step).to(dtype)
            plain.grad = w.grad.float()
            ours.step()
            exact.step()
        master = ours.state[w]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(master, plain)
        assert torch.equal(w, master.to(dtype))


@pytest.mark.parametrize(("states", "decades"), [("bf16", 2), ("int16", 2), ("fp8", 2), ("int8", 1)])
def test_updates_have_the_length_of_exact_ones(states: str, decades: int) -> None:
    """Update norm against fp32's over steps 20 to 60, gradients spread over decades in a block: 0.95 to 1.05.

    INT8 has even codes, for m too: over two decades its updates are 1.12 times as long.
    """
    size = 10 ** (-decades * torch.rand(64, 256, generator=torch.Generator().manual_seed(9)))
    start = torch.zeros(64, 256)
    ratios = []
    pair = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [AdamW([w], lr=1e-3, weight_decay=0.0, states=s)
                  for w, s in zip(pair, (states, "fp32"), strict=True)]
    for step in range(60):
        before = [w.detach().clone() for w in pair]
        for w, optimizer in zip(pair, optimizers, strict=True):
            w.grad = gradient(step, (64, 256)) * size
            optimizer.step()
        norms = [(w.detach() - b).norm().item() for w, b in zip(pair, before, strict=True)]
        ratios.append(norms[0] / norms[1])
    assert 0.95 < sum(ratios[20:]) / 40 < 1.05


@pytest.mark.parametrize(("saver", "loader"), [(AdamW, SGD), (SGD, Lion), (Lion, SGD), (Lion, AdamW),
                                               (Adam, AdamW), (AdamW, Adam)])
def test_states_of_another_rule_are_refused(saver: Any, loader: Any) -> None:
    """At load, by name, and not in the next step; those of Adam and AdamW too, which look alike."""
    saved, other = (nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    first = saver([saved], lr=1e-3, states="fp32")
    saved.grad = torch.ones_like(saved)
    first.step()
    with pytest.raises(Invalid, match="rule"):
        loader([other], lr=1e-3, states="fp32").load_state_dict(first.state_dict())
    with pytest.raises(Invalid, match="rule"):
        loader([{"params": [other], "rule": first.rule.name}])


@pytest.mark.parametrize("options", [{"betas": (0.9,)}, {"betas": (0.9, "x")}, {"lr": float("inf")},
                                     {"lr": float("nan")}, {"lr": "1e-3"}, {"weight_decay": float("inf")}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    """When the optimizer is made."""
    with pytest.raises(Invalid):
        AdamW([nn.Parameter(torch.ones(4))], **options)
