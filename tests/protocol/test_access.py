"""Host, Origin and token, on HTTP and websockets."""

import os
import stat
from pathlib import Path

import pytest

from fp8scope_protocol import access
from fp8scope_protocol.errors import Invalid


def _scope(headers: dict[str, str], path: str = "/x", kind: str = "http") -> access.Scope:
    pairs = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
    return {"type": kind, "path": path, "headers": pairs}


async def _app(scope: access.Scope, receive: access.Receive, send: access.Send) -> None:
    raise AssertionError("reached")


GUARD = access.Guard(_app, token="secret")
GOOD = {"host": "127.0.0.1:8050", "authorization": "Bearer secret"}


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (GOOD, None),
        (GOOD | {"origin": "http://127.0.0.1:8050"}, None),
        (GOOD | {"host": "localhost:8050"}, None),
        (GOOD | {"host": "[::1]:8050"}, None),
        ({"host": "127.0.0.1:8050", "cookie": f"a=b; {access.COOKIE}=secret"}, None),
        ({"host": "127.0.0.1:8050"}, 401),
        (GOOD | {"authorization": "Bearer wrong"}, 401),
        (GOOD | {"authorization": "Basic secret"}, 401),
        (GOOD | {"host": "attacker.example:8050"}, 421),
        (GOOD | {"host": ""}, 421),
        (GOOD | {"host": "["}, 421),
        (GOOD | {"host": "a]b"}, 421),
        (GOOD | {"origin": "http://["}, 403),
        (GOOD | {"origin": "http://attacker.example"}, 403),
        (GOOD | {"origin": "http://127.0.0.1:9999"}, 403),
        (GOOD | {"origin": "null"}, 403),
    ],
)
def test_guard(kind: str, headers: dict[str, str], status: int | None) -> None:
    """Every request needs a known Host, a known Origin if it has one, and the token."""
    refusal = GUARD.refusal(_scope(headers, kind=kind))
    assert (refusal and refusal[0]) == status


def test_open_paths_need_no_token_but_a_known_host() -> None:
    """Health checks come without a token; a rebound name still gets nothing."""
    assert GUARD.refusal(_scope({"host": "localhost"}, path="/healthz")) is None
    refusal = GUARD.refusal(_scope({"host": "evil.example"}, path="/healthz"))
    assert refusal is not None
    assert refusal[0] == 421


def test_token_file_is_private_and_stable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start writes it with mode 0600; later ones read it."""
    monkeypatch.delenv("FP8SCOPE_TOKEN", raising=False)
    monkeypatch.setenv("FP8SCOPE_TOKEN_FILE", str(tmp_path / "deep" / "token"))
    token = access.ensure_token()
    assert access.ensure_token() == token == access.read_token()
    assert stat.S_IMODE((tmp_path / "deep" / "token").stat().st_mode) == 0o600
    assert len(token) > 40


@pytest.mark.parametrize("content", [b"", b"\n", "t\u00f6k".encode()])
def test_a_token_file_without_a_token_is_named(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty or garbled file is refused in one line; it is neither used nor overwritten."""
    monkeypatch.delenv("FP8SCOPE_TOKEN", raising=False)
    monkeypatch.setenv("FP8SCOPE_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(Invalid, match="holds no token; remove it"):
        access.ensure_token()
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert (tmp_path / "token").read_bytes() == content


@pytest.mark.parametrize("token", ["sec ret", "sec\nret", "sec\x00ret", "s\u00e9cret", "\n"])
def test_a_token_that_no_header_can_hold_is_refused_unseen(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variable's name, without the value; spaces and line ends around a token are dropped."""
    monkeypatch.setattr(os, "environ", {"FP8SCOPE_TOKEN": token})  # the real one holds no NUL
    for read in (access.read_token, access.ensure_token):
        with pytest.raises(Invalid, match=r"FP8SCOPE_TOKEN = '\(hidden\)': is no token") as refused:
            read()
        assert "ret" not in str(refused.value)
    monkeypatch.setattr(os, "environ", {"FP8SCOPE_TOKEN": " f8s_t\n"})
    assert access.read_token() == access.ensure_token() == "f8s_t"


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With why. A named one that is not there is an error to who reads, and written by who serves; without a
    name there may be no file yet."""
    monkeypatch.delenv("FP8SCOPE_TOKEN", raising=False)
    monkeypatch.setenv("FP8SCOPE_TOKEN_FILE", str(tmp_path))
    for read in (access.read_token, access.ensure_token):
        with pytest.raises(Invalid, match=f"FP8SCOPE_TOKEN_FILE = '{tmp_path}': cannot be read"):
            read()
    (tmp_path / "here").write_text("two words")
    monkeypatch.setenv("FP8SCOPE_TOKEN_FILE", str(tmp_path / "here"))
    with pytest.raises(Invalid, match="holds no token") as refused:
        access.read_token()
    assert "words" not in str(refused.value)
    monkeypatch.setenv("FP8SCOPE_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(Invalid, match="there is no such file"):
        access.read_token()
    assert access.ensure_token() == access.read_token()
    monkeypatch.delenv("FP8SCOPE_TOKEN_FILE")
    monkeypatch.setenv("FP8SCOPE_HOME", str(tmp_path / "empty"))
    assert access.read_token() is None
