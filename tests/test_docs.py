"""The docs are tested: links lead somewhere, code runs, every setting, option, route and metric is there."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI

from fp8scope import doctor, sync
from fp8scope.cli import COMMANDS
from fp8scope.settings import ProbeSettings
from fp8scope_protocol.metrics import METRICS, SENTINELS
from fp8scope_protocol.rules import Rule
from fp8scope_server import demo
from fp8scope_server.app import create_app
from fp8scope_server.settings import ServerSettings
from fp8scope_trainer import conversion_command, estimate_command, options, proxy
from fp8scope_trainer.recipe import Recipe

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link and picture of a page exists."""
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_setting_is_listed() -> None:
    """A variable that is read is a variable that is documented."""
    text = (DOCS / "settings.md").read_text()
    names = {f"FP8SCOPE_{one.name.upper()}" for one in fields(ProbeSettings)}
    names |= {f"FP8SCOPE_{one.name.upper()}" for one in fields(ServerSettings)}
    for folder in ("protocol", "probe", "trainer", "server", "dashboard"):
        for path in (ROOT / folder).rglob("*.py"):
            names |= set(re.findall(r"""["'](FP8SCOPE_[A-Z_]*[A-Z])["']""", path.read_text()))
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_every_metric_is_listed_with_its_definition() -> None:
    """The page says what the catalogue says."""
    text = (DOCS / "metrics.md").read_text()
    for metric in (*METRICS.values(), *SENTINELS.values()):
        definition = metric.definition.replace("|", "\\|")
        assert f"| `{metric.key}` | {metric.unit} | {definition} | {metric.merge} | {metric.worse} |" in text


@pytest.mark.parametrize(
    ("page", "parser"),
    [("training.md", options._parser()), ("demo.md", demo._parser()), ("transport.md", sync._parser()),
     ("doctor.md", doctor._parser()), ("checkpoints.md", conversion_command._parser()),
     ("estimate.md", estimate_command._parser()), ("training.md", proxy._parser())],
    ids=("train", "demo", "sync", "doctor", "convert-checkpoint", "estimate", "proxy"),
)
def test_every_option_is_listed(page: str, parser: object) -> None:
    """What --help shows, the page shows."""
    text = (DOCS / page).read_text()
    given = {option for action in parser._actions for option in action.option_strings}  # type: ignore[attr-defined]
    assert {option for option in given - {"-h", "--help"} if option not in text} == set()


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in re.findall(
    r"^    fp8scope (\S+ .+)$", page.read_text(), re.MULTILINE)}))
def test_every_command_line_can_be_given(line: str) -> None:
    """As it stands: the command knows its options and takes their values."""
    command, *rest = line.split()
    module = options if command == "train" else import_module(COMMANDS[command][0])
    assert module._parser().parse_args(rest)


def test_what_a_page_runs_is_there() -> None:
    """Tests, benchmarks and examples that a page names by their path."""
    for page in PAGES:
        for path in re.findall(r"\b((?:tests|benchmarks|examples)/[\w/]+\.py)\b", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_every_command_has_a_page() -> None:
    """The console's table is in the docs."""
    text = "".join(page.read_text() for page in PAGES)
    assert [command for command in COMMANDS if f"fp8scope {command}" not in text] == []


def test_every_route_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector answers nothing that its page does not name."""
    monkeypatch.setenv("FP8SCOPE_TOKEN", "x" * 40)
    app = create_app(ServerSettings(home=tmp_path))
    while not isinstance(app, FastAPI):
        app = app.app
    paths = set(app.openapi()["paths"])
    text = (DOCS / "collector.md").read_text()
    assert len(paths) > 15
    assert {path for path in paths if not re.search(re.escape(path) + "[`?]", text)} == set()


def test_the_rule_in_the_docs_is_a_rule() -> None:
    """It can be sent as it stands."""
    text = (DOCS / "collector.md").read_text()
    block = text[text.index("rules/rescue\n") + len("rules/rescue\n"):]
    body = block[:block.index("\n    }\n") + len("\n    }\n")]
    assert msgspec.json.decode(body, type=Rule).name == "rescue"


def test_every_option_of_a_recipe_is_listed() -> None:
    """With its default."""
    text = (DOCS / "linear.md").read_text()
    for one in fields(Recipe):
        shown = str(one.default) if type(one.default) is int else f"`{one.default}`"
        assert f"| `{one.name}` | {shown} |" in text


def test_the_example_of_a_linear_runs() -> None:
    """As it stands; it prints a map that names the layer that cannot run in FP8."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / "linear.md").read_text(), re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=False, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "requested fp8, not converted: out_features 10" in done.stdout


def test_the_code_in_the_docs_runs(tmp_path: Path) -> None:
    """The probe's first example, as it stands, with nobody listening."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / "probe.md").read_text(), re.DOTALL)[0]
    environment = {"FP8SCOPE_HOME": str(tmp_path), "FP8SCOPE_COLLECTOR": "offline"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=os.environ | environment,
                          check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.f8ss")), "nothing was spooled"
