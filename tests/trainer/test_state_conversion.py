"""States from any format to any other, and from and to a plain torch.optim.AdamW."""

import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fp8scope.cli import main
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.checkpoint import load, save
from fp8scope_trainer.lion import Lion
from fp8scope_trainer.moments import decode, slots
from fp8scope_trainer.optimizer import StateOptimizer
from fp8scope_trainer.place import columns_of
from fp8scope_trainer.state_block import FORMATS
from fp8scope_trainer.state_conversion import convert_states
from fp8scope_trainer.state_format import StateFormat


class Model(nn.Module):
    """An embedding, two matrices, one of odd columns, vectors, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 128)
        self.up = nn.Linear(128, 201)
        self.down = nn.Linear(201, 128)
        self.head = nn.Linear(128, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.down(self.up(self.embedding(tokens)).relu()))
        return y


MATRICES = ("up.weight", "down.weight")
CODE = {"fp32": (0.0, 0.0), "bf16": (2**-7, 0.0), "int16": (0.0, 1 / 32767), "fp8": (2**-3, 2**-9 / 448),
        "int8": (0.0, 1 / 127), "int4": (0.0, 1 / 7)}
"""From one code to the next: a share of the value, and a share of the largest."""


def ours(states: str, **options: Any) -> tuple[Model, AdamW]:
    model = Model()
    return model, AdamW(parameter_groups(model, states=states), lr=1e-3, **options)


def plain(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, *, first: int = 0, steps: int = 4) -> None:
    for step in range(first, first + steps):
        tokens = torch.randint(64, (32,), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(model: nn.Module, optimizer: StateOptimizer) -> dict[str, Tensor]:
    """Decoded, of every parameter; of v its root."""
    found = {}
    for name, parameter in model.named_parameters():
        format = StateFormat.of(optimizer.format_of(parameter))
        both = decode(slots(optimizer.state[parameter], optimizer.rule), format, columns_of(parameter.shape))
        assert both.signed is not None
        found[f"{name}.m"] = both.signed.reshape(parameter.shape).clone()
        if both.square is not None:
            found[f"{name}.r"] = both.square.sqrt().reshape(parameter.shape)
    return found


def assert_close(value: Tensor, wanted: Tensor, format: str, key: str) -> None:
    """Within one code; fp32 to the bit."""
    share, of_largest = CODE[format]
    limit = 1.001 * (share * wanted.abs() + of_largest * wanted.abs().amax())
    assert bool(((value - wanted).abs() <= limit).all()), key


def same_parameters(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_from_every_format(tmp_path: Path) -> None:
    """To itself, to fp32, to the next one: within a code of the source's moments, it loads, and trains on. To
    itself, and where fp32 is the rule (embedding, head, vectors), all bits are kept; done twice the codes are
    the same."""
    for source, following in zip(FORMATS, (*FORMATS[1:], "fp8"), strict=True):
        model, optimizer = ours(source)
        trained(model, optimizer)
        save(tmp_path / source, model, optimizer, step=4, data_position=9, extra={"a": 1})
        before = moments(model, optimizer)
        for target in {source, following, "fp32"}:
            folder = tmp_path / f"{source}-{target}"
            convert_states(tmp_path / source, folder, states=target)
            into, other = ours(target)
            at = load(folder, into, other)
            assert (at.step, at.data_position, at.extra) == (4, 9, {"a": 1})
            same_parameters(model, into)
            for key, value in moments(into, other).items():
                kept = source == target or not key.startswith(MATRICES)
                assert_close(value, before[key], "fp32" if kept else target, key)
            trained(into, other, first=4, steps=1)
    convert_states(tmp_path / "int8", tmp_path / "again", states="int4")
    (one, first), (two, second) = ours("int4"), ours("int4")
    load(tmp_path / "int8-int4", one, first)
    load(tmp_path / "again", two, second)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        for key, value in first.state[a].items():
            assert torch.equal(value, second.state[b][key]), key


def test_the_block_and_the_rule_are_kept(tmp_path: Path) -> None:
    """int8 in blocks of 256, of Lion: one moment, its codes of the right block; AdamW's are refused."""
    model = Model()
    optimizer = Lion(parameter_groups(model, states="fp8"), lr=1e-4)
    trained(model, optimizer)
    save(tmp_path / "a", model, optimizer, step=4)
    convert_states(tmp_path / "a", tmp_path / "b", states="int8", block=256)
    other = Lion(parameter_groups(model, states="int8", block=256), lr=1e-4)
    load(tmp_path / "b", model, other)
    assert other.state[model.down.weight]["exp_avg"].dtype == torch.int8
    with pytest.raises(Invalid, match=r"blocks of 1024 .*: the checkpoint holds int8 in blocks of 256"):
        load(tmp_path / "b", model, Lion(parameter_groups(model, states="int8"), lr=1e-4))
    for target in (tmp_path / "a", tmp_path / "a" / "step-00000004"):
        with pytest.raises(Invalid, match="holds the checkpoint that is converted"):
            convert_states(tmp_path / "a" / "step-00000004", target, states="int8")
    with pytest.raises(Invalid, match="is for states='fp32' of an AdamW"):
        convert_states(tmp_path / "a", tmp_path / "c", states="fp32", kind="torch")


