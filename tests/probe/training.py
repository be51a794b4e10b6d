"""Starts, watches, ends and kills train_job.py."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE = 90.0
"""Seconds until a test gives up waiting for the job; its start loads torch, on a loaded machine."""


class TrainingJob:
    """One life of a run in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, run: str = "run", **environment: str) -> None:
        folder.mkdir()
        self.folder = folder
        command = [sys.executable, str(Path(__file__).parent / "train_job.py"), run, str(folder), *arguments]
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(command, env=os.environ | environment, stdout=self.log,
                                        stderr=self.log)

    def steps(self) -> int:
        """Finished so far."""
        path = self.folder / "steps"
        return int(path.read_text()) if path.exists() else 0

    def advance(self, steps: int) -> None:
        """Return when the job has finished `steps` further steps; fails if it has ended."""
        goal, deadline = self.steps() + steps, time.monotonic() + PATIENCE
        while self.steps() < goal:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, "training has stopped"
            time.sleep(0.01)

    def end(self) -> int:
        """Let it finish; the number of its steps. Fails unless it ends well."""
        (self.folder / "stop").touch()
        assert self.process.wait(PATIENCE) == 0, self.said()
        self.log.close()
        return self.steps()

    def kill(self) -> int:
        """SIGKILL; the number of steps it had finished."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()
        return self.steps()

    def said(self) -> str:
        """What it wrote to its streams."""
        return (self.folder / "log").read_text()

    def switches(self) -> list[dict[str, Any]]:
        """Changes of its layer's precision."""
        path = self.folder / "switches"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
