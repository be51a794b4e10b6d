"""How a signal to end becomes an exception that unwinds through every `with`.

Python notes when KeyboardInterrupt itself, and no class of its kind, leaves code that `exec` runs, as that of
every dataclass while its module is imported. A program run by -m that caught it later and ended in order was
then still killed by SIGINT at its exit: 9 of 536 starts of `fp8scope up` that were told to end.
"""

import signal
from typing import NoReturn


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came."""


def interrupt(*_: object) -> NoReturn:
    """A signal's handler."""
    raise Interrupted


def raise_on_terminate() -> None:
    """SIGTERM and Ctrl-C end this process through every `with` block, at its start too.

    A shell starts a background job with SIGINT ignored, and Python then leaves it so. uvicorn, when it runs,
    ends requests first and then sends itself the signal again.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
