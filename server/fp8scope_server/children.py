"""Child processes that never outlive their parent."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from fp8scope_protocol.errors import Fp8scopeError

_PR_SET_PDEATHSIG = 1


class Child:
    """One child process with its output in a log file. Leaving the context ends it.

    It runs in a session of its own, so that Ctrl-C reaches the parent alone and the parent decides the
    order of ending; where the kernel can (Linux) it is told to end when the parent dies in any way.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str] = (), *, log: Path,
                 environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        parent = os.getpid()
        with _opened(log) as output, _held_signals():
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {}),
                preexec_fn=lambda: _die_with(parent),
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self, *, seconds: float = 20.0) -> None:
        """SIGTERM, then SIGKILL to its whole session after `seconds`."""
        if self.running:
            self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def last_lines(self, count: int = 12) -> str:
        """The end of its log, for a message about its failure."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()


def check_running(children: Sequence[Child]) -> None:
    """Raise, with the end of its log, when one of `children` has ended by itself."""
    for child in children:
        if not child.running:
            raise Fp8scopeError(f"the {child.name} ended with code {child.process.returncode}; what it "
                                f"stored is kept; its log {child.log} ends with:\n" + child.last_lines())


@contextmanager
def _held_signals() -> Iterator[None]:
    """Signals to end wait until a child has been started: what their handlers raise is swallowed where
    Python runs callbacks at a fork."""
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number))
                for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _opened(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("wb")
    except OSError as error:
        raise Fp8scopeError(f"cannot write {log} ({error.strerror}); set FP8SCOPE_HOME to a folder that this "
                            "user may write") from None


def _die_with(parent: int) -> None:
    """In the child, before exec: ask for SIGTERM at the parent's death; end now if that already came."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
