"""The embedded PostgreSQL: who starts it, who finds it, and that it never outlives its owner."""

import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_server import postgres_host
from fp8scope_server.postgres import EmbeddedPostgres

OWNER = """
import sys, time
from pathlib import Path
from fp8scope_server.postgres import EmbeddedPostgres
with EmbeddedPostgres(Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def connect(server: EmbeddedPostgres) -> psycopg.Connection:
    url = server.url()
    return psycopg.connect(host=str(url.query["host"]), user=url.username, dbname=url.database,
                           autocommit=True)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def servers_of(data: Path) -> list[int]:
    """Processes whose command line names the cluster."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(data) in command and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def test_data_outlives_a_clean_stop(folder: Path) -> None:
    """What was committed is there at the next start; between the two nothing runs."""
    with EmbeddedPostgres(folder) as server:
        assert server.owner
        pid = server.pid
        assert pid is not None
        with connect(server) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    assert not alive(pid)
    assert servers_of(server.data) == []
    with EmbeddedPostgres(folder) as server, connect(server) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_the_way_in_is_a_private_socket(folder: Path) -> None:
    """No TCP, a socket in a 0700 folder, peer authentication, and no other role or user gets in."""
    with EmbeddedPostgres(folder) as server, connect(server) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
        socket = Path(str(server.url().query["host"]))
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.data.stat().st_mode) == 0o700
        assert connection.execute("SELECT DISTINCT type, auth_method FROM pg_hba_file_rules").fetchall() == [
            ("local", "peer")]
        with pytest.raises(psycopg.OperationalError, match=r"no pg_hba\.conf entry"):
            psycopg.connect(host=str(socket), user="postgres", dbname="fp8scope")


def test_root_runs_it_as_somebody_else_who_owns_the_data_only(folder: Path) -> None:
    """For root: the server's user is unprivileged and can neither write beside its data nor plant a link
    where root writes."""
    if os.geteuid() != 0:
        pytest.skip("about root")
    with EmbeddedPostgres(folder) as server:
        owner = Path(f"/proc/{server.pid}").stat().st_uid
        assert owner == pwd.getpwnam("nobody").pw_uid
        assert server.data.stat().st_uid == owner
        for path in (server.directory, server.log, server.directory / "pg_hba.conf"):
            assert path.stat().st_uid == 0
            assert not stat.S_IMODE(path.stat().st_mode) & 0o022
        assert stat.S_IMODE(server.log.stat().st_mode) == 0o600


def test_a_second_process_connects_to_the_running_server(folder: Path) -> None:
    """Who comes second owns nothing, sees the same data, and leaves the server running."""
    with EmbeddedPostgres(folder) as first, connect(first) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        with EmbeddedPostgres(folder) as second:
            assert not second.owner
            with connect(second) as other:
                assert other.execute("SELECT answer FROM kept").fetchone() == (42,)
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_sigkill_of_the_owner_leaves_no_server_and_loses_nothing(folder: Path) -> None:
    """The kernel ends the server with its owner; the next start waits for it, recovers and goes on."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        guest = EmbeddedPostgres(folder)
        guest.start()
        assert not guest.owner
        with connect(guest) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        owner.kill()
    with EmbeddedPostgres(folder) as server:
        assert server.owner
        assert server.pid != pid
        assert not alive(pid)
        with connect(server) as connection:
            assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
    assert eventually(lambda: not servers_of(server.data))


def test_a_server_that_was_killed_itself_recovers(folder: Path) -> None:
    """SIGKILL of the server, as at the end of a container: the next start replays its log."""
    with EmbeddedPostgres(folder) as server:
        with connect(server) as connection:
            connection.execute("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS n")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
    with EmbeddedPostgres(folder) as server, connect(server) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (1000,)
        assert b"automatic recovery in progress" in server.log.read_bytes()


def test_a_process_id_that_another_process_has_now_is_no_server(folder: Path) -> None:
    """A left-over postmaster.pid that names a living process of another kind does not stop the start."""
    with EmbeddedPostgres(folder) as server:
        note = (server.data / "postmaster.pid").read_text()
    stale = "\n".join([str(os.getpid()), *note.split("\n")[1:]])
    (server.data / "postmaster.pid").write_text(stale)
    with EmbeddedPostgres(folder) as server:
        assert server.owner


def test_an_interrupted_first_start_leaves_no_half_cluster(empty: Path) -> None:
    """What an initdb that was cut short left behind is removed."""
    (empty / "postgres" / "data.new").mkdir(parents=True)
    (empty / "postgres" / "data.new" / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(empty) as server, connect(server) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_long_path_gets_a_short_private_socket(empty: Path) -> None:
    """Where the socket's path would be too long it lies in a 0700 folder under /tmp; a second process finds
    it, and it is gone afterwards."""
    deep = empty / ("x" * 100)
    with EmbeddedPostgres(deep) as server:
        socket = Path(str(server.url().query["host"]))
        assert socket.parent == Path("/tmp")
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        with EmbeddedPostgres(deep) as second, connect(second) as connection:
            assert not second.owner
            assert connection.execute("SELECT 1").fetchone() == (1,)
    assert not socket.exists()


def test_who_takes_over_is_found_by_the_others(empty: Path) -> None:
    """Of three on one server, with a socket under /tmp, the owner leaves: one takes over, with a socket
    elsewhere, and the third finds it there."""
    deep = empty / ("x" * 100)
    heir, third = EmbeddedPostgres(deep), EmbeddedPostgres(deep)
    with EmbeddedPostgres(deep) as owner, connect(owner) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        heir.start()
        third.start()
        before = owner.socket_folder
        assert not heir.deserted()
        assert not heir.owner
    assert heir.deserted()
    heir.restart()
    with closing(heir), closing(third):
        assert heir.owner
        assert not heir.deserted()
        assert not third.deserted()
        assert third.socket_folder != before
        with connect(third) as connection:
            assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_programs_that_the_servers_user_cannot_reach_are_copied(empty: Path) -> None:
    """The copy is complete enough to make and run a cluster, and open to read for all."""
    postgres_host.make_folder(empty, 0o711)
    programs = postgres_host.reachable_installation(empty)
    assert postgres_host.reachable_installation(empty) == programs
    nobody = pwd.getpwnam("nobody").pw_uid
    done = subprocess.run([str(programs / "bin" / "initdb"), "--version"], capture_output=True, text=True,
                          user=nobody if os.geteuid() == 0 else None, cwd="/", check=True)
    assert "PostgreSQL" in done.stdout


def test_root_is_told_about_a_closed_home(empty: Path) -> None:
    """A data home that the server's user cannot enter is named, with what to do."""
    if os.geteuid() != 0:
        pytest.skip("about root")
    empty.mkdir(mode=0o700)
    with pytest.raises(Fp8scopeError, match=r"nobody, who cannot enter .*; set FP8SCOPE_HOME"):
        EmbeddedPostgres(empty).start()


def test_another_version_of_postgresql_is_refused(folder: Path) -> None:
    """Data of another major version is left alone, with a message that names both."""
    (folder / "postgres" / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(Fp8scopeError, match="was written by PostgreSQL 9, installed is"):
        EmbeddedPostgres(folder).start()
