"""No token and no password reaches a log; a token that cannot be used stops no job and is told of once."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fp8scope
from fp8scope.settings import OFFLINE
from fp8scope_protocol.errors import Invalid

Until = Callable[[Callable[[], bool]], None]


def train(collector: str, folder: Path, until: Until, log: pytest.LogCaptureFixture) -> None:
    """A job of one step; ends when its sender has said something."""
    log.set_level(logging.DEBUG, logger="fp8scope")
    scope = fp8scope.attach(nn.Linear(4, 4), run="r", collector=collector, spool=folder / "spool")
    scope.step(0)
    until(lambda: "batches are kept in" in log.text or "the sender stopped" in log.text)
    scope.close()
    assert list((folder / "spool").rglob("*.f8ss"))


@pytest.mark.parametrize("token", ["xy zzy", "xy\nzzy", "xyzzy\u00e9"])
def test_a_bad_token_is_told_of_without_the_token(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, where the probe attaches; the sender goes on trying."""
    monkeypatch.setenv("FP8SCOPE_TOKEN", token)
    train("http://127.0.0.1:9", tmp_path, until, caplog)
    assert [one.getMessage().count("FP8SCOPE_TOKEN = '(hidden)'") for one in caplog.records].count(1) == 1
    assert "zzy" not in caplog.text
    assert "the sender stopped" not in caplog.text


def test_a_token_file_that_cannot_be_read_is_told_of_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which file, and why, once, as a warning; offline none is needed."""
    monkeypatch.delenv("FP8SCOPE_TOKEN", raising=False)
    monkeypatch.setenv("FP8SCOPE_TOKEN_FILE", str(tmp_path))
    fp8scope.attach(nn.Linear(4, 4), run="r", collector=OFFLINE, spool=tmp_path / "offline").close()
    assert caplog.text == ""
    train("http://127.0.0.1:9", tmp_path, until, caplog)
    [first] = [one for one in caplog.records if "FP8SCOPE_TOKEN_FILE" in one.getMessage()]
    assert first is caplog.records[0]
    assert first.levelno == logging.WARNING
    assert f"'{tmp_path}': cannot be read (Is a directory)" in first.getMessage()


@pytest.mark.parametrize("proxy", ["http://user:xy#zzy@h:1", "ftp://user:xyzzy@h:1",
                                   "http://user:xy/zzy@h:1", "http://user:xyzzy@h:port"])
def test_the_password_of_a_proxy_is_not_logged(
    proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the proxy's address is broken, too: the kind of the error is all that is told."""
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("FP8SCOPE_TOKEN", "f8s_t")
    train("http://collector.invalid:1", tmp_path, until, caplog)
    assert "xy" not in caplog.text.replace("proxy", "").replace("PROXY", "")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("name", ["FP8SCOPE_COLLECTOR", "FP8SCOPE_EXIT_SECONDS", "FP8SCOPE_SPOOL_BYTES"])
def test_a_bad_variable_is_refused_before_the_model_is_touched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the probe attaches, as a bad argument is, and never later."""
    monkeypatch.setenv(name, "http://user:secret@h")
    model: Any = nn.Linear(4, 4)
    with pytest.raises(Invalid) as refused:
        fp8scope.attach(model, run="r", spool=tmp_path)
    assert name.removeprefix("FP8SCOPE_").lower() in str(refused.value).lower()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    if name == "FP8SCOPE_COLLECTOR":
        assert "secret" not in str(refused.value)
