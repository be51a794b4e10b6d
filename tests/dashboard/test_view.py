"""Views from addresses, wording, and the start of the service; no browser."""

import socket
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from fp8scope_dashboard.serve import login_address
from fp8scope_dashboard.settings import Settings, settings_from
from fp8scope_dashboard.view import View, fit, parse_view
from fp8scope_dashboard.wording import ago, clock, health, number
from fp8scope_protocol.documents import Number, RunDocument, SeriesDocument
from fp8scope_protocol.errors import Invalid


def series(role: str, orientation: str = "rowwise", format: str = "e4m3") -> SeriesDocument:
    return SeriesDocument(index=0, name="a", module="a", role=role, orientation=orientation, format=format,
                          scaling="tile 1x128", policy="current", live=True, depth=0, aliases=[])


@pytest.mark.parametrize(("query", "expected"), [
    ("", View()),
    ("?metric=distortion&role=weight&layer=a%26b.c", View(metric="distortion", role="weight", layer="a&b.c")),
    ("?first=3&last=9", View(first=3, last=9)),
    ("?first=9&last=3", View()),
    ("?first=-1&last=3", View()),
    ("?first=1e3&last=x", View()),
    ("?metric=nope&role=nope&orientation=up&window=7", View()),
    ("?window=100", View(window="100")),
    ("?%%%&=&&&role", View()),
])
def test_a_broken_address_falls_back(query: str, expected: View) -> None:
    """Unknown names and broken numbers in an address become the default, never an error."""
    assert parse_view(query) == expected


def test_a_view_fits_what_the_run_has() -> None:
    """Role, orientation and format that the run lacks are replaced by ones that go together."""
    have = [series("weight"), series("gradient", "columnwise", "e5m2")]
    view, choices = fit(View(role="activation"), have)
    assert (view.role, view.orientation, view.format) == ("weight", "rowwise", "e4m3")
    assert choices.roles == ("weight", "gradient")
    view, choices = fit(View(role="gradient"), have)
    assert (view.orientation, view.format) == ("columnwise", "e5m2")
    assert fit(View(), [])[1].roles == ()


@pytest.mark.parametrize(("view", "newest", "expected"), [
    (View(), 500, {}),
    (View(window="100"), 500, {"first": 401, "last": 500}),
    (View(window="1000"), 500, {"first": 0, "last": 500}),
    (View(window="100"), None, {}),
    (View(window="100", first=3, last=9), 500, {"first": 3, "last": 9}),
])
def test_steps_asked_for(view: View, newest: int | None, expected: dict[str, int]) -> None:
    """A window counts back from the newest step; a zoom wins over it."""
    assert view.steps(newest) == expected


@pytest.mark.parametrize(("value", "words"), [
    (None, "–"), ("NaN", "NaN"), ("Infinity", "+Inf"), ("-Infinity", "-Inf"), (0.0, "0"), (12.0, "12"),
    (0.00016383, "0.0001638"), (2.0e20, "2e+20"), (True, "1"),
])
def test_numbers_for_people(value: Number, words: str) -> None:
    """Not measured, NaN and infinities are told apart in words."""
    assert number(value) == words


@pytest.mark.parametrize(("ahead", "words", "odd"), [
    (None, "not known", False), (0.0, "agrees", False), (-20.0, "agrees", False), (1.9, "agrees", False),
    (3600.0, "3600 s ahead", True), (-7200.0, "7200 s behind", True),
])
def test_clocks(ahead: float | None, words: str, odd: bool) -> None:
    """What comes late is not at once a wrong clock; what comes before it was sent is."""
    said = clock(ahead)
    assert words in said[0]
    assert said[1] == odd


def test_how_long_ago() -> None:
    """Times are told in one unit; a clock that runs ahead is now."""
    now = datetime(2030, 1, 2, 12, 0, tzinfo=UTC)
    assert ago("2030-01-02T11:59:20+00:00", now) == "just now"
    assert ago("2030-01-02T11:58:00+00:00", now) == "2 min ago"
    assert ago("2030-01-02T12:58:00+01:00", now) == "2 min ago"
    assert ago("2030-01-02T13:00:00+00:00", now) == "just now"
    assert ago("2029-12-31T12:00:00+00:00", now) == "2 d ago"


@pytest.mark.parametrize(("changes", "state"), [
    ({}, "good"), ({"loss": "NaN"}, "bad"), ({"firing": 2}, "bad"), ({"lost": {"queue": 1}}, "warn"),
    ({"last_step": None}, "idle"), ({"active": False}, "idle"), ({"active": False, "firing": 1}, "bad"),
])
def test_health_names_the_worst_thing(changes: dict[str, Any], state: str) -> None:
    """Trouble comes before silence, silence before health."""
    fields: dict[str, Any] = {
        "id": "r", "name": "r", "created_at": "", "last_seen_at": "", "active": True, "last_step": 3,
        "loss": 1.0, "layers": 1, "layers_in_bf16": 0, "samples": 1, "batches": 1, "lost": {}, "firing": 0,
        "every": 1, "remote_control": True}
    assert health(RunDocument(**fields | changes))[0] == state


def test_the_token_goes_to_terminals_only() -> None:
    """The printed address carries the token on a terminal; a log file gets the way to it."""
    settings = Settings(token="f8s_secret", host="0.0.0.0")
    assert login_address(settings, 8051, with_token=True) == "http://127.0.0.1:8051/login#f8s_secret"
    assert "f8s_secret" not in login_address(settings, 8051, with_token=False)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment, then what is given; a broken port names its variable."""
    monkeypatch.setenv("FP8SCOPE_TOKEN", "f8s_t")
    environment = {"FP8SCOPE_DASHBOARD_PORT": "9000", "FP8SCOPE_COLLECTOR": "http://10.0.0.1:1/",
                   "FP8SCOPE_DASHBOARD_HOSTS": "Box, box.lan"}
    settings = settings_from(environment, host="::1")
    assert (settings.port, settings.collector, settings.host) == (9000, "http://10.0.0.1:1", "::1")
    assert {"box", "box.lan", "::1", "localhost"} <= set(settings.accepted_hosts)
    with pytest.raises(Invalid, match="FP8SCOPE_DASHBOARD_PORT"):
        settings_from({"FP8SCOPE_DASHBOARD_PORT": "many"})


def test_a_taken_port_is_one_line_and_exit_2() -> None:
    """The service says which port is taken and what to do, without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "fp8scope_dashboard.serve", "--port", str(port)], capture_output=True,
            text=True, env={"FP8SCOPE_TOKEN": "f8s_t", "PATH": ""}, check=False)
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert "FP8SCOPE_DASHBOARD_PORT" in done.stderr
    assert done.stderr.count("\n") == 1
