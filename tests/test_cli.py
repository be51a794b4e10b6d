"""The console: bad input is one clear line and exit code 2."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fp8scope.cli import COMMANDS


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fp8scope.cli", *arguments], capture_output=True, text=True,
                          timeout=120, env=os.environ | environment, check=False)


def test_help_lists_every_command() -> None:
    """What the table has, the usage shows."""
    done = _run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "unknown command 'trian'; known: demo, up, train"),
        (["train", "--preset", "dmeo", "--no-probe"], "near misses: demo"),
        (["train", "--steps", "0", "--no-probe"], "0"),
        (["train", "--no-probe", "--drill", "frozen-amax", "--drill-block", "layers.9"], "layers."),
        (["demo", "--steps", "12"], "must be at least"),
        (["up", "--port", "99999"], "must be 1 to 65535"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], said: str, tmp_path: Path) -> None:
    """No traceback, whatever was typed."""
    done = _run(*arguments, FP8SCOPE_HOME=str(tmp_path))
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert said in last
    assert "Traceback" not in done.stderr


def test_a_port_in_use_names_the_port_and_the_option(tmp_path: Path) -> None:
    """`up` says so before it starts anything."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _run("up", "--port", str(port), FP8SCOPE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"fp8scope up: port = {port}: cannot listen there")
    assert "--port" in done.stderr
