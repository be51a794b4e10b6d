"""Every difference between a checkpoint and a job is an error with both sides, and loads nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_trainer import checkpoint_progress
from fp8scope_trainer.adam import Adam
from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.checkpoint import load, save
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.history import advance_histories
from fp8scope_trainer.recipe import Recipe
from fp8scope_trainer.state_block import FORMATS


def model_of(*, width: int = 128, recipe: Recipe | None = None, extra: bool = False) -> nn.Module:
    """Two linears in FP8, of a fixed seed."""
    torch.manual_seed(0)
    layers = {"up": nn.Linear(width, 128), "down": nn.Linear(128, 128, bias=False)}
    if extra:
        layers["more"] = nn.Linear(128, 128)
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    convert(model, Conversion(recipe=recipe or Recipe()))
    return model


def adamw(model: nn.Module, **options: Any) -> AdamW:
    chosen: dict[str, Any] = {"lr": 1e-3, "states": "int8"} | options
    return AdamW(model.parameters(), **chosen)


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(4, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        advance_histories(model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of AdamW with int8 states."""
    model = model_of()
    optimizer = adamw(model)
    trained(model, optimizer)
    save(tmp_path, model, optimizer, step=2)
    return tmp_path


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], Optimizer], str]

CASES: dict[str, Case] = {
    "states": (model_of, lambda m: adamw(m, states="fp8"),
               r"states = 'fp8 in blocks of 128 \(up\.weight and 1 more\)': the checkpoint holds int8 in "
               r"blocks of 1024; .*convert-checkpoint FROM TO --states fp8 --block 128"),
    "block": (model_of, lambda m: adamw(m, block=256),
              r"int8 in blocks of 256 .* the checkpoint holds int8 in blocks of 1024"),
    "rule": (model_of, lambda m: Adam(m.parameters(), states="int8"),
             r"optimizer = 'fp8scope_trainer\.Adam': the checkpoint was written by fp8scope_trainer\.AdamW"),
    "torch": (model_of, lambda m: torch.optim.AdamW(m.parameters()),
              r"optimizer = 'torch\.AdamW': the checkpoint was written by fp8scope_trainer\.AdamW;.*convert"),
    "betas": (model_of, lambda m: adamw(m, betas=(0.9, 0.999)),
              r"betas = \[0\.9, 0\.999\]: the checkpoint has \[0\.9, 0\.95\] for up\.weight; .*"
              r"changed=\('betas',\)"),
    "seed": (model_of, lambda m: adamw(m, seed=3), r"seed = 3: the checkpoint has 0"),
    "warm-up": (model_of, lambda m: adamw(m, warmup_steps=5), r"warmup_steps = 5: the checkpoint has 0"),
    "order": (model_of, lambda m: AdamW(reversed(list(m.parameters())), lr=1e-3, states="int8"),
              r"order of parameters = 'down\.weight is number 0': in the checkpoint it is number 2"),
    "some": (model_of, lambda m: AdamW(list(m.parameters())[:1], lr=1e-3, states="int8"),
             r"optimizer = '1 parameters': this optimizer lacks up\.bias, down\.weight"),
    "shape": (lambda: model_of(width=256), adamw,
              r"up\.weight = 'float32\[128, 256\]': the checkpoint holds float32\[128, 128\]"),
    "dtype": (lambda: model_of().bfloat16(), adamw,
              r"up\.weight = 'bfloat16\[128, 128\]': the checkpoint holds float32"),
    "layers": (lambda: model_of(extra=True), adamw,
               r"model = '5 entries': the checkpoint lacks more\.weight, more\.bias"),
    "histories": (lambda: model_of(recipe=Recipe(policy="delayed")), adamw,
                  r"amax histories = .*'up\.history': 1024.*: the checkpoint holds None"),
    "recipe": (lambda: model_of(recipe=Recipe(power_of_two=True)), adamw,
               r"recipe of up = \{'power_of_two': True\}: the checkpoint has \{'power_of_two': False\}"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_refused_and_nothing_loaded(case: str, folder: Path) -> None:
    """C18: optimizer, rule, formats, blocks, options, order, shapes and recipes."""
    make, optimizer_of, said = CASES[case]
    model = make()
    optimizer = optimizer_of(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Invalid, match=said):
        load(folder, model, optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_changed_keeps_the_value_of_the_job(folder: Path) -> None:
    """What differs on purpose is named, and stays; lr comes from the checkpoint unless it is named, too."""
    model = model_of()
    optimizer = adamw(model, lr=5e-4, weight_decay=0.3)
    load(folder, model, optimizer, changed=("weight_decay",))
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer = adamw(model, lr=5e-4)
    load(folder, model, optimizer, changed=("lr",))
    assert optimizer.param_groups[0]["lr"] == 5e-4
    other = model_of(recipe=Recipe(policy="delayed"))
    load(folder, other, adamw(other), changed=("histories", "recipe"))
    with pytest.raises(UnknownName, match="near misses: weight_decay"):
        load(folder, model, adamw(model), changed=("weight_dceay",))


def test_another_torch_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It loads, and a warning names both versions; the same torch says nothing."""
    model = model_of()
    load(folder, model, adamw(model))
    assert "was written with" not in caplog.text
    manifest = folder / "step-00000002" / "fp8scope.json"
    manifest.write_text(manifest.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "2.10.0"'))
    load(folder, model, adamw(model))
    assert f"was written with torch 2.10.0, this is {torch.__version__}" in caplog.text


def test_groups_with_several_lr_cannot_become_one(tmp_path: Path) -> None:
    """lr comes from the checkpoint by parameter; one group that would get two is refused, before loading."""
    model = model_of()
    rates = zip(model.parameters(), (1e-3, 2e-3, 3e-3), strict=True)
    groups = [{"params": [one], "lr": lr} for one, lr in rates]
    optimizer = AdamW(groups, states="int8")
    trained(model, optimizer)
    save(tmp_path, model, optimizer, step=2)
    other = model_of()
    before = other.state_dict()["up.weight"].clone()
    with pytest.raises(Invalid, match=r"lr = 0\.001: the checkpoint has 0\.002 for up\.bias, in another"):
        load(tmp_path, other, adamw(other))
    assert torch.equal(other.state_dict()["up.weight"], before)


def test_weights_alone_can_be_loaded(folder: Path) -> None:
    """Without an optimizer, to evaluate; a checkpoint of weights alone is no start for an optimizer."""
    model = model_of()
    start = model.state_dict()["up.weight"].clone()
    assert load(folder, model).step == 2
    assert not torch.equal(model.state_dict()["up.weight"], start)
    save(folder / "weights", model, step=2)
    with pytest.raises(Invalid, match="was saved without one"):
        load(folder / "weights", model, adamw(model))


def test_parameters_without_states_stay_without(tmp_path: Path) -> None:
    """Frozen ones, and those that never had a gradient: no state is made up for them, others go on."""
    found = []
    for _ in range(2):
        model = model_of(extra=True)
        model.get_submodule("up").weight.requires_grad_(False)
        optimizer = adamw(model)
        found.append((model, optimizer))
    (model, optimizer), (other, loaded) = found
    more = model.get_submodule("more")
    del model.more
    trained(model, optimizer)
    model.add_module("more", more)
    save(tmp_path, model, optimizer, step=2)
    load(tmp_path, other, loaded)
    names = {name for name, parameter in other.named_parameters() if loaded.state.get(parameter)}
    assert names == {"up.bias", "down.weight"}


def test_a_slow_save_shows_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where standard error is no terminal, as lines of bytes done and in all; a quick one says nothing."""
    model = model_of()
    save(tmp_path, model, step=1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(checkpoint_progress, "SILENT_SECONDS", 0.0)
    save(tmp_path, model, step=2)
    load(tmp_path, model)
    shown = capsys.readouterr().err
    assert "save step 2: " in shown
    assert "load step 2: " in shown
    assert "MiB of rank 0" in shown


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_states_on_a_device_go_on_to_the_bit(device: str, tmp_path: Path) -> None:
    """Gradients that are given: 3 steps, save, load, 3 steps are 6 steps, in all formats. On the CPU the
    checkpoint of a GPU is loaded with the same codes."""
    for states in FORMATS:
        start = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
        grads = [torch.randn(64, 300, generator=torch.Generator().manual_seed(i + 1)) for i in range(6)]
        jobs = []
        for place in (device, device, "cpu"):
            model = nn.Linear(300, 64, bias=False)
            model.weight.data.copy_(start)
            model.to(place)
            jobs.append((model, AdamW(model.parameters(), lr=1e-3, states=states)))
        (through, first), (resumed, second), (here, third) = jobs
        for step, gradient in enumerate(grads):
            if step == 3:
                save(tmp_path / states, through, first, step=3)
                load(tmp_path / states, resumed, second)
                load(tmp_path / states, here, third)
                for key, value in first.state[through.weight].items():
                    assert torch.equal(third.state[here.weight][key].float(), value.cpu().float()), key
            for model, optimizer in ((through, first), (resumed, second))[:1 if step < 3 else 2]:
                model.weight.grad = gradient.to(device)
                optimizer.step()
        assert torch.equal(through.weight, resumed.weight), states
        for key, value in first.state[through.weight].items():
            assert torch.equal(value.float(), second.state[resumed.weight][key].float()), key


def test_torchs_own_optimizers_are_saved_and_loaded(tmp_path: Path) -> None:
    """AdamW and SGD of torch.optim, by the same calls, to the bit."""
    kinds: dict[str, Callable[[nn.Module], Optimizer]] = {
        "adamw": lambda m: torch.optim.AdamW(m.parameters()),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), momentum=0.9),
    }
    for name, make in kinds.items():
        first, second = model_of(), model_of()
        one, other = make(first), make(second)
        trained(first, one, 2)
        save(tmp_path / name, first, one, step=2)
        load(tmp_path / name, second, other)
        trained(first, one, 2)
        trained(second, other, 2)
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(a, b)
