"""What all tests share: an environment without settings of whoever runs them."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("FP8SCOPE_")]:
            patch.delenv(name)
        yield