def test_a_warm_up_is_kept(tmp_path: Path) -> None:
    """Converted in its fp32 warm-up the moments stay exact, and are encoded when the warm-up ends."""
    model, optimizer = ours("int8", warmup_steps=6)
    trained(model, optimizer)
    save(tmp_path / "a", model, optimizer, step=4)
    convert_states(tmp_path / "a", tmp_path / "b", states="fp8")
    into, other = ours("fp8", warmup_steps=6)
    load(tmp_path / "b", into, other)
    for key in ("exp_avg_exact", "exp_avg_sq_exact"):
        assert torch.equal(other.state[into.up.weight][key], optimizer.state[model.up.weight][key])
    trained(into, other, first=4, steps=2)
    assert other.state[into.up.weight]["exp_avg"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_from_plain_torch(kind: str, tmp_path: Path) -> None:
    """A torch.optim.AdamW in both of its forms: with fp32 states training goes on as torch's own would,
    within 1e-6; in int8 it loads, too."""
    model = Model()
    optimizer = plain(model)
    trained(model, optimizer)
    path = tmp_path / "plain"
    if kind == "torch":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    else:
        weights, states = get_state_dict(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_saver.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    convert_states(path, tmp_path / "ours", states="fp32")
    convert_states(path, tmp_path / "int8", states="int8")
    into = Model()
    other = AdamW(into.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.1, states="fp32", clip=None)
    assert load(tmp_path / "ours", into, other).step == 4
    assert other.param_groups[0]["lr"] == 1e-3
    same_parameters(model, into)
    trained(model, optimizer, first=4)
    trained(into, other, first=4)
    for a, b in zip(model.parameters(), into.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    eighth, quantized = ours("int8")
    with pytest.raises(Invalid, match=r"weight_decay = 0\.0: the checkpoint has 0\.1 for up\.bias"):
        load(tmp_path / "int8", eighth, quantized)
    load(tmp_path / "int8", eighth, quantized, changed=("weight_decay",))
    assert quantized.state[eighth.up.weight]["exp_avg_sq"].dtype == torch.uint8
    assert quantized.state[eighth.embedding.weight]["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_to_plain_torch(kind: str, tmp_path: Path) -> None:
    """fp8 states become what torch's AdamW loads by its own means, decoded to the bit, and trains on with."""
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, states="fp8")
    trained(model, optimizer)
    save(tmp_path / "a", model, optimizer, step=4)
    path = convert_states(tmp_path / "a", tmp_path / "plain", kind=kind)
    into = Model()
    other = plain(into)
    if kind == "torch":
        held = torch.load(path, weights_only=True)
        into.load_state_dict(held["model"])
        other.load_state_dict(held["optimizer"])
    else:
        weights, states = get_state_dict(into, other)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_loader.load({"model": weights, "optimizer": states}, checkpoint_id=path)
        set_state_dict(into, other, model_state_dict=weights, optim_state_dict=states)
    same_parameters(model, into)
    before = moments(model, optimizer)
    for name, parameter in into.named_parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], before[f"{name}.m"]), name
        assert other.state[parameter]["step"].item() == 4
    assert other.param_groups[0]["betas"] == (0.9, 0.95)
    trained(into, other, first=4)
    with pytest.raises(Invalid, match="is there already"):
        convert_states(tmp_path / "a", path, kind=kind)


def test_what_cannot_be_known_is_refused(tmp_path: Path) -> None:
    """A file that does not say whose states are whose, amsgrad, SGD, nonsense: no guess, one line each."""
    model = Model()
    groups = torch.optim.AdamW([{"params": [model.down.weight]}, {"params": [model.up.weight]}])
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    ams = torch.optim.AdamW(model.named_parameters(), amsgrad=True)
    said = {"groups": (groups, "does not say which state is of which parameter"),
            "sgd": (sgd, "an AdamW without amsgrad"), "ams": (ams, "an AdamW without amsgrad")}
    for name, (optimizer, words) in said.items():
        trained(model, optimizer, steps=1)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / name)
        with pytest.raises(Invalid, match=words):
            convert_states(tmp_path / name, tmp_path / "to", states="int8")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(Invalid, match=r"is no file of torch\.save"):
        convert_states(tmp_path / "text", tmp_path / "to")
    torch.save({"weights": {}}, tmp_path / "other")
    with pytest.raises(Invalid, match="holds weights; it must hold model and optimizer"):
        convert_states(tmp_path / "other", tmp_path / "to")
    with pytest.raises(Invalid, match="does not exist"):
        convert_states(tmp_path / "nowhere", tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fp8scope convert-checkpoint`, int8 to fp32 to int16 and back: within a code. Bad input is one line.

    The first as a process of its own."""
    model, optimizer = ours("int8")
    trained(model, optimizer)
    save(tmp_path / "a", model, optimizer, step=4)

    folders = [str(tmp_path / name) for name in "abcd"]
    done = subprocess.run([sys.executable, "-m", "fp8scope.cli", "convert-checkpoint", *folders[:2]],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{folders[1]}/step-00000004"
    ways = (("--states", "int16"), ("--states", "int8", "--block", "1024"))
    for (source, target), options in zip(pairwise(folders[1:]), ways, strict=True):
        assert main(["convert-checkpoint", source, target, *options]) == 0
        assert capsys.readouterr().out.strip() == f"{target}/step-00000004"
    into, other = ours("int8")
    load(tmp_path / "d", into, other)
    before, after = moments(model, optimizer), moments(into, other)
    for key, value in before.items():
        assert_close(after[key], value, "int8" if key.startswith(MATRICES) else "fp32", key)
    for arguments, words in ((("x", "y", "--states", "int9"), "--states"),
                             ((str(tmp_path / "a"), "y", "--states", "int8", "--block", "3"), "block = 3"),
                             ((str(tmp_path / "no"), "y"), "does not exist")):
        assert main(["convert-checkpoint", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert len(said.strip().splitlines()) == 1
