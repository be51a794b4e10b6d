"""The whole loop on this machine, as `make demo` runs it: train, break, notice, switch, return, control."""

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

import httpx
import msgspec
import pytest

from fp8scope_protocol.documents import RunDocument

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A data home that an unprivileged database server can enter, also when the tests run as root."""
    folder = Path(tempfile.mkdtemp(prefix="fp8scope-demo-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Two ports that are free now."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def _demo(home: Path, ports: tuple[int, int], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fp8scope.cli", "demo", "--port", str(ports[0]),
               "--dashboard-port", str(ports[1]), *arguments]
    return subprocess.Popen(command, env=os.environ | {"FP8SCOPE_HOME": str(home)}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def _processes(home: Path) -> list[str]:
    """Command lines of all processes that were started for `home`."""
    return list(_processes_by_id(home).values())


def _processes_by_id(home: Path) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"FP8SCOPE_HOME={home}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if line.strip():
                    found[int(folder.name)] = line
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
    return found


def _runs(home: Path, ports: tuple[int, int]) -> list[RunDocument]:
    token = (home / "token").read_text().strip()
    reply = httpx.get(f"http://127.0.0.1:{ports[0]}/api/v1/runs", trust_env=False, timeout=10,
                      headers={"authorization": f"Bearer {token}"})
    reply.raise_for_status()
    return msgspec.json.decode(reply.content, type=list[RunDocument])


@pytest.mark.timeout(600)
def test_the_whole_loop(home: Path, ports: tuple[int, int]) -> None:
    """A frozen amax history is noticed, the layer goes to BF16 on both ranks at one step and comes back."""
    process = _demo(home, ports, "--no-serve", "--json")
    output, messages = process.communicate(timeout=580)
    assert process.returncode == 0, messages
    story = msgspec.json.decode(output.strip().splitlines()[-1])
    assert story["batches_lost"] == 0
    assert story["steps"] == 110
    assert story["samples_stored"] > 100_000
    assert story["fault_step"] <= story["alert_step"] < story["return_step"]
    assert len(story["fallback_step_by_rank"]) == 2
    assert len(set(story["fallback_step_by_rank"])) == 1
    assert story["alert_step"] < story["fallback_step_by_rank"][0] < story["return_step"]
    assert story["loss_after"] < story["loss_before"]
    assert _processes(home) == []


@pytest.mark.timeout(240)
def test_a_second_start_finds_the_old_run_and_ctrl_c_leaves_nothing(
    home: Path, ports: tuple[int, int]
) -> None:
    """Ctrl-C in the middle of training ends every process; what was stored before is still there."""
    process = _demo(home, ports)
    try:
        deadline = time.monotonic() + 180
        names: set[str] = set()
        while "demo-2" not in names and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.5)
            try:
                names = {run.id for run in _runs(home, ports)}
            except (httpx.HTTPError, OSError):
                continue
        assert names >= {"demo", "demo-without-rule", "demo-2"}
        assert len(_processes(home)) >= 6  # this one, two services, the database, a launcher and its ranks
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert _processes(home) == []


@pytest.mark.timeout(240)
def test_a_collector_that_dies_is_one_clear_message(home: Path, ports: tuple[int, int]) -> None:
    """The collector is killed while the demo asks it for its first run: no traceback, nothing left behind."""
    process = _demo(home, ports)
    try:
        log = home / "logs" / "demo.log"
        log.unlink(missing_ok=True)
        deadline = time.monotonic() + 120
        while not log.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        [collector] = [pid for pid, line in _processes_by_id(home).items() if "fp8scope_server.serve" in line]
        os.kill(collector, signal.SIGKILL)
        _, messages = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 2
    assert "fp8scope demo: the collector ended with code -9" in messages
    assert "Traceback" not in messages
    assert _processes(home) == []
