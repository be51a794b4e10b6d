"""The console: bad input is one clear line and exit code 2."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8scope.cli import COMMANDS
from fp8scope_protocol.errors import Invalid
from fp8scope_server.up import port_of


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
        (["trian"], "unknown command 'trian'; known: demo, up, sync, doctor, train, "),
        (["train", "--preset", "dmeo", "--no-probe"], "near misses: demo"),
        (["train", "--steps", "0", "--no-probe"], "0"),
        (["train", "--no-probe", "--drill", "frozen-amax", "--drill-block", "layers.9"], "layers."),
        (["demo", "--steps", "12"], "must be at least"),
        (["up", "--port", "99999"], "must be 1 to 65535"),
        (["up", "--port", "18050", "--dashboard-port", "18050"], "must not be the port of the collector"),
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


def test_ports_come_from_the_option_the_environment_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order; what is no port is refused by the variable's name."""
    monkeypatch.delenv("FP8SCOPE_PORT", raising=False)
    assert port_of(None, "FP8SCOPE_PORT", 8050) == 8050
    monkeypatch.setenv("FP8SCOPE_PORT", "9000")
    assert port_of(None, "FP8SCOPE_PORT", 8050) == 9000
    assert port_of(9001, "FP8SCOPE_PORT", 8050) == 9001
    monkeypatch.setenv("FP8SCOPE_PORT", "-1")
    with pytest.raises(Invalid, match="FP8SCOPE_PORT = '-1'"):
        port_of(None, "FP8SCOPE_PORT", 8050)


def test_a_home_that_cannot_be_written_is_one_line() -> None:
    """`up` names the file and what to set."""
    done = _run("up", "--port", "18050", "--dashboard-port", "18051", FP8SCOPE_HOME="/dev/null/x")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "'/dev/null/x/token': cannot be written" in done.stderr
    assert "FP8SCOPE_HOME" in done.stderr


@pytest.mark.parametrize("command", [
    ["-m", "fp8scope.cli", "up", "--port", "18050", "--dashboard-port", "18051"],
    ["-m", "fp8scope.cli", "sync", "."], ["-m", "fp8scope_server.serve"], ["-m", "fp8scope_dashboard.serve"],
])
def test_a_token_that_cannot_be_used_is_refused_at_the_start(command: list[str], tmp_path: Path) -> None:
    """One line that names the file or the variable and why; no token in it."""
    (tmp_path / "two").write_text("xy zzy")
    for variable, value, said in (("FP8SCOPE_TOKEN_FILE", str(tmp_path), "cannot be read (Is a directory)"),
                                  ("FP8SCOPE_TOKEN_FILE", str(tmp_path / "two"), "holds no token"),
                                  ("FP8SCOPE_TOKEN", "xy zzy", "(hidden)")):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120,
                              env=os.environ | {"FP8SCOPE_HOME": str(tmp_path), variable: value}, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert variable in done.stderr
        assert said in done.stderr
        assert "zzy" not in done.stderr


def test_up_ends_when_one_of_its_services_does(short_home: Path) -> None:
    """The collector is killed: `up` says so, ends the dashboard and returns 2."""
    up = subprocess.Popen(
        [sys.executable, "-m", "fp8scope.cli", "up", "--port", str(_free_port()), "--dashboard-port",
         str(_free_port())], env=os.environ | {"FP8SCOPE_HOME": str(short_home)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with up:
        assert up.stdout is not None
        login = up.stdout.readline()  # into a pipe, which may end in a log file
        assert login.startswith("dashboard")
        assert login.endswith(f"/login (token: {short_home / 'token'})\n")
        [collector] = [pid for pid in _children(up.pid) if b"fp8scope_server.serve" in
                       Path(f"/proc/{pid}/cmdline").read_bytes()]
        dashboard = [pid for pid in _children(up.pid) if pid != collector]
        os.kill(collector, signal.SIGKILL)
        _, said = up.communicate(timeout=90)
    assert up.returncode == 2
    assert said.startswith("fp8scope up: the collector ended with code -9")
    assert not any(Path(f"/proc/{pid}").exists() for pid in dashboard)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_heeds_a_signal_while_it_starts(short_home: Path, number: signal.Signals) -> None:
    """Started in a shell's background, where SIGINT is ignored, and told to end before it serves."""
    up = subprocess.Popen(
        [sys.executable, "-m", "fp8scope.cli", "up", "--port", str(_free_port()), "--dashboard-port",
         str(_free_port())], env=os.environ | {"FP8SCOPE_HOME": str(short_home)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    with up:
        deadline = time.monotonic() + 60
        while not (children := _children(up.pid)):
            assert up.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        up.send_signal(number)
        shown, said = up.communicate(timeout=90)
    assert (up.returncode, shown) == (130, "")
    assert "Traceback" not in said
    while any(_alive(pid) for pid in children):  # one that had just been started is told by the kernel
        assert time.monotonic() < deadline + 60
        time.sleep(0.01)


def test_a_signal_that_comes_while_a_child_is_started_is_not_lost(tmp_path: Path) -> None:
    """It comes in a callback at the fork, where Python swallows what a handler raises."""
    program = """
import os, signal, sys
from pathlib import Path
from fp8scope_server.children import Child
from fp8scope_server.interrupt import raise_on_terminate
raise_on_terminate()
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
with Child("sleeper", "timeit", ["-n1", "-r1", "import time; time.sleep(600)"], log=Path(sys.argv[1])):
    print("started", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "log")], capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.stdout == ""
    assert done.stderr.rstrip().endswith("interrupt.Interrupted")
    assert "Exception ignored" not in done.stderr


@pytest.fixture
def short_home() -> Iterator[Path]:
    """A data home that the database server can enter."""
    home = Path(tempfile.mkdtemp(prefix="fp8scope-test-", dir="/tmp"))
    home.chmod(0o755)
    yield home
    while _alive(_server(home)):  # its collector was killed
        time.sleep(0.05)
    shutil.rmtree(home)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _server(home: Path) -> int:
    """The database server's process, or one that is not there."""
    try:
        return int((home / "postgres" / "data" / "postmaster.pid").read_text().split("\n")[0])
    except (OSError, ValueError):
        return -1


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_interrupt_within_exec_ends_in_order(tmp_path: Path) -> None:
    """As in the code that makes a dataclass, of a module run by -m: caught later, it is forgotten, where
    Python's own ends the process by SIGINT in spite of that."""
    program = """
import signal
from fp8scope_server.interrupt import interrupt
try:
    exec("handler(15, None)", {"handler": HANDLER})
except KeyboardInterrupt:
    raise SystemExit(7)
"""
    for handler, code in (("interrupt", 7), ("signal.default_int_handler", -signal.SIGINT)):
        (tmp_path / "job.py").write_text(program.replace("HANDLER", handler))
        done = subprocess.run([sys.executable, "-m", "job"], check=False, timeout=60, cwd=tmp_path)
        assert done.returncode == code
