"""What the doctor foretells is what a run then measures."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

import fp8scope
from fp8scope.cli import main
from fp8scope.derive import derive
from fp8scope.diagnosis import Diagnosis
from fp8scope.planned import plan_layers, plan_states
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.recipes import parse_recipes
from fp8scope_trainer.adam import Adam
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.decoder import Decoder, demo
from fp8scope_trainer.lion import Lion
from fp8scope_trainer.sgd import SGD

TOKENS = 32
Job = tuple[nn.Module, Optimizer, Callable[[], torch.Tensor]]


def decoder() -> Job:
    model = Decoder(demo())
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, lambda: model(torch.randint(256, (2, 16))).square().mean()


def converted() -> Job:
    model = Decoder(demo())
    convert(model, Conversion(precision="fp8"))
    optimizer = AdamW(parameter_groups(model), lr=1e-3)
    return model, optimizer, lambda: model(torch.randint(256, (2, 16))).square().mean()


def llama() -> Job:
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=128, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).bfloat16()
    tokens = torch.randint(128, (2, 16))
    return model, torch.optim.AdamW(model.parameters()), lambda: model(input_ids=tokens, labels=tokens).loss


def momentum() -> Job:
    model = nn.Sequential(nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, lambda: model(torch.randn(TOKENS, 128)).square().mean()


@pytest.mark.parametrize("job", [decoder, converted, llama, momentum])
@pytest.mark.parametrize("formats", [("e4m3",), ("e5m2", "int8")])
def test_it_foretells_the_series_of_a_run(job: Callable[[], Job], formats: tuple[str, ...]) -> None:
    """The very series that two steps in detail then have, and the size of what they send."""
    model, optimizer, loss = job()
    found = fp8scope.diagnose(model, optimizer, formats=formats, tokens=TOKENS)
    recipes = parse_recipes(formats)
    plans = [*plan_layers(model, recipes, tokens=TOKENS), *plan_states(model, [optimizer], recipes)]
    worker = MemoryWorker()
    with Scope(model, (optimizer,), worker=worker, every=1, formats=formats) as scope:
        for _ in range(2):
            torch.autograd.backward(loss())
            optimizer.step()
            optimizer.zero_grad()
        memory = scope._watch.rows.bytes
    record = worker.record(1)
    assert record.layout is not None
    assert record.tables is not None
    assert {plan.series for plan in plans} == set(record.layout.series)
    assert found.series == len(record.layout.series)
    assert found.wire_bytes[1] == sum(plane.nbytes for plane in derive(record.tables, record.layout).values())
    assert found.device_bytes == memory + found.series * found.row_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "states"), [
    (Lion, "fp32"), (Lion, "bf16"), (Lion, "int8"), (AdamW, "fp32"), (AdamW, "bf16"), (AdamW, "fp8"),
    (AdamW, "int16"), (Adam, "int4"), (SGD, "bf16"), (SGD, "fp8")])
def test_it_foretells_the_states_of_our_optimizers(make: Any, states: str, dtype: torch.dtype) -> None:
    """Of a Lion no second moment; in 16 bits rounded by chance; all as the run then has them."""
    model = nn.Linear(1024, 64).to(dtype)
    optimizer = make(model.parameters(), states=states)
    recipes, worker = parse_recipes(("e4m3",)), MemoryWorker()
    plans = [*plan_layers(model, recipes, tokens=TOKENS), *plan_states(model, [optimizer], recipes)]
    with Scope(model, (optimizer,), worker=worker, every=1, formats=("e4m3",)) as scope:
        for _ in range(2):
            torch.autograd.backward(model(torch.randn(TOKENS, 1024, dtype=dtype)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            scope.step()
    layout = worker.record(1).layout
    assert layout is not None
    assert {plan.series for plan in plans} == set(layout.series)


def test_memory_stays_below_a_kibibyte_a_series() -> None:
    """The bar: 1 KiB a watched tensor and series, and one copy."""
    found = fp8scope.diagnose(nn.Linear(128, 128))
    assert found.row_bytes <= 1024


def test_bytes_are_counted_by_hand() -> None:
    """128 tokens through a bf16 layer of 256 to 64 with fp32 states: each operand once a format; in detail
    activations and gradients twice, and the states."""
    model = nn.Sequential(nn.Linear(256, 64, bias=False)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = fp8scope.diagnose(model, optimizer, tokens=128, formats=("e4m3", "e5m2"), every=4, detail_every=2,
                              bandwidth=1e9)
    x, w, dy = 128 * 256 * 2, 256 * 64 * 2, 128 * 64 * 2
    assert found.read_bytes == (2 * (x + w + dy), 2 * (2 * x + w + 2 * dy + w))
    light, detailed = found.read_bytes
    assert found.step_seconds == (light / 1e9, detailed / 1e9)
    assert found.mean_seconds == pytest.approx((light + detailed) / 2 / 4 / 1e9)


def test_a_model_on_the_meta_device_costs_nothing() -> None:
    """The same diagnosis as of the model itself."""
    made: list[Diagnosis] = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Decoder(demo())
        made.append(fp8scope.diagnose(model, torch.optim.AdamW(model.parameters())))
    assert made[0] == made[1]
    assert made[0].series > 50


class Odd(nn.Module):
    """Everything that cannot be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.lazy = nn.LazyLinear(4)
        self.plain = nn.Linear(4, 4)


