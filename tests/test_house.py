"""The house: who may import whom, what each package shows, and what the repository must not contain."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fp8scope.cli import COMMANDS

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "fp8scope_protocol": set(),
    "fp8scope": {"fp8scope_protocol"},
    "fp8scope_trainer": {"fp8scope", "fp8scope_protocol"},
    "fp8scope_server": {"fp8scope_protocol"},
    "fp8scope_dashboard": {"fp8scope_protocol"},
}
FOLDERS = {
    "protocol": "fp8scope_protocol",
    "probe": "fp8scope",
    "trainer": "fp8scope_trainer",
    "server": "fp8scope_server",
    "dashboard": "fp8scope_dashboard",
}
THIRD_PARTY = {
    "fp8scope_protocol": {"msgspec", "numpy", "zstandard"},
    "fp8scope": {"msgspec", "numpy", "zstandard", "torch", "httpx", "triton"},
}
INTEGRATIONS = {
    "probe/fp8scope/huggingface.py": {"transformers"},
    "probe/fp8scope/lightning.py": {"lightning", "pytorch_lightning"},
}
"""Modules that a user of that package imports by name, and nothing else of ours does."""
PUBLIC_NAMES = {
    "fp8scope": {"Scope", "attach", "diagnose"},
    "fp8scope_protocol": set(),
    "fp8scope_trainer": set(),
    "fp8scope_server": set(),
    "fp8scope_dashboard": set(),
}


def _sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name lives"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_import_table(folder: str) -> None:
    """A package imports only the packages of ours that the design allows it."""
    package = FOLDERS[folder]
    for path in _sources(folder):
        ours = {name for name in _imports(path) if name in MAY_IMPORT} - {package}
        assert ours <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {ours - MAY_IMPORT[package]}"


@pytest.mark.parametrize("package", THIRD_PARTY)
def test_base_install_is_light(package: str) -> None:
    """The probe and the vocabulary use only what the base install brings (triton comes with CUDA torch).

    An integration uses the package it is for, too."""
    folder = next(key for key, value in FOLDERS.items() if value == package)
    for path in _sources(folder):
        foreign = {n for n in _imports(path) if n not in MAY_IMPORT and n not in sys.stdlib_module_names}
        name = path.relative_to(ROOT).as_posix()
        assert foreign <= THIRD_PARTY[package] | INTEGRATIONS.get(name, set()), f"{name} imports {foreign}"


@pytest.mark.parametrize("package", PUBLIC_NAMES)
def test_public_names(package: str) -> None:
    """What a package offers at its top is decided here, not by accident."""
    assert set(getattr(import_module(package), "__all__", ())) == PUBLIC_NAMES[package]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_holds_one_package(folder: str) -> None:
    """Nothing generic (`server`, `probe`) lands in site-packages."""
    packages = {p.name for p in (ROOT / folder).iterdir() if (p / "__init__.py").exists()}
    assert packages == {FOLDERS[folder]}


def test_the_vocabulary_does_not_import_torch() -> None:
    """The collector and the dashboard run on machines without torch."""
    code = (
        "import sys; import fp8scope_protocol.wire, fp8scope_protocol.rules, fp8scope_protocol.access; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_trainer_is_imported_unasked() -> None:
    """A job that attaches the probe pays for no integration."""
    modules = [
        path.relative_to(ROOT / "probe").with_suffix("").as_posix().replace("/", ".")
        for path in _sources("probe/fp8scope")
        if path.relative_to(ROOT).as_posix() not in INTEGRATIONS and not path.stem.endswith("_kernel")
    ]
    theirs = set().union(*INTEGRATIONS.values())
    code = f"import sys, {', '.join(modules)}; assert not {theirs!r} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_command_has_an_entry() -> None:
    """Each row of the console table names a module with main(argv)."""
    for module, _, _ in COMMANDS.values():
        assert callable(import_module(module).main)


def test_nothing_local_is_committed() -> None:
    """No absolute path of a developer's machine in a tracked file."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    needles = tuple("/" + name + "/" for name in ("work", "root", "home"))
    for name in listing.stdout.split():
        path = ROOT / name
        if not path.is_file() or path.suffix in (".png", ".ico"):
            continue
        text = path.read_text(errors="replace")
        assert not any(needle in text for needle in needles), f"{name} holds an absolute local path"


def test_files_are_one_noun_long() -> None:
    """A source file stays under 400 lines; beyond that it is no longer one thing."""
    for folder in FOLDERS:
        for path in _sources(folder):
            lines = path.read_text().count("\n")
            assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines; split it"
