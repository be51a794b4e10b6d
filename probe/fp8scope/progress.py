"""How long work shows itself, with no further package: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable

BAR_SECONDS = 0.2
LINE_SECONDS = 10.0
WIDTH = 30


class Progress:
    """Batches done, and bytes left to read; the share is that of the bytes seen so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + (0.0 if self._terminal else LINE_SECONDS)
        self._most_left = 1

    def show(self, batches: int, left: Callable[[], int]) -> None:
        """Show where it stands, if that was not done a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (BAR_SECONDS if self._terminal else LINE_SECONDS)
        rest = left()
        self._most_left = max(self._most_left, rest)
        text = f"{self._name}  {batches:,} batches sent, {rest / 2**20:,.1f} MiB to read"
        if self._terminal:
            full = round(WIDTH * (1 - rest / self._most_left))
            print(f"\r\x1b[K{text} [{'=' * full}{' ' * (WIDTH - full)}]", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._terminal:
            print(file=sys.stderr)