def test_what_is_not_measured_is_said_with_its_reason() -> None:
    """Each by its name."""
    model = Odd()
    stranger = nn.Parameter(torch.zeros(4, 4))
    optimizers = [torch.optim.SGD([{"params": [model.plain.weight, stranger]}], lr=0.1),
                  torch.optim.AdamW([model.plain.bias])]
    found = {one.name: one.reason for one in fp8scope.diagnose(model, optimizers).unobserved}
    assert "Embedding is not a linear layer" in found["embedding"]
    assert "parametrized" in found["normed"]
    assert "before the first forward" in found["lazy"]
    assert found["states of 1 vectors"]
    assert found["states of 1 parameters"] == "they are not the model's"
    assert "SGD keeps no exp_avg" in found["states of 1 matrices"]
    assert "plain" not in found


WRONG: dict[str, Any] = {"formats": ("e9m9",), "every": 0, "detail_every": 0, "tokens": 0, "bandwidth": 0.0,
                         "optimizers": [nn.Linear(1, 1)], "model": 1}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_arguments_are_named(name: str) -> None:
    """As those of `attach` are."""
    with pytest.raises(Invalid):
        fp8scope.diagnose(**({"model": nn.Linear(4, 4)} | {name: WRONG[name]}))


@pytest.mark.parametrize("bandwidth", [math.inf, math.nan, 5e-324])
def test_a_bandwidth_that_leads_to_endless_times_is_refused(bandwidth: float) -> None:
    """JSON has no word for them."""
    with pytest.raises(Invalid, match=f"bandwidth = {bandwidth}"):
        fp8scope.diagnose(nn.Linear(4, 4), bandwidth=bandwidth)


