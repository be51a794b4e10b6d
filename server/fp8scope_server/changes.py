"""Who waits for news of a run, and whether there is any."""

import asyncio
import contextlib


class Changes:
    """A version per run that grows after each commit that changed the run. For one event loop."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Event] = {}

    def version(self, run_id: str) -> int:
        """How often the run changed since this collector started."""
        return self._versions.get(run_id, 0)

    def notify(self, run_id: str) -> None:
        """Say that the run changed. Call after the commit: who wakes up reads the database."""
        self._versions[run_id] = self.version(run_id) + 1
        if waiting := self._waiting.pop(run_id, None):
            waiting.set()

    async def wait(self, run_id: str, version: int, timeout: float) -> int:
        """The run's version once it differs from `version`, or after `timeout` seconds in any case."""
        if self.version(run_id) == version:
            waiting = self._waiting.setdefault(run_id, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting.wait(), timeout)
        return self.version(run_id)
