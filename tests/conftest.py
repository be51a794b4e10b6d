"""What all tests share: an environment without settings of whoever runs them, and Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("FP8SCOPE_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Case -> differences: what `tell` of the test's module returns where Triton interprets its kernels. It
    does so in a whole process or not at all."""
    root = Path(__file__).parents[1]
    module = ".".join(request.path.relative_to(root).with_suffix("").parts)
    code = f"import json; from {module} import tell; print(json.dumps(tell()))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, stdout=subprocess.PIPE,
                          text=True, timeout=290, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=root)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found