def test_an_optimizer_counts_once_however_often_it_is_given() -> None:
    """Twice, and with its scheduler, as Lightning's users return them."""
    model = nn.Linear(128, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    once = fp8scope.diagnose(model, optimizer)
    assert fp8scope.diagnose(model, (optimizer, optimizer, scheduler)) == once


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_elements_is_no_measurement() -> None:
    """Alone, nothing would be measured; beside others it is named."""
    full = nn.Linear(4, 4)
    model = nn.ModuleDict({"empty": nn.Linear(0, 4), "full": full})
    found = fp8scope.diagnose(model, torch.optim.AdamW(model.parameters()))
    assert found.measured == fp8scope.diagnose(full, torch.optim.AdamW(full.parameters())).measured
    assert {one.name: one.reason for one in found.unobserved}["empty"] == "its weight has no elements"
    assert not fp8scope.diagnose(nn.Sequential(nn.Linear(0, 0))).measured


JOBS = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    return model, torch.optim.AdamW(model.parameters())

def several():
    model = nn.Linear(4, 4)
    return model, [torch.optim.AdamW([model.weight]), torch.optim.SGD([model.bias], lr=0.1)]

def nothing():
    return nn.Sequential(nn.Conv1d(4, 4, 1))

def number():
    return 3

def broken():
    return nn.Linear(4, "4")

def empty():
    return ()

async def later():
    return nn.Linear(4, 4)

def laterwards():
    return later()

def one_by_one():
    yield nn.Linear(4, 4)

def needs(size):
    return nn.Linear(size, size)

def partly():
    import json
    return json.loads("no json")

constant = 5

def leaves():
    raise SystemExit(0)

def deep():
    return nn.Linear(4, 4).load_state_dict({"nothing": torch.zeros(1)})

def tells():
    raise RuntimeError("one line\\nand another")
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of somebody's, in the folder that the command is run in."""
    (tmp_path / "somebodys_jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "somebodys_jobs", raising=False)


def test_the_command_prints_a_table_or_json(jobs: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The same numbers in both."""
    assert main(["doctor", "somebodys_jobs:build", "--meta"]) == 0
    table = capsys.readouterr().out
    assert main(["doctor", "somebodys_jobs:build", "--json", "--formats", "e4m3,int8"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "activation  columnwise   e4m3    tile 1x128     what-if" in table
    assert document["series"] == 2 * 2 * 7
    assert document["formats"] == ["e4m3", "int8"]
    assert {one["role"] for one in document["measured"]} == {
        "activation", "gradient", "weight", "exp_avg", "exp_avg_sq"}
    assert main(["doctor", "somebodys_jobs:several"]) == 0
    assert "exp_avg" in capsys.readouterr().out


@pytest.mark.parametrize(("target", "code", "words"), [
    ("somebodys_jobs:nothing", 1, "Conv1d is not a linear layer"),
    ("somebodys_jobs:number", 2, "must return a model first, not a int"),
    ("somebodys_jobs:broken", 2, "TypeError"),
    ("somebodys_jobs:absent", 2, "AttributeError"),
    ("somebodys_jobs:empty", 2, "must return a model first, not a tuple"),
    ("somebodys_jobs:leaves", 2, "SystemExit: 0"),
    ("somebodys_jobs:tells", 2, "one line and another (somebodys_jobs.py, line 50)"),
    ("somebodys_jobs:deep", 2, "(somebodys_jobs.py, line 47)"),
    ("nobodys_jobs:build", 2, "ModuleNotFoundError: No module named 'nobodys_jobs'\n"),
    ("somebodys_jobs", 2, "must be MODULE:FUNCTION"),
    ("", 2, "must be MODULE:FUNCTION"),
    ("../m:ok", 2, "target = '../m:ok': must be MODULE:FUNCTION, with the module's name as in an import"),
    (".m:ok", 2, "must be MODULE:FUNCTION"),
    ("jobs/m.py:ok", 2, "must be MODULE:FUNCTION"),
    ("somebodys_jobs:", 2, "must be MODULE:FUNCTION"),
    ("somebodys_jobs.py:build", 2, "No module named 'somebodys_jobs.py'"),
    ("somebodys_jobs:later", 2, "is async; it must be a plain function"),
    ("somebodys_jobs:laterwards", 2, "must return a model first, not a coroutine"),
    ("somebodys_jobs:one_by_one", 2, "is a generator; it must be a plain function"),
    ("somebodys_jobs:constant", 2, "is a int; it must be a function"),
    ("somebodys_jobs:needs", 2, "missing 1 required positional argument: 'size'\n"),
    ("somebodys_jobs:partly", 2, "Expecting value: line 1 column 1 (char 0) (somebodys_jobs.py, line 39)"),
])
def test_exit_codes(
    jobs: None, capsys: pytest.CaptureFixture[str], target: str, code: int, words: str
) -> None:
    """1 where nothing would be measured, 2 for what cannot be diagnosed, with one line that says why."""
    assert main(["doctor", target]) == code
    said = capsys.readouterr()
    assert words in (said.out if code == 1 else said.err)
    assert code == 1 or said.err.count("\n") == 1


def test_it_runs_where_the_job_lies(jobs: None, tmp_path: Path) -> None:
    """As a process in that folder, which is not on its path."""
    command = [sys.executable, "-m", "fp8scope.cli", "doctor", "somebodys_jobs:build", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "Sequential"


@pytest.mark.parametrize("code", [
    "def build(:\n", "import nothing_of_the_kind\n", "from json import nothing\n",
    "from broken import build\n", "import broken\nbroken.x\n", "1/0\n", "\0",
])
def test_what_fails_in_an_import_is_one_line_without_the_inside_of_python(tmp_path: Path, code: str) -> None:
    """As a process, with every warning shown: the place is one in somebody's own file."""
    (tmp_path / "broken.py").write_text(code)
    command = [sys.executable, "-W", "always", "-m", "fp8scope.cli", "doctor", "broken:build"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "importlib" not in done.stderr
    assert "frozen" not in done.stderr
    assert "/" not in done.stderr


def test_an_async_builder_is_refused_without_a_warning(jobs: None, tmp_path: Path) -> None:
    """Nobody is told of a coroutine that was never awaited."""
    for name in ("later", "laterwards"):
        command = [sys.executable, "-W", "always", "-m", "fp8scope.cli", "doctor", f"somebodys_jobs:{name}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "awaited" not in done.stderr
