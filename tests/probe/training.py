"""Starts, watches, ends and kills train_job.py."""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from tests.ranks import forked

PATIENCE = 90.0
"""Seconds until a test gives up waiting for the job; its start loads torch, on a loaded machine."""


class TrainingJob:
    """One life of a run in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, run: str = "run", **environment: str) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "log").touch()
        self.process = forked(_train, folder / "log", os.environ | environment,
                              [run, str(folder), *arguments])

    def steps(self) -> int:
        """Finished so far."""
        path = self.folder / "steps"
        return int(path.read_text()) if path.exists() else 0

    def advance(self, steps: int) -> None:
        """Return when the job has finished `steps` further steps; fails if it has ended."""
        goal, deadline = self.steps() + steps, time.monotonic() + PATIENCE
        while self.steps() < goal:
            self.check()
            assert time.monotonic() < deadline, "training has stopped"
            time.sleep(0.01)

    def end(self) -> int:
        """Let it finish; the number of its steps. Fails unless it ends well."""
        (self.folder / "stop").touch()
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0, self.said()
        return self.steps()

    def kill(self) -> int:
        """SIGKILL; the number of steps it had finished."""
        self.process.kill()
        self.process.join()
        return self.steps()

    def check(self) -> None:
        """Fails if it has ended."""
        assert self.process.exitcode is None, self.said()

    def said(self) -> str:
        """What it wrote to its streams."""
        return (self.folder / "log").read_text()

    def switches(self) -> list[dict[str, Any]]:
        """Changes of its layer's precision."""
        path = self.folder / "switches"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _train(log: Path, environment: dict[str, str], arguments: list[str]) -> None:
    """In the new process: what it says goes to `log`."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["train_job.py", *arguments]
    runpy.run_path(str(Path(__file__).with_name("train_job.py")), run_name="__main__")
