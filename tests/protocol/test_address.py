"""One check of a collector's address, and no secret in what it says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8scope.settings import read_settings
from fp8scope_dashboard.settings import settings_from
from fp8scope_protocol.address import RULE, check_address
from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.options import parse

GOOD = ["http://127.0.0.1:8050", "https://scope.example", "http://h/a/b", "http://[::1]:80", "HTTP://h:65535/",
        "http://a-b_c.d.", "http://b\N{LATIN SMALL LETTER U WITH DIAERESIS}cher.example:1"]
BAD: list[Any] = [
    "", " ", "h", "h:80", "ftp://x", "http://", "http:///a", "http://:80", "http:h", "//h", "http://h ", " http://h",
    "http://ho st", "http://h\n", "http\n://h", "http://h\t:80", "http://h:80\r\n", "http://h#", "http://h/#f8s_secret",
    "http://h?", "http://h/?token=secret", "http://@h", "http://user:secret@h", "http://user@h", "http://h:x",
    "http://h:0", "http://h:65536", "http://h:-1", "http://[::1", "http://[h]", "http://::1", "http://a..b",
    "http://a,b", "http://h\\x", "http://h\N{NO-BREAK SPACE}", "http://" + 64 * "a", 5, None, b"http://h",
]


def attach(address: str) -> None:
    read_settings({"FP8SCOPE_COLLECTOR": address})


def argument(address: str) -> None:
    read_settings({}, collector=address)


def train(address: str) -> None:
    parse(["--collector", address])


def dashboard(address: str) -> None:
    settings_from({}, collector=address)


@pytest.mark.parametrize("address", GOOD)
def test_addresses_are_kept(address: str) -> None:
    """Host names, IPv4, IPv6, a port, a path."""
    assert check_address("collector", address) == address


@pytest.mark.parametrize("address", BAD)
def test_what_is_no_address_is_named_without_secrets(address: Any) -> None:
    """Spaces, line ends, fragments, queries, users, no host, no port; what could be a secret is not shown."""
    with pytest.raises(Invalid) as refused:
        check_address("collector", address)
    assert refused.value.rule == RULE
    assert "secret" not in str(refused.value)
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize("given", [attach, argument, train, dashboard])
def test_the_check_is_the_same_everywhere(
    given: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment, argument, option, and the dashboard's; so are the words."""
    monkeypatch.setenv("FP8SCOPE_HOME", str(tmp_path))
    for address in BAD:
        if isinstance(address, str) and address:
            with pytest.raises(Invalid, match="collector") as refused:
                given(address)
            assert refused.value.rule.startswith(RULE), address
            assert "secret" not in str(refused.value)
    given("http://h:80")
